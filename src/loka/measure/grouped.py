"""Benchmark adapter of grouped_mm: the GEMMs of all experts at once. Baseline: torch's bf16 grouped GEMM.

A variant is `SPEC@SPEC|experts` or `DTYPE|experts`, e.g. `e4m3:1x128@e4m3:128x128|53` or `bfloat16|53`. Options: `even`
(every expert gets the same number of rows; otherwise the load is skewed, with one expert idle) and `fast` (fast
accumulation). M counts the rows of all experts.

Each expert's result is judged like a `scaled_mm`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import E4M3, QTensor, Spec
from loka.kernels import registry
from loka.kernels.backend import Backend
from loka.kernels.grouped_mm.call import GroupedCall, MoveCall, SwigluCall
from loka.kernels.grouped_mm.reference import spans
from loka.kernels.registry import prepare_for
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import conformance, expert_steps, inputs
from loka.measure.arrangement import unchanged
from loka.measure.conformance import Conformance, Law, worst_of
from loka.measure.fused import FLOAT32, STEEPEST, judge_twice
from loka.measure.inputs import Shape
from loka.measure.op import DTYPES, Op
from loka.measure.rounding import judge_rounded
from loka.measure.timing import Thunk


@dataclass(frozen=True)
class LoadedCall(GroupedCall):
    """A call, and how its rows are distributed."""

    even: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}{' even' if self.even else ' skewed'}"


@dataclass(frozen=True)
class GroupedOperands:
    """Operands, and the same values in bf16 for the baseline."""

    x: QTensor | Tensor
    w: QTensor | Tensor
    offsets: Tensor
    x16: Tensor
    w16: Tensor


class Part(NamedTuple):
    """The rows of an expert, and what its result must be."""

    start: int
    stop: int
    law: Law


@dataclass
class Parts:
    """What every expert's result must be, and the results that were right: judging all experts is most of the work."""

    parts: list[Part]
    right: list[Tensor] = field(default_factory=list)


def group_offsets(rows: int, experts: int, *, even: bool, seed: int, device: torch.device) -> Tensor:
    """Return int32 offsets [E + 1]. Skewed: expert 1 is idle, the largest one has several times the mean."""
    if even:
        at = torch.arange(experts + 1, dtype=torch.float64) * rows / experts
        return at.round().to(torch.int32).to(device)
    generator = torch.Generator().manual_seed(seed)
    weights = torch.exp(0.7 * torch.randn(experts, generator=generator))
    if experts > 1:
        weights[1] = 0
    ends = (weights.double().cumsum(0) / weights.double().sum() * rows).round()
    return torch.cat([torch.zeros(1), ends]).to(torch.int32).to(device)


Call = LoadedCall | SwigluCall | MoveCall


class GroupedMm(Op[Any]):
    """x [M, K] sorted by expert times w [E, N, K]; what surrounds it in a mixture is only judged (`expert_steps`)."""

    op = "grouped_mm"
    OWN = LoadedCall
    DIMENSIONS = ("m", "k", "n", "experts")
    VARIANTS = ("bfloat16|53|even", "e4m3:row@e4m3:row|53|even|fast", "e4m3:1x128@e4m3:128x128|53|even")

    def parse(self, shape: Shape, variant: str) -> LoadedCall:
        """See `Op.parse`: M, K, N and `SPEC@SPEC|experts`."""
        kind, *options = variant.split("|")
        counts = [option for option in options if option.isdigit()]
        left, at, right = kind.partition("@")
        if len(counts) != 1 or set(options) - {"even", "fast", *counts} or not (at or kind in DTYPES):
            raise ValueError(
                f"variant {variant!r} is not SPEC@SPEC|experts[|even][|fast], nor DTYPE|experts; e.g. {self.VARIANTS[2]}"
            )
        m, k, n = shape
        specs = (Spec.parse(left), Spec.parse(right)) if at else (None, None)
        dtype = specs[0].format.dtype if specs[0] is not None else DTYPES[kind]
        out = torch.bfloat16 if at else dtype
        fast, even = "fast" in options, "even" in options
        return LoadedCall(m, k, n, int(counts[0]), specs[0], specs[1], dtype, out, fast, even=even)

    def spell(self, call: LoadedCall) -> str:
        """See `Op.spell`."""
        kind = str(call.in_dtype).removeprefix("torch.") if call.a is None else f"{call.a}@{call.b}"
        options = [str(call.experts), *(["even"] if call.even else []), *(["fast"] if call.fast_accum else [])]
        return "|".join([kind, *options])

    def adopt(self, call: Any) -> Call | None:
        """See `Op.adopt`."""
        return call if isinstance(call, SwigluCall | MoveCall) else super().adopt(call)

    def operands(self, call: Call, *, seed: int, distribution: str, device: torch.device) -> Any:
        """Draw rows from the distribution, and normal weights."""
        if isinstance(call, SwigluCall | MoveCall):
            return expert_steps.draw(call, seed=seed, distribution=distribution, device=device)
        x = inputs.draw(call.m, call.k, distribution=distribution, seed=2 * seed, device=device)
        w = inputs.draw(call.experts * call.n, call.k, seed=2 * seed + 1, device=device) * call.k**-0.5
        w = w.view(call.experts, call.n, call.k)
        offsets = group_offsets(call.m, call.experts, even=call.even, seed=seed, device=device)
        if call.a is None or call.b is None:
            return GroupedOperands(x.to(call.in_dtype), w.to(call.in_dtype), offsets, x.bfloat16(), w.bfloat16())
        qx, qw = inputs.quantized(x, call.a), inputs.quantized(w, call.b)
        return GroupedOperands(qx, qw, offsets, qx.dequantize(torch.bfloat16), qw.dequantize(torch.bfloat16))

    def thunk(self, backend: Backend, call: LoadedCall, operands: GroupedOperands) -> Thunk:
        """Return the GEMMs alone, with prepared weights."""
        return self._thunk(backend, call, operands, self._prepared(backend, operands))

    def _prepared(self, backend: Backend, operands: GroupedOperands) -> QTensor | Tensor:
        x, w = operands.x, operands.w
        return prepare_for(backend, w, x.spec) if isinstance(x, QTensor) and isinstance(w, QTensor) else w

    def _thunk(self, backend: Backend, call: LoadedCall, operands: GroupedOperands, w: QTensor | Tensor) -> Thunk:
        o, options = operands, {"out_dtype": call.out_dtype, "fast_accum": call.fast_accum}
        if call.swiglu:
            gated: Any = backend
            return lambda: gated.run_swiglu(o.x, w, o.offsets, spec=call.out, **options)
        return lambda: backend.run(o.x, w, o.offsets, **options)

    def exact(self, call: Call, operands: Any) -> Any:
        """See `Op.exact`: each expert's rows, and what they must be."""
        if isinstance(call, SwigluCall | MoveCall):
            return expert_steps.exact(call, operands)
        spans_ = enumerate(spans(operands.offsets, call.m))
        return Parts([Part(start, stop, _law(operands, expert, start, stop)) for expert, (start, stop) in spans_])

    def shows_nan(self, call: Call) -> bool:
        """See `Op.shows_nan`."""
        return True

    def compare(self, backend: Backend, call: Call, operands: Any, exact: Callable[[], Any]) -> Conformance:
        """Check every expert, plain and with poisoned allocations; prepared weights must give the same bits."""
        if isinstance(call, SwigluCall | MoveCall):
            return expert_steps.compare(backend, call, operands, exact)
        product: LoadedCall = call
        judge = _judge_gated if product.swiglu else self._judge
        run = self._thunk(backend, call, operands, operands.w)
        worst = judge_twice(run, lambda result: judge(result, product, exact()))
        prepared = self._prepared(backend, operands)
        if not worst or prepared is operands.w:
            return worst
        if call.swiglu:
            return judge(self._thunk(backend, call, operands, prepared)(), product, exact()) and worst
        return conformance.same_bits(self._thunk(backend, call, operands, prepared)(), run(), worst)

    def _judge(self, out: Tensor, call: LoadedCall, exact: Parts) -> Conformance:
        """Judge one result, expert by expert, unless its bits were right before."""
        if out.shape != (call.m, call.n):
            return Conformance.failed(f"result is {tuple(out.shape)}, expected {(call.m, call.n)}")
        allowed = self._tolerance(call)
        verdicts = [Conformance(True, 0.0, allowed)]
        if any(unchanged(out, known) for known in exact.right):
            return verdicts[0]
        for expert, part in enumerate(exact.parts):
            where = f"expert {expert}, rows {part.start} to {part.stop}: "
            rows = out[part.start : part.stop]
            verdicts.append(conformance.judge(rows, part.law, allowed, call.out_dtype, prefix=where))
        worst = worst_of(verdicts)
        if worst:
            exact.right.append(out.clone())
        return worst

    def _tolerance(self, call: GroupedCall) -> float:
        if call.a is None or call.b is None:
            return conformance.baseline_tolerance(call.out_dtype, call.k)
        return conformance.tolerance(
            MatmulCall(call.m, call.k, call.n, call.a, call.b, call.out_dtype, call.fast_accum)
        )

    def baseline(self, call: LoadedCall, operands: GroupedOperands) -> Thunk:
        """Return torch's grouped GEMM in bf16; the reference on a CPU, where torch has none."""
        name = "torch" if operands.x16.is_cuda else "reference"
        backend, o = registry.backend("grouped_mm", name), operands
        return lambda: backend.run(o.x16, o.w16, o.offsets, out_dtype=torch.bfloat16)

    def check_baseline(self, call: LoadedCall, operands: GroupedOperands) -> Conformance:
        """Check against the exact result of the bf16 values."""
        plain = LoadedCall(call.m, call.k, call.n, call.experts, in_dtype=torch.bfloat16, even=call.even)
        o = GroupedOperands(operands.x16, operands.w16, operands.offsets, operands.x16, operands.w16)
        return self._judge(self.baseline(call, operands)(), plain, self.exact(plain, o))

    def bytes_moved(self, call: LoadedCall) -> int:
        """Count rows, every expert's weights once, and results."""
        item = 1 if call.a is not None and call.a.format == E4M3 else call.in_dtype.itemsize
        return (call.m + call.experts * call.n) * call.k * item + call.m * call.n * call.out_dtype.itemsize

    def flops(self, call: LoadedCall) -> int:
        """Return 2 M K N: each row goes to one expert."""
        return 2 * call.m * call.k * call.n


def _judge_gated(out: QTensor | Tensor, call: LoadedCall, exact: Parts) -> Conformance:
    """Judge silu(gate) * up of the products, which is computed before they are rounded."""
    lost = FLOAT32
    if call.a is not None and call.b is not None and out.device.type == "cuda":
        product = MatmulCall(call.m, call.k, call.n, call.a, call.b, fast_accum=True)
        lost += conformance.ELEMENT_ALLOWANCE * conformance.accumulation_error(product)
    y, terms = (torch.cat(parts) for parts in zip(*((part.law.y, part.law.terms) for part in exact.parts), strict=True))
    (gate, up), (gate_terms, up_terms) = y.chunk(2, 1), terms.chunk(2, 1)
    error = STEEPEST * lost * (gate_terms * up.abs() + F.silu(gate).abs() * up_terms)
    return judge_rounded(out, F.silu(gate) * up, error)


def _law(operands: GroupedOperands, expert: int, start: int, stop: int) -> Law:
    x, w = operands.x, operands.w
    if isinstance(x, QTensor) and isinstance(w, QTensor):
        scale = x.scale if x.scale.dim() == 0 else x.scale[start:stop]
        rows = QTensor(x.data[start:stop], scale, x.spec)
        weight = QTensor(w.data[expert], w.scale if w.scale.dim() == 0 else w.scale[expert], w.spec)
        return conformance.law(rows, weight)
    return conformance.law_of_values(x[start:stop], w[expert])  # type: ignore[index]
