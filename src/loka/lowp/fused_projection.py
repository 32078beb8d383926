"""One linear and the activation behind it in FP8, as an autograd node whose other parts the compiler sees.

    z = x W^T (+ b),   y = activation(z)                   forward: one kernel (kernels.fused_linear), or a bare GEMM where there is no activation
    g = dy * activation'(z);   dx = g W,   dW = g^T x      backward: FP8 GEMMs

It is for linears that stand alone, such as HSTU's uvqk and output linears or the cross layers of DCNv2: nothing bounds their output, so FP8 does not travel on, and what
is left to save is reading tensors twice. A quantiser needs the largest magnitude before it can start. Here that maximum, the slope of the activation and, in inference,
the quantisation itself are written in plain torch: torch.compile joins them to the kernel that makes the tensor (a norm, a residual add, the concatenation of the
gradients of u, v, q and k), where a kernel of ours would read it once more. Counted in bytes for the gradient of HSTU's uvqk, a value costs 10 instead of 14 (the bf16
model: 6). The transposes that training needs come from kernels.quantize, which compilers do not write well. Run without torch.compile the kernels do all of it, by the
same law (loka.formats). Inductor leaves out the rounding to 16 bits between what makes x and its quantisation, so compiled and eager numbers are not the same bits: behind a
BlockNorm in bf16 3 % of the values are the neighbouring FP8 number.

Scales. An x that comes out of a BlockNorm has the static scale 1/16 (`bounded_input`, see fused_tower). Otherwise x has one scale from its own largest value in training,
where x and x^T must share it, and one per row in inference, where a row's maximum is at hand when the row is made. Weights and gradients as in FusedTower.

`epilogue=False` leaves the activation to the compiler too: the GEMM is then the library's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from loka.formats import ROW, TENSOR, QTensor, Spec, block_amax, scale_from_amax
from loka.kernels.fused_linear import fused_linear
from loka.kernels.fused_linear.reference import activation_slope, apply_activation
from loka.kernels.quantize import quantize, quantize_both
from loka.lowp.fused_tower import FusedTower
from loka.lowp.tower_function import Layout, Link, TowerPrecision, multiply, run_plain

__all__ = ["FusedProjection"]

_TENSOR = Spec.parse("e4m3:tensor")
_ROW = Spec.parse("e4m3:row")
# One scale per tensor that is found outside the quantiser; made here, since torch 2.11 cannot trace the making of a Spec.
_GIVEN = {name: Spec.parse(f"{name}:tensor:static") for name in ("e4m3", "e5m2")}
_STATIC = _GIVEN["e4m3"]


def _quantize_both(x: Tensor, spec: Spec, backend: str) -> tuple[QTensor, QTensor]:
    """x and x^T under a dynamic spec. Compiled, the scale of a whole tensor is found where the compiler can join it to what made x."""
    if spec.block != TENSOR or not torch.compiler.is_compiling() or x.numel() == 0:
        return quantize_both(x, spec, spec, backend=backend)
    # Row by row first: that reduction has the loops of what makes the rows, so it costs no read of its own.
    scale = scale_from_amax(block_amax(x, ROW).amax(), spec)
    given = _GIVEN[spec.format.name]
    return quantize_both(x, given, given, scale=scale, transpose_scale=scale, backend=backend)


def _forward(
    a: QTensor, w: QTensor, bias: Tensor | None, layout: Layout, *, epilogue: bool, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """y, and z where it is wanted and an activation makes it differ from y."""
    activation = layout.links[0].activation
    if activation == "none" or not epilogue:
        z = run_plain(a, w, bias, layout)
        return (z, None) if activation == "none" else (apply_activation(z, activation), z)
    backend = layout.precision.fused_backend
    result = fused_linear(
        a, w, out=layout.dtype, bias=bias, norm_block=0, activation=activation, keep=keep, backend=backend
    )
    assert isinstance(result.y, Tensor)
    assert not isinstance(result.z, QTensor)
    return result.y, result.z


class _Projection(torch.autograd.Function):
    """x [M, K], scale [], weight [N, K], bias [N] or None -> y [M, N]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout, epilogue: bool
    ) -> Tensor:
        backend = layout.precision.quantize_backend
        if layout.bounded_input:
            a, a_t = quantize_both(x, _STATIC, _STATIC, scale=scale, transpose_scale=scale, backend=backend)
        else:
            a, a_t = _quantize_both(x, _TENSOR, backend)
        w, w_t = quantize_both(weight, _TENSOR, layout.precision.weight_t_spec, backend=backend)
        y, z = _forward(a, w, bias, layout, epilogue=epilogue, keep=True)
        ctx.save_for_backward(a_t.data, a_t.scale, w_t.data, w_t.scale, z)
        ctx.layout, ctx.dtypes = layout, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_t, x_scale, w_t, w_scale, z = ctx.saved_tensors
        layout, precision = ctx.layout, ctx.layout.precision
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        g = grads[0]
        if z is not None:
            g = (g.float() * activation_slope(z.float(), layout.links[0].activation)).to(layout.dtype)
        q, q_t = _quantize_both(g, precision.gradient_spec, precision.quantize_backend)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = multiply(q, QTensor(w_t, w_scale, precision.weight_t_spec), layout.dtype, layout)
            dx = dx if dx.dtype == x_dtype else dx.to(x_dtype)
        if ctx.needs_input_grad[2]:
            dw = multiply(q_t, QTensor(x_t, x_scale, _STATIC), w_dtype, layout)
        db = None if bias_dtype is None else g.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, None, dw, db, None, None


class FusedProjection(FusedTower):
    """Stands in for an nn.Linear and the activation behind it, under the linear's own parameter names. Make one with `FusedProjection.of`.

    Whoever replaces a linear by one with an activation takes the activation's own module out: nn.Identity() in its place.
    """

    epilogue: bool
    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(
        cls,
        linear: nn.Linear,
        *,
        activation: str = "none",
        bounded_input: bool = False,
        epilogue: bool = True,
        precision: TowerPrecision | None = None,
    ) -> "FusedProjection":
        """Share the parameters of a linear. `bounded_input` promises that x comes out of a BlockNorm; `epilogue`: the activation inside the GEMM's kernel."""
        made = cls.replacing(linear, [Link("", 0, activation)], bounded_input=bounded_input, precision=precision)
        assert isinstance(made, FusedProjection)
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made.epilogue = epilogue
        if "bias" not in made._parameters:
            made.register_parameter("bias", None)
        made.__dict__["_linears"] = (made,)  # whoever exchanges a parameter (a sharder, weight tying) does so here
        return made

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the input's type, or autocast's where it is on."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if x.shape[-1] != self.in_features:
            raise ValueError(f"this projection takes [..., {self.in_features}], got {tuple(x.shape)}")
        layout, flat = self.layout(dtype, self.bounded_input), x.reshape(-1, self.in_features)
        with torch.autocast(kind, enabled=False):
            if self.needs_gradient(x):
                y: Tensor = _Projection.apply(  # type: ignore[no-untyped-call]
                    flat, self._scale, self.weight, self.bias, layout, self.epilogue
                )
            else:
                a, w = self._quantize(flat.detach()), self._quantized_weights()[0]
                y, _ = _forward(a, w, self.bias, layout, epilogue=self.epilogue, keep=False)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _quantize(self, x: Tensor) -> QTensor:
        """For inference: written in torch where a compiler joins it to what makes x."""
        backend = self.precision.quantize_backend
        if backend == "auto" and torch.compiler.is_compiling():
            backend = "reference"
        if self.bounded_input:
            return quantize(x, _STATIC, scale=self._scale, backend=backend)
        return quantize(x, _ROW, backend=backend)

    def extra_repr(self) -> str:
        """Shape, activation and precision."""
        state = ", frozen" if self.frozen else ""
        return f"{self.in_features} -> {self.out_features}, {self.links[0].activation}, {self.precision}{state}"
