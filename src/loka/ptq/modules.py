"""Quantised modules: FP8 weights with their scales as buffers, activations quantised on the way in.

    QuantizedLinear     y = dequantise(q(x)) W^T + b          stands for an nn.Linear
    QuantizedExperts    the same for every expert's rows      stands for a GroupedLinear

The weight is quantised once; there is no gradient. `weight` keeps its name and shape, so a state_dict differs from the original's by its dtype
and by one `weight_scale` per site. `model.to(dtype)` and `.half()` move such a module, and leave its FP8 bytes and its float32 scales alone: cast to
16 bits they would be neither quantised nor right.

Beside its buffers a module holds the weight as its backend reads it (`loka.kernels.prepared`): the buffers themselves at most widths, a padded copy at 13, 27 or
479. It is made anew whenever the buffers move, are loaded or written into, and is no part of a state_dict. Buffers that were exchanged (an assignment,
torch.func.functional_call) are what runs, laid out in the call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from loka.formats import QTensor, Spec, scale_shape
from loka.formats import quantize as quantize_by_law
from loka.kernels import grouped_mm, registry
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import GemmWay, prepare, scaled_mm
from loka.lowp.auto import settle
from loka.lowp.binding import LinearBinding
from loka.nn import GroupedLinear
from loka.nn.mix import compute_dtype
from loka.nn.wrapping import named_sites

Site = nn.Linear | GroupedLinear


class _Quantized(nn.Module):
    """What both have: the weight as two buffers that casts do not touch, and as `ready` for the GEMM."""

    loka_packed = True  # what `loka.revert` refuses: the 16-bit weight is gone
    weight: Tensor
    weight_scale: Tensor
    ready: QTensor
    _source: tuple[Tensor, Tensor]  # the buffers that `ready` was made from, and what their version counters said
    _versions: tuple[int, int]

    def __init__(self, weight: QTensor, activation: Spec, backend: str, fast_accum: bool) -> None:
        super().__init__()
        self.bound = GemmWay(activation, weight.spec, fast_accum, backend)
        self.register_buffer("weight", weight.data)
        self.register_buffer("weight_scale", weight.scale)
        self._make_ready()
        self.eval()

    def _prepare(self) -> QTensor:
        raise NotImplementedError

    def _make_ready(self) -> None:
        self.ready = self._prepare()
        self._source, self._versions = (self.weight, self.weight_scale), _versions_of(self.weight, self.weight_scale)

    def _current(self) -> QTensor:
        """`ready`, unless the buffers are not what it was made from any more."""
        weight, scale = self._source
        if self.weight is not weight or self.weight_scale is not scale:
            return self._prepare()  # not kept: functional_call puts the old ones back
        if not torch.compiler.is_compiling() and self._versions != _versions_of(weight, scale):
            self._make_ready()
        return self.ready

    @property
    def qweight(self) -> QTensor:
        """The weight as the kernels take it."""
        return QTensor(self.weight, self.weight_scale, self.weight_spec)

    @property
    def activation(self) -> Spec:
        """The Spec of what comes in."""
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
        self._make_ready()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._make_ready()

    def extra_repr(self) -> str:
        """Shape and precision."""
        return f"{tuple(self.weight.shape)}, {self.bound}"


class QuantizedLinear(_Quantized):
    """An nn.Linear in low precision, for inference.

    Args:
        weight: quantised.
        activation: Spec of what comes in.
        bias: in high precision.
        backend: runs the product.
        fast_accum: sums may stay in the tensor cores.

    Example:
        >>> quantize_module(nn.Linear(64, 32), recipe_named("rowwise").fprop)
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
        bound = settle(LinearBinding(self.bound), self.weight)[0].fprop  # what `auto` is where the weight is now
        assert bound is not None
        self.bound = bound
        super()._make_ready()

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> y [..., N] in the input's type, or autocast's where it is on."""
        if input.shape[-1] != self.in_features:
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
        weight: quantised, [E, N, K].
        activation: Spec of what comes in.
        backend: runs the products.
        fast_accum: sums may stay in the tensor cores.

    Example:
        >>> quantize_module(GroupedLinear(4, 128, 128), recipe_named("blockwise").fprop)
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
    if weight.is_inference() or scale.is_inference():  # such tensors have no counter
        return (0, 0)
    return (weight._version, scale._version)


def _writable(dtype: torch.dtype) -> torch.dtype:
    """What the GEMMs write for inputs of a type: float64 has no FP8 product of its own."""
    return torch.float32 if dtype == torch.float64 else dtype


def quantize_weight(weight: Tensor, spec: Spec) -> QTensor:
    """The weight by the law, expert by expert: float32 copies of one expert are small, of all of them not."""
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
    """The quantised stand-in of a linear or of a layer of experts; of a module without storage, one to be filled from a file.

    Args:
        module: the original, which stays as it is.
        way: Specs of activation and weight, and how products are added up.
        backend: runs the product.

    Returns:
        A QuantizedLinear or QuantizedExperts.

    Example:
        >>> quantize_module(nn.Linear(64, 32), recipe_named("rowwise").fprop)
    """
    weight = quantize_weight(module.weight.detach(), way.b)
    how: dict[str, Any] = {"backend": backend, "fast_accum": way.fast_accum}
    if isinstance(module, GroupedLinear):
        return QuantizedExperts(weight, way.a, **how)
    return QuantizedLinear(weight, way.a, module.bias, **how)


def put(model: nn.Module, replacements: dict[str, nn.Module]) -> None:
    """Put modules in place by name; one that is registered under several names is replaced under all of them."""
    modules, plain = dict(model.named_modules(remove_duplicate=False)), dict(named_sites(model))
    new = {id(plain[name]): replacement for name, replacement in replacements.items()}
    for name, module in modules.items():
        if id(module) in new:
            parent, _, child = name.rpartition(".")
            setattr(modules[parent], child, new[id(module)])
