"""Quantized modules: FP8 weights and their scales as buffers; activations are quantized in forward.

    QuantizedLinear     y = dequantize(q(x)) W^T + b          replaces an nn.Linear
    QuantizedExperts    the same for every expert's rows      replaces a GroupedLinear

The weight is quantized once, and there is no gradient. `weight` keeps its name and shape, so the state_dict differs
from the original's only by the dtype and one `weight_scale` per site. `model.to(dtype)` and `.half()` leave the FP8
weights and float32 scales unchanged: cast to 16-bit, they would no longer be correct.

A forward that reads `module.weight`, without calling the module, gets the weight in high precision: the 8-bit values
without their scale would be another weight. It is computed at every reading; `codes` are the 8-bit values.

Besides its buffers a module holds the weight in the layout its backend reads (`loka.kernels.prepared`): the buffers
themselves at most widths, a padded copy at 13, 27 or 479. It is rebuilt when the buffers are moved, loaded or written
to, and is not part of the state_dict. If the buffers are replaced (by assignment or torch.func.functional_call), the
new ones are prepared in the call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from loka.formats import QTensor, Spec, scale_shape
from loka.formats import quantize as quantize_by_law
from loka.formats.quantize import pack, unpack
from loka.kernels import grouped_mm, registry
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import GemmWay, prepare, scaled_mm
from loka.lowp.auto import settle
from loka.lowp.binding import LinearBinding
from loka.nn import GroupedLinear
from loka.nn.jagged import on_values
from loka.nn.mix import compute_dtype
from loka.nn.wrapping import named_sites

Site = nn.Linear | GroupedLinear
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")  # also the sets beside them, of how each hook is called


class _Quantized(nn.Module):
    """Base class: the weight as two buffers that casts do not change, and as `ready` for the GEMM."""

    loka_packed = True  # `loka.revert` refuses such modules: the 16-bit weight is gone
    weight_scale: Tensor
    ready: QTensor
    _source: tuple[Tensor, Tensor]  # the buffers that `ready` was made from
    _versions: tuple[int, int]  # their version counters at that time

    def __init__(self, weight: QTensor, activation: Spec, backend: str, fast_accum: bool) -> None:
        super().__init__()
        self.bound = GemmWay(activation, weight.spec, fast_accum, backend)
        self.wide = torch.float32  # dtype of `weight`
        self._buffers["weight"] = weight.data  # not `register_buffer`, which refuses the name of a property
        self.register_buffer("weight_scale", weight.scale)
        self._make_ready()
        self.eval()

    def _prepare(self) -> QTensor:
        raise NotImplementedError

    def _make_ready(self) -> None:
        self.ready = self._prepare()
        self._source, self._versions = (self.codes, self.weight_scale), _versions_of(self.codes, self.weight_scale)

    def _current(self) -> QTensor:
        """Return `ready`, rebuilt if the buffers have changed since."""
        weight, scale = self._source
        if self.codes is not weight or self.weight_scale is not scale:
            return self._prepare()  # not cached: functional_call restores the old buffers
        if not torch.compiler.is_compiling() and self._versions != _versions_of(weight, scale):
            self._make_ready()
        return self.ready

    @property
    def codes(self) -> Tensor:
        """The weight as it is stored, without its scale: the buffer `weight`."""
        stored = self._buffers["weight"]
        assert stored is not None
        return stored

    @property
    def weight(self) -> Tensor:
        """The weight in the dtype it had before it was quantized; a copy."""
        return self.qweight.dequantize(self.wide)

    @property
    def qweight(self) -> QTensor:
        """The weight as a QTensor."""
        if self.codes.dtype != self.weight_spec.format.dtype:
            raise ValueError(
                f"the weight of a {type(self).__name__} was replaced by {self.codes.dtype}, expected "
                f"{self.weight_spec.format.dtype}, with its scales in weight_scale; hint: assign the `codes` and "
                "`weight_scale` of another quantized module, or quantize the original again"
            )
        return QTensor(self.codes, self.weight_scale, self.weight_spec)

    @property
    def activation(self) -> Spec:
        """The Spec of the quantized input."""
        return self.bound.a

    @property
    def weight_spec(self) -> Spec:
        """The Spec of the weight."""
        return self.bound.b

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "_Quantized":
        before = {name: self._buffers[name] for name in ("weight", "weight_scale")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        self.wide = fn(torch.empty(0, dtype=self.wide, device=self.codes.device)).dtype
        self._make_ready()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._make_ready()

    def __getstate__(self) -> dict[str, Any]:
        made = ("ready", "_source", "_versions")  # a copy makes its own
        return pack({name: value for name, value in vars(self).items() if name not in made})  # type: ignore[no-any-return]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(unpack(state))  # type: ignore[no-untyped-call]
        self._make_ready()

    def extra_repr(self) -> str:
        """Show shape and precision."""
        return f"{tuple(self.codes.shape)}, {self.bound}"


class QuantizedLinear(_Quantized):
    """An nn.Linear in low precision, for inference.

    Args:
        weight: the quantized weight [N, K].
        activation: Spec of the quantized input.
        bias: in high precision, or None.
        backend: the backend of the GEMM.
        fast_accum: accumulate in the tensor cores only (fast accumulation).

    Example:
        >>> from loka.ptq.modules import quantize_module
        >>> type(quantize_module(nn.Linear(64, 32), loka.dispatch.recipe_named("rowwise").fprop)).__name__
        'QuantizedLinear'
    """

    def __init__(
        self, weight: QTensor, activation: Spec, bias: Tensor | None, *, backend: str = "auto", fast_accum: bool = False
    ) -> None:
        super().__init__(weight, activation, backend, fast_accum)
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        registry.load("scaled_mm")
        registry.load("quantize")

    def _prepare(self) -> QTensor:
        return prepare(self.qweight, self.activation, backend=self.bound.of_weight.backend)

    def _make_ready(self) -> None:
        bound = settle(LinearBinding(self.bound), self.codes)[0].fprop  # resolves `auto` on the weight's current device
        assert bound is not None
        self.bound = bound
        super()._make_ready()

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> y [..., N] in the input's dtype, or in autocast's if it is on."""
        if input.is_nested:
            return on_values(self.forward, input)
        if input.shape[-1:] != (self.in_features,):
            raise ValueError(f"QuantizedLinear takes [..., {self.in_features}], got {tuple(input.shape)}")
        flat = input.reshape(-1, self.in_features)
        dtype = _writable(compute_dtype(input))
        q = quantize(flat, self.activation)
        bound = self.bound
        y = scaled_mm(
            q, self._current(), out_dtype=dtype, backend=bound.backend, fast_accum=bound.fast_accum,
            prefer=bound.preferred(dtype),
        )  # fmt: skip
        if self.bias is not None:
            y = y + self.bias.to(dtype)
        return y.view(*input.shape[:-1], self.out_features)


class QuantizedExperts(_Quantized):
    """A GroupedLinear in low precision, for inference.

    Args:
        weight: the quantized weights [E, N, K].
        activation: Spec of the quantized input.
        backend: the backend of the grouped GEMM.
        fast_accum: accumulate in the tensor cores only (fast accumulation).

    Example:
        >>> from loka.ptq.modules import quantize_module
        >>> experts = loka.nn.GroupedLinear(4, 128, 128)
        >>> type(quantize_module(experts, loka.dispatch.recipe_named("blockwise").fprop)).__name__
        'QuantizedExperts'
    """

    def __init__(self, weight: QTensor, activation: Spec, *, backend: str = "auto", fast_accum: bool = False) -> None:
        super().__init__(weight, activation, backend, fast_accum)
        self.experts, self.width_out, self.width_in = weight.shape
        registry.load("grouped_mm")

    def _prepare(self) -> QTensor:
        return grouped_mm.prepare(self.qweight, self.activation, backend=self.bound.backend)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [N, in] sorted by expert, ends int32 [E] -> [N, out]."""
        offsets = torch.cat([ends.new_zeros(1), ends])
        q, dtype = quantize(x, self.activation), _writable(compute_dtype(x))
        return grouped_mm.grouped_mm(
            q, self._current(), offsets, out_dtype=dtype, backend=self.bound.backend, fast_accum=self.bound.fast_accum
        )


def _versions_of(weight: Tensor, scale: Tensor) -> tuple[int, int]:
    if weight.is_inference() or scale.is_inference():  # inference tensors have no version counter
        return (0, 0)
    return (weight._version, scale._version)


def _writable(dtype: torch.dtype) -> torch.dtype:
    """Return the output dtype of the GEMM for inputs of a dtype: float32 for float64, which GEMMs cannot write."""
    return torch.float32 if dtype == torch.float64 else dtype


def quantize_weight(weight: Tensor, spec: Spec) -> QTensor:
    """Quantize a weight with the reference implementation, one expert at a time to limit the size of float32 copies."""
    if weight.dim() == 2 and weight.device.type != "meta":
        return quantize_by_law(weight, spec)
    data = torch.empty(weight.shape, dtype=spec.format.dtype, device=weight.device)
    scale = torch.empty(scale_shape(weight.shape, spec.block), device=weight.device)
    if weight.device.type != "meta":
        for expert in range(weight.shape[0]):
            one = quantize_by_law(weight[expert], spec)
            data[expert], scale[expert] = one.data, one.scale
    return QTensor(data, scale, spec)


def quantize_module(module: Site, way: GemmWay, *, backend: str = "auto") -> nn.Module:
    """Make the quantized replacement of a linear or of a layer of experts, which is not changed.

    The replacement has the forward hooks of the module, and its attributes and tensors besides weight and bias. From
    one on the meta device, the result is to be loaded from a file.
    """
    weight = quantize_weight(module.weight.detach(), way.b)
    how: dict[str, Any] = {"backend": backend, "fast_accum": way.fast_accum}
    made: _Quantized
    if isinstance(module, GroupedLinear):
        made = QuantizedExperts(weight, way.a, **how)
    else:
        made = QuantizedLinear(weight, way.a, module.bias, **how)
    made.wide = module.weight.dtype
    _carry_over(module, made)
    return made


def _carry_over(module: Site, made: _Quantized) -> None:
    """Give a replacement the forward hooks of a module, which their handles still remove, and what was set on it."""
    if "bias" in vars(module):  # one of its hooks assigns it, as of a pruned bias
        del made.bias
    known = set(dir(made))
    for of in ("__dict__", "_parameters", "_buffers", "_modules"):
        there = getattr(module, of)
        getattr(made, of).update({name: value for name, value in there.items() if name not in known})
    made._non_persistent_buffers_set |= module._non_persistent_buffers_set
    vars(made).update({name: value for name, value in vars(module).items() if name.startswith(_FORWARD_HOOKS)})


def put(model: nn.Module, replacements: dict[str, nn.Module]) -> None:
    """Replace modules by name. A module registered under several names is replaced under all of them."""
    modules, plain = dict(model.named_modules(remove_duplicate=False)), dict(named_sites(model))
    new = {id(plain[name]): replacement for name, replacement in replacements.items()}
    for name, module in modules.items():
        if id(module) in new:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, new[id(module)])
