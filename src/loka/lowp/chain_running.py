"""Run a chain in FP8 with or without gradients, run it exactly for comparison, and measure its error on sampled rows.

The kernels are called in `chain_forward` and `chain_backward`.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.formats import QTensor, scale_from_amax
from loka.kernels.activation import activate
from loka.kernels.dropout import Dropout, factor_of, keep_mask
from loka.kernels.fused_linear import NORM_BLOCK
from loka.kernels.norm_quantize import norm_quantize
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm.call import OUT_DTYPES
from loka.lowp.chain_forward import quantize_input, run_link
from loka.lowp.chain_function import STATIC_SPEC, ChainTensors, Layout, Link
from loka.lowp.chain_node import ChainFunction
from loka.lowp.chain_parts import ChainConfig
from loka.lowp.chain_weights import ChainWeights
from loka.lowp.folding import fold
from loka.lowp.health import FORWARD, record, row_error, sampled_rows, turn_of
from loka.lowp.leaving import refuse_dtype
from loka.lowp.origins import ORIGINS, Normed, Origins
from loka.lowp.scaling import find_amax
from loka.nn.norm import BlockNorm


class RunningChain(ChainWeights):
    """The execution of a chain, see `loka.lowp.chain`."""

    def __init__(self, config: ChainConfig) -> None:
        super().__init__(config)
        self.health: list[Tensor] | None = None  # one vector of counters per link, while a Guard is attached
        self.watching = False

    def layout(self, dtype: torch.dtype) -> Layout:
        """Return the description of the chain that the autograd node needs besides tensors."""
        types = tuple(linear.weight.dtype for linear in self.linears)
        biases = tuple(
            part.linear.weight.dtype if part.folds else None if part.linear.bias is None else part.linear.bias.dtype
            for part in self.parts
        )
        dropout = tuple(part.find_p() for part in self.parts)
        return Layout(
            self.links,
            self.precision,
            dtype,
            types,
            biases,
            self.primed,
            self.gradients_primed,
            self.input_scale is not None,
            dropout,
        )

    @staticmethod
    def draw_seed(layout: Layout, device: torch.device) -> Tensor | None:
        """Return a dropout seed for one call, from torch's generator on the device; None if nothing is dropped."""
        return torch.randint(2**62, (1,), device=device) if any(layout.dropout) else None

    def tensors(self, seed: Tensor | None = None) -> ChainTensors:
        """Return the chain's current tensors; without a seed nothing is dropped.

        Magnitudes are collected in training, while scales are unknown, and in serving to count saturation, but not in
        evaluation between training steps, unless these steps run in eval mode, too.
        """
        norms = [None if part.folds else part.norm for part in self.parts]
        weights, biases = zip(*self._parameters(), strict=True)
        counts = self.training or self.steps_in_eval or self.frozen is not None or not self.primed
        return ChainTensors(
            weights,
            biases,
            tuple(getattr(norm, "weight", None) for norm in norms),
            tuple(getattr(norm, "bias", None) for norm in norms),
            tuple(bound if link.bounded else None if s is None else s.scale for link, s, bound in zip(self.links, self.out, self.bounds, strict=True)),
            tuple(None if s is None or not counts else s.pending for s in self.out),
            tuple(None if s is None else s.scale for s in self.grad),
            tuple(None if s is None else s.pending for s in self.grad),
            seed,
        )  # fmt: skip

    def compute(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the chain as `Chain.run`, and also return the dropout seed."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if dtype not in OUT_DTYPES:
            refuse_dtype(self.name, dtype)
        width = self.linears[0].in_features
        if x.shape[-1:] != (width,):
            raise ValueError(f"{self.name} takes [..., {width}], got {tuple(x.shape)}")
        if x.dim() != 2 and any(part.folds for part in self.parts):
            raise ValueError(
                f"{self.name}: a batch norm is folded into it, so it takes only [rows, {width}]; got {tuple(x.shape)}"
            )
        if not torch.compiler.is_compiling():
            self._refuse_weights()
            if x.numel():  # an empty batch has no magnitudes
                self.notice_unfiled()
            if self.given is not None and not x.is_inference():  # inference tensors have no version counter
                self.given.append((x, x._version))
        flat, seed = x.reshape(-1, width), None
        # hidden from function modes: a compiler cannot trace their side effects inside an autograd function
        with torch.autocast(kind, enabled=False), torch._C.DisableTorchFunction():
            if flat.shape[0] == 0:
                y = self.run_exactly(flat.to(dtype))
            else:
                layout = self.layout(dtype)
                seed = self.draw_seed(layout, x.device)
                if self.needs_gradient(x):
                    y = ChainFunction.apply(flat, self.input_scale, layout, *self.tensors(seed).flatten())  # type: ignore[no-untyped-call]
                else:
                    made = None if self.shared is None else self.shared.find(x)
                    made = self._normalize_input(x, layout) if made is None else made
                    y = self.infer(flat.detach() if made is None else made, layout, seed, of=x)
                if self.watching and self.health is not None:
                    self.look(flat, y, seed)
        # no view where none is needed: a checkpoint's output that is a view cannot be written to in place
        return (y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.linears[-1].out_features)), seed

    def _refuse_weights(self) -> None:
        """Raise if weights are sharded separately, or made by hooks of their linears: the head reads all of them first."""
        if made := [
            link.linear
            for link, linear in zip(self.links[1:], self.linears[1:], strict=True)
            if "weight" in linear.__dict__  # not a parameter, and not a property, as a parametrization's is
        ]:
            raise ValueError(
                f"{self.name}: the weight of {', '.join(made)} is made by a hook (prune, weight_norm), "
                "which runs after the chain has read it; hint: loka.revert(model), and convert again with the hook"
            )
        if apart := [
            link.linear
            for link, linear in zip(self.links, self.linears, strict=True)
            if hasattr(linear.weight, "device_mesh")
        ]:
            raise ValueError(
                f"{self.name}: {', '.join(apart)} is sharded separately from the rest of its chain; hint: "
                "fully_shard a module that contains the whole chain"
            )

    def needs_gradient(self, x: Tensor) -> bool:
        """Return whether to run the differentiable form.

        A frozen chain has none, and raises if x requires a gradient.
        """
        if self.frozen is None:
            return torch.is_grad_enabled()
        if torch.is_grad_enabled() and x.requires_grad:
            raise ValueError(
                f"{self.name} is frozen for serving and has no gradient, but its input requires one; hint: "
                "torch.no_grad(), or model.train()"
            )
        return False

    def infer(self, x: Tensor | QTensor, layout: Layout, seed: Tensor | None, of: Tensor | None = None) -> Tensor:
        """Run the chain without gradients.

        Args:
            x: [M, K] in high precision or already quantized.
            layout: from `layout`.
            seed: from `draw_seed`.
            of: the tensor the head was called with, to share its quantized copy with other chains.
        """
        weights = self._quantized_weights()  # before `tensors`: it drops frozen biases that are out of date
        tensors = self.tensors(seed)
        a = x if isinstance(x, QTensor) else quantize_input(x, self.input_scale, layout, rows=not self.training)
        if self.shared is not None and of is not None:
            self.shared.keep(of, a)
        y: Tensor | None = None
        for at, weight in enumerate(weights):
            step = run_link(a, weight, at, layout, tensors, training=False)
            a, y = (a if step.a is None else step.a), step.y
        assert y is not None
        return y

    def _normalize_input(self, x: Tensor, layout: Layout) -> QTensor | None:
        """Quantize x with the norm that makes it, in one kernel; None if x is not known to be made by a norm.

        Only while the forward around is compiled, and with a scale that is known: see the mod `normed_inputs`.
        """
        origins: Origins | None = self.linears[0].__dict__.get(ORIGINS)
        origin = None if origins is None else origins.find(x)
        if not isinstance(origin, Normed) or not layout.given_input or layout.precision.quantize_backend != "auto":
            return None
        return norm_quantize(
            origin.x.detach().reshape(-1, origin.x.shape[-1]), STATIC_SPEC, scale=self.input_scale, norm=origin.norm, weight=origin.weight, bias=origin.bias,
            activation=origin.activation, eps=origin.eps,
        ).q  # fmt: skip

    def run_exactly(self, x: Tensor) -> Tensor:
        """Run the same layers in the precision of x."""
        for at in range(len(self.links)):
            x = self.run_link_exactly(x, at)
        return x

    def run_link_exactly(self, x: Tensor, at: int) -> Tensor:
        """Run one layer in the precision of x."""
        linear, norm = self.linears[at], self.parts[at].norm
        weight, bias = fold(linear, cast(nn.BatchNorm1d, norm)) if self.parts[at].folds else (linear.weight, linear.bias)  # fmt: skip
        x = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return follow_linear(x, self.links[at], getattr(norm, "weight", None), getattr(norm, "bias", None))

    @torch.no_grad()
    def look(self, x: Tensor, y: Tensor, seed: Tensor | None) -> None:
        """Compare every layer on sampled rows in FP8 with float32, and record the errors in `health`.

        The last layer is compared using the output of the whole batch, which reveals a kernel that fails only at its
        full size. Layers are compared without dropout, which only zeroes FP8 codes; the rows then passed on lose what
        they lost in the whole batch.
        """
        assert self.health is not None
        dtype, turn = y.dtype, turn_of(self.health[0], FORWARD)
        layout, tensors = self.layout(dtype), self.tensors()._replace(pending=(None,) * len(self.links))
        drawn = tensors._replace(seed=seed)
        rows = sampled_rows(x.shape[0], turn)
        exact = x.index_select(0, rows)
        scale = self.input_scale
        if scale is None:
            scale = scale_from_amax(find_amax(x), STATIC_SPEC)
        # one scale for all rows, as in training: a huge row costs the others precision
        a = quantize(exact, STATIC_SPEC, scale=scale)
        exact = exact.float()
        for at, weight in enumerate(self._quantized_weights()):
            wanted = self.run_link_exactly(exact, at)
            step = run_link(a, weight, at, layout, tensors, training=False)
            draw = drawn.draw(at, layout)
            got = y.index_select(0, rows) if step.a is None else step.a.dequantize()
            if step.a is None and draw is not None:
                wanted = wanted * keep_mask(draw, rows, wanted.shape[1]) * factor_of(draw.p)
            error = row_error(got, wanted) if self.primed or step.a is None else torch.zeros_like(turn)
            last = step.a is None
            # the layer's input; for the last layer with the extent of the whole batch, since its output is of that too
            given = torch.stack([_amax(exact), _amax(x)]) if last or at == 0 else exact
            record(self.health[at], FORWARD, given, self.linears[at].weight, (y if last else got,), error)
            if step.a is not None:
                a = step.a if draw is None else _drop(step.a, draw, rows)
                exact = a.dequantize()

    def to(self, device: torch.device) -> None:
        """Move what belongs to the chain, but not its modules, to a device."""
        super().to(device)
        if self.health is not None:
            self.health = [vector.to(device) for vector in self.health]


def follow_linear(p: Tensor, link: Link, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Apply what follows a linear in its link, the norm and the activation, in the precision of p.

    Args:
        p: [..., N], the output of the linear.
        link: says which norm and which activation.
        weight: [N], of a layer or rms norm; None if it has none.
        bias: [N], of a layer norm; None if it has none.

    Returns:
        What the link passes on: [..., N].
    """
    if link.norm == "block":
        p = BlockNorm.forward(BlockNorm(p.shape[-1], block=NORM_BLOCK), p)
    elif link.norm != "none":
        weight, bias = (None if t is None else t.to(p.dtype) for t in (weight, bias))
        size = (p.shape[-1],)
        p = F.layer_norm(p, size, weight, bias, link.eps) if link.norm == "layer" else F.rms_norm(p, size, weight, link.eps)  # fmt: skip
    return activate(p, link.activation, link.slope)


def _drop(q: QTensor, draw: Dropout, rows: Tensor) -> QTensor:
    """Apply dropout to some rows as the kernels do: zero codes, and scale by 1 / (1 - p)."""
    kept = keep_mask(draw, rows, q.shape[1]).to(torch.uint8)
    return QTensor((q.data.view(torch.uint8) * kept).view(q.data.dtype), q.scale * factor_of(draw.p), q.spec)


def _amax(x: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(x, float("inf"))
    return largest.float()
