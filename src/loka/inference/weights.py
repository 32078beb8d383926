"""The weights of a OneRec module, plain or quantized, packed once for the engine.

    PackedNorm       kind, gain, shift, eps          fused with the residual sum before it and the quantization after it
    PackedLinear     one matrix, 16-bit or FP8       with the Spec its input must be quantized to
    PackedExperts    [E, N, K] of both projections   a shared expert of the same width becomes one more expert, which
                                                     every token visits

Folding the shared expert turns two grouped and two plain GEMMs into two grouped ones. It needs the same width and the
same precision; otherwise the shared expert stays separate. FP8 weights are laid out once for the backend that
multiplies them (`on`). Nothing here depends on a request.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.formats import QTensor, Spec
from loka.kernels import grouped_mm
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import GemmWay, prepare, scaled_mm
from loka.lowp.linear import Linear
from loka.models.onerec import LazyBlock, OneRec
from loka.nn import BlockNorm, GroupedLinear, MixtureOfExperts, SwiGLU
from loka.nn.experts import UNIT
from loka.ptq import QuantizedExperts, QuantizedLinear
from loka.ptq.modules import quantize_weight

Operand = Tensor | QTensor


@dataclass(frozen=True)
class Placement:
    """Device and dtype of the weights, their backends, and whether FP8 GEMMs may accumulate in the tensor cores."""

    device: torch.device
    dtype: torch.dtype
    backends: dict[str, str]
    fast_accum: bool = True

    def place(self, tensor: Tensor) -> Tensor:
        """Return a high-precision tensor in the engine's dtype, on its device."""
        return tensor.detach().to(self.device, self.dtype)

    def place_quantized(self, q: QTensor) -> QTensor:
        """Return an FP8 tensor on the engine's device, values and scales unchanged."""
        return QTensor(q.data.to(self.device), q.scale.to(self.device), q.spec)


@dataclass(frozen=True)
class PackedNorm:
    """A norm over the last dimension; kind "none" is the identity."""

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: nn.Module, placement: Placement) -> "PackedNorm":
        """Pack one of the norms of loka.nn."""
        if isinstance(module, nn.Identity):
            return cls("none", None, None, 0.0)
        if isinstance(module, BlockNorm):
            return cls("block", None, None, module.eps)
        if isinstance(module, nn.RMSNorm):
            return cls("rms", placement.place(module.weight), None, float(module.eps or 0.0))
        if isinstance(module, nn.LayerNorm):
            bias = None if module.bias is None else placement.place(module.bias)
            return cls("layer", placement.place(module.weight), bias, module.eps)
        raise ValueError(f"the engine supports the norms rms, layer, block and none, not {type(module).__name__}")


@dataclass(frozen=True)
class PackedLinear:
    """y = x W^T + b. `bound`: what its GEMM runs, None for high precision; `quantizer`: backend that quantizes x."""

    weight: Operand
    bias: Tensor | None
    bound: GemmWay | None
    quantizer: str

    @classmethod
    def of(cls, module: nn.Module, placement: Placement) -> "PackedLinear":
        """Pack an nn.Linear, plain, converted or quantized."""
        if not isinstance(module, nn.Linear | QuantizedLinear):
            raise ValueError(f"expected an nn.Linear or a QuantizedLinear, got {type(module).__name__}")
        quantizer = placement.backends.get("quantize", "auto")
        bias = None if module.bias is None else placement.place(module.bias)
        if (low := _quantized_weight(module)) is None:
            return cls(placement.place(module.weight), bias, None, quantizer)
        weight, way = low
        way = replace(way, fast_accum=placement.fast_accum and way.fast_accum)
        return cls(placement.place_quantized(weight), bias, way, quantizer).on(
            placement.backends.get("scaled_mm", "auto")
        )

    @property
    def activation(self) -> Spec | None:
        """The Spec of x; None for high precision."""
        return None if self.bound is None else self.bound.a

    def on(self, backend: str) -> "PackedLinear":
        """Return the linear on a backend, with its weight laid out for it; unchanged if it is in high precision."""
        if not isinstance(self.weight, QTensor) or self.bound is None:
            return self
        return replace(self, bound=self.bound.on(backend), weight=prepare(self.weight, self.bound.a, backend=backend))

    def __call__(self, x: Operand, dtype: torch.dtype) -> Tensor:
        """Return y [M, N] of x [M, K], which may be quantized already."""
        if isinstance(self.weight, QTensor) and self.bound is not None:
            q = self.prepare(x)
            assert isinstance(q, QTensor)  # quantized by prepare
            fast = self.bound.fast_accum
            y = scaled_mm(q, self.weight, out_dtype=dtype, backend=self.bound.backend, fast_accum=fast)
            return y if self.bias is None else y + self.bias
        assert isinstance(x, Tensor)  # a high-precision linear never gets FP8
        assert isinstance(self.weight, Tensor)
        return F.linear(x, self.weight, self.bias)

    def prepare(self, x: Operand) -> Operand:
        """Quantize x if this linear needs it."""
        if self.activation is None or isinstance(x, QTensor):
            return x
        return quantize(x.contiguous(), self.activation, backend=self.quantizer)


@dataclass(frozen=True)
class PackedSwiGLU:
    """A dense FFN: down(act(gate) * up), gate and up in one matrix."""

    gate_up: PackedLinear
    down: PackedLinear
    activation: nn.Module

    @classmethod
    def of(cls, module: SwiGLU, placement: Placement) -> "PackedSwiGLU":
        """Pack a SwiGLU."""
        pair = (PackedLinear.of(module.gate_up, placement), PackedLinear.of(module.down, placement))
        return cls(*pair, module.activation)


@dataclass(frozen=True)
class PackedExperts:
    """A mixture of experts; with `always` the last one is the shared expert, which every token visits with weight one.

    fused: run gate, up, SwiGLU and quantization in one kernel (kernels.grouped_swiglu), which the backend must have.
    fast: whether gate_up, and down, accumulate in the tensor cores.
    """

    router: Tensor
    balance: Tensor
    top: int
    routed: int
    always: bool
    gate_up: Operand
    down: Operand
    specs: tuple[Spec | None, Spec | None]
    activation: nn.Module
    shared: PackedSwiGLU | None
    backend: str = "auto"
    fused: bool = False
    fast: tuple[bool, bool] = (False, False)

    @property
    def experts(self) -> int:
        """The number of experts of the grouped GEMM."""
        return self.routed + int(self.always)

    @classmethod
    def of(cls, module: MixtureOfExperts, placement: Placement, *, fold: bool) -> "PackedExperts":
        """Pack a MixtureOfExperts; its router must be in high precision."""
        if not isinstance(module.router, nn.Linear):
            raise ValueError(f"the engine routes in high precision, but the router is a {type(module.router).__name__}")
        folded = fold and _foldable(module)
        weights = [_stack_weights(module, name, placement, folded=folded) for name in ("gate_up", "down")]
        lows = [_quantized_weight(part) for part in (module.gate_up, module.down)]
        apart = module.shared is not None and not folded
        packed = cls(
            router=placement.place(module.router.weight),
            balance=(module.balance.to(placement.device) * UNIT).float(),
            top=module.top,
            routed=module.gate_up.experts,
            always=folded,
            gate_up=weights[0],
            down=weights[1],
            specs=(None if lows[0] is None else lows[0][1].a, None if lows[1] is None else lows[1][1].a),
            activation=module.activation,
            shared=PackedSwiGLU.of(module.shared, placement) if apart and module.shared is not None else None,
            fast=(
                placement.fast_accum and lows[0] is not None and lows[0][1].fast_accum,
                placement.fast_accum and lows[1] is not None and lows[1][1].fast_accum,
            ),
        )
        return packed.on(placement.backends.get("grouped_mm", "auto"))

    def on(self, backend: str, *, fused: bool = False) -> "PackedExperts":
        """Return the experts on a backend, with their weights laid out for it."""
        gate_up, down = (
            grouped_mm.prepare(w, spec, backend=backend) if isinstance(w, QTensor) and spec is not None else w
            for w, spec in zip((self.gate_up, self.down), self.specs, strict=True)
        )
        return replace(self, backend=backend, fused=fused, gate_up=gate_up, down=down)

    def expand(self, x: Operand, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply rows sorted by expert by `gate_up`."""
        return grouped_mm.grouped_mm(
            x, self.gate_up, offsets, out_dtype=dtype, fast_accum=self.fast[0], backend=self.backend
        )

    def reduce(self, x: Operand, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply rows sorted by expert by `down`."""
        return grouped_mm.grouped_mm(
            x, self.down, offsets, out_dtype=dtype, fast_accum=self.fast[1], backend=self.backend
        )

    def multiply_gated(self, x: Operand, offsets: Tensor, dtype: torch.dtype) -> Operand:
        """Return silu(gate) * up of the rows, computed in one kernel, as `down` takes it."""
        return grouped_mm.grouped_swiglu(
            x, self.gate_up, offsets, spec=self.specs[1], out_dtype=dtype, fast_accum=self.fast[0], backend=self.backend
        )  # fmt: skip


def _quantized_weight(module: nn.Module) -> tuple[QTensor, GemmWay] | None:
    """Return the FP8 weight of a module and what its forward GEMM runs, as quantized or converted; None for 16-bit."""
    if isinstance(module, QuantizedExperts | QuantizedLinear):
        return module.qweight, module.bound
    if not isinstance(module, Linear) or module.binding.fprop is None:
        return None
    way = module.binding.fprop
    if way.a.mode != "dynamic":
        raise ValueError(f"{module.state.name}: {way.a}: the engine supports dynamic scales only, not delayed or static ones")  # fmt: skip
    return quantize_weight(module.weight.detach(), way.b), way


def _foldable(module: MixtureOfExperts) -> bool:
    if module.shared is None:
        return False
    for name in ("gate_up", "down"):
        routed, shared = getattr(module, name), getattr(module.shared, name)
        if routed.weight.shape[1:] != shared.weight.shape or shared.bias is not None:
            return False
        first, second = (None if (low := _quantized_weight(m)) is None else low[1] for m in (routed, shared))
        if first != second:
            return False
    return True


def _stack_weights(module: MixtureOfExperts, name: str, placement: Placement, *, folded: bool) -> Operand:
    routed = getattr(module, name)
    last = getattr(module.shared, name) if folded else None
    if isinstance(routed, QuantizedExperts):
        q = placement.place_quantized(routed.qweight)
        if last is None:
            return q
        low = _quantized_weight(last)
        assert low is not None  # checked by _foldable
        more = placement.place_quantized(low[0])
        data = torch.cat([q.data.view(torch.uint8), more.data[None].view(torch.uint8)]).view(q.data.dtype)
        return QTensor(data, torch.cat([q.scale, more.scale[None]]), q.spec)
    if not isinstance(routed, GroupedLinear):
        raise ValueError(f"expected a GroupedLinear or QuantizedExperts, got {type(routed).__name__}")
    weight = placement.place(routed.weight)
    return weight if last is None else torch.cat([weight, placement.place(last.weight)[None]])


@dataclass(frozen=True)
class PackedBlock:
    """One block of the decoder; `pair` is the index of the context's keys and values that it reads."""

    pair: int
    cross_norm: PackedNorm
    self_norm: PackedNorm
    ffn_norm: PackedNorm
    query: PackedLinear
    cross_out: PackedLinear
    qkv: PackedLinear
    self_out: PackedLinear
    ffn: PackedSwiGLU | PackedExperts

    @classmethod
    def of(cls, block: LazyBlock, placement: Placement, *, fold: bool) -> "PackedBlock":
        """Pack a LazyBlock."""
        ffn: PackedSwiGLU | PackedExperts
        if isinstance(block.ffn, MixtureOfExperts):
            ffn = PackedExperts.of(block.ffn, placement, fold=fold)
        elif isinstance(block.ffn, SwiGLU):
            ffn = PackedSwiGLU.of(block.ffn, placement)
        else:
            raise ValueError(f"the engine supports SwiGLU and MixtureOfExperts, not {type(block.ffn).__name__}")
        return cls(
            pair=block.pair,
            cross_norm=PackedNorm.of(block.cross_norm, placement),
            self_norm=PackedNorm.of(block.self_norm, placement),
            ffn_norm=PackedNorm.of(block.ffn_norm, placement),
            query=PackedLinear.of(block.cross.query, placement),
            cross_out=PackedLinear.of(block.cross.out, placement),
            qkv=PackedLinear.of(block.attention.qkv, placement),
            self_out=PackedLinear.of(block.attention.out, placement),
            ffn=ffn,
        )


@dataclass(frozen=True)
class PackedModel:
    """All weights that the engine reads while decoding."""

    blocks: list[PackedBlock]
    head_norms: list[PackedNorm]
    heads: list[PackedLinear]
    begin: Tensor
    table: Tensor
    first_rows: tuple[int, ...]

    @classmethod
    def of(cls, model: OneRec, placement: Placement, *, fold: bool) -> "PackedModel":
        """Pack a OneRec module, plain or quantized."""
        blocks = [PackedBlock.of(b, placement, fold=fold) for b in model.blocks if isinstance(b, LazyBlock)]
        return cls(
            blocks=blocks,
            head_norms=[PackedNorm.of(head.norm, placement) for head in model.heads],  # type: ignore[arg-type]
            heads=[PackedLinear.of(head.linear, placement) for head in model.heads],  # type: ignore[arg-type]
            begin=placement.place(model.begin.weight),
            table=placement.place(model.codes.table.weight),
            first_rows=model.codes.starts,
        )
