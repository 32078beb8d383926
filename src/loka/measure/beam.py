"""Benchmark adapter of beam_attention: requests of several beams over a context (shape requests x beams x context).

A variant is `HEADS/GROUPSxD`, e.g. `11/11x128`. Options: `shared` (values are the keys), `ragged` (requests of
different lengths), `fp8` (the context is in E4M3), and a dtype. Decode steps are `ancestors ...`
(`loka.measure.ancestors`).

Compared with softmax attention in float64. The tolerance allows for weights that are rounded to 16-bit before they
multiply the values, and for the rounding of the result. A context in E4M3 may also be multiplied in FP8
(`loka.measure.low_context`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loka.kernels import registry
from loka.kernels.backend import Backend
from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall
from loka.measure import ancestors, conformance, inputs, low_context, peaked
from loka.measure.conformance import ULP, Conformance, Law
from loka.measure.fused import judge_twice
from loka.measure.inputs import Shape
from loka.measure.low_context import LowLaw
from loka.measure.op import Op, read_variant, spell_variant
from loka.measure.rounding import as_share
from loka.measure.timing import Thunk

_SLICE = 1 << 27  # elements of float64 scores at a time


@dataclass(frozen=True)
class RaggedCall(BeamAttentionCall):
    """A call with the options of its variant."""

    ragged: bool = False

    @property
    def fp8(self) -> bool:
        """Whether the context is in E4M3."""
        return self.cache is not None

    def __str__(self) -> str:
        return f"{super().__str__()}{', ragged' if self.ragged else ''}"


@dataclass(frozen=True)
class BeamOperands:
    """Queries, keys, values (the same tensor as the keys if shared) and lengths. alike: many keys are equal."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    alike: bool = False


Call = RaggedCall | AncestorAttentionCall
OPTIONS = ("shared", "ragged", "fp8")


@dataclass(frozen=True)
class EitherLaw:
    """The exact results for a context in E4M3: of a kernel that widens it, and of one that multiplies in FP8."""

    wide: Law
    low: LowLaw


class BeamAttention(Op[Call]):
    """Attention of q [R, B, H, D] over k, v [R, S, G, D], or over the ancestors of each beam."""

    op = "beam_attention"
    OWN = RaggedCall
    OWN_SETS = (peaked.NAME,)
    DIMENSIONS = ("requests", "beams", "context=length")
    VARIANTS = ("11/11x128|shared", "11/11x128|shared|ragged", "11/11x128")

    def adopt(self, call: Any) -> Call | None:
        """See `Op.adopt`. A model's requests differ in length."""
        if isinstance(call, AncestorAttentionCall):
            return call
        made = super().adopt(call)
        if not isinstance(made, RaggedCall):
            return None
        return made if made is call else replace(made, ragged=True)

    def shape(self, call: Call) -> dict[str, int]:
        """See `Op.shape`. The context of a decode step is its earlier steps."""
        length = call.steps if isinstance(call, AncestorAttentionCall) else call.length
        return {"requests": call.requests, "beams": call.beams, "context": length}

    def parse(self, shape: Shape, variant: str) -> Call:
        """See `Op.parse`: requests, beams, context and `HEADS/GROUPSxD`."""
        if variant.startswith(ancestors.HEAD):
            return ancestors.parse(shape, variant)
        match, options, dtype = read_variant(
            variant, r"(\d+)/(\d+)x(\d+)", OPTIONS, f"HEADS/GROUPSxD[|shared][|ragged][|fp8][|dtype]; e.g. {self.VARIANTS[0]}"
        )  # fmt: skip
        h, g, d = (int(part) for part in match.groups())
        requests, beams, length = shape
        cache = torch.float8_e4m3fn if "fp8" in options else None
        return RaggedCall(requests, beams, h, g, length, d, dtype, "shared" in options, cache, "ragged" in options)

    def spell(self, call: Call) -> str:
        """See `Op.spell`."""
        if isinstance(call, AncestorAttentionCall):
            return ancestors.spell(call)
        return spell_variant(f"{call.heads}/{call.groups}x{call.d}", call, OPTIONS)

    def operands(self, call: Call, *, seed: int, distribution: str, device: torch.device) -> Any:
        """Draw keys from the distribution, the rest normal; ragged lengths from a third to all of the context.

        A single request has all of it or, with every other seed, two thirds. A context in E4M3 lies as an engine has it.
        """
        if isinstance(call, AncestorAttentionCall):
            return ancestors.draw(call, seed=seed, distribution=distribution, device=device)
        if call.fp8:
            o = self.operands(replace(call, cache=None), seed=seed, distribution=distribution, device=device)
            k = low_context.to_e4m3(o.k)
            return replace(o, k=k, v=k if call.shared else low_context.as_columns(low_context.to_e4m3(o.v)))

        def draw(rows: int, part: int, kind: str = "normal") -> Tensor:
            return inputs.draw(rows, call.d, distribution=kind, seed=3 * seed + part, device=device, dtype=call.dtype)

        if distribution == peaked.NAME:
            o = self.operands(call, seed=seed, distribution="normal", device=device)
            _make_peaked(call, o, seed=seed)
            return o
        q = draw(call.requests * call.beams * call.heads, 0).view(call.requests, call.beams, call.heads, call.d)
        context = (call.requests, call.length, call.groups, call.d)
        rows = call.requests * call.length * call.groups
        k = draw(rows, 1, distribution).view(context)
        v = k if call.shared else draw(rows, 2).view(context)
        lengths = torch.full((call.requests,), call.length, dtype=torch.int32, device=device)
        if call.ragged:
            shorter = torch.arange(call.requests, device=device) * 2 * call.length // (3 * max(call.requests - 1, 1))
            lengths = (call.length - shorter).to(torch.int32)
            if call.requests == 1 and seed % 2:
                lengths -= call.length // 3
        return BeamOperands(q, k, v, lengths, distribution == "alike_rows")

    def thunk(self, backend: Backend, call: Call, operands: Any) -> Thunk:
        """See `Op.thunk`."""
        if isinstance(call, AncestorAttentionCall):
            return ancestors.make_thunk(backend, call, operands)
        o: BeamOperands = operands
        return lambda: backend.run(o.q, o.k, o.v, o.lengths, scale=o.q.shape[3] ** -0.5)

    def exact(self, call: Call, operands: Any) -> Law | EitherLaw:
        """See `Op.exact`."""
        if isinstance(call, AncestorAttentionCall):
            return ancestors.exact(call, operands)
        if not call.fp8:
            return _law(operands)
        o: BeamOperands = operands
        return EitherLaw(_law(o), low_context.exact(o.q, o.k, o.v, o.lengths))

    def shows_nan(self, call: Call) -> bool:
        """See `Op.shows_nan`."""
        return True

    def compare(self, backend: Backend, call: Call, operands: Any, exact: Callable[[], Any]) -> Conformance:
        """Check against float64, plain and with poisoned allocations."""
        if isinstance(call, AncestorAttentionCall):
            return ancestors.compare(backend, call, operands, exact, _allowed(call))
        if call.fp8:
            return judge_twice(self.thunk(backend, call, operands), lambda out: _judge_either(out, call, exact()))
        return self._judge(self.thunk(backend, call, operands), call, exact, poison=True)

    def _judge(self, run: Thunk, call: RaggedCall, exact: Callable[[], Law], *, poison: bool) -> Conformance:
        result = lambda: run().reshape(-1, call.d)  # noqa: E731
        return conformance.judge_runs(result, exact, _allowed(call), call.dtype, poison=poison)

    def baseline(self, call: Call, operands: Any) -> Thunk:
        """Return torch's attention over the whole context. Lengths are ignored: torch is fastest without a mask."""
        if isinstance(call, AncestorAttentionCall):
            return self.thunk(registry.backend(self.op, "torch"), replace(call, spec=None), operands)
        q, k, v = (t.to(call.dtype).transpose(1, 2) for t in (operands.q, operands.k, operands.v))
        grouped = call.heads != call.groups
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, enable_gqa=grouped).transpose(1, 2)

    def check_baseline(self, call: Call, operands: Any) -> Conformance:
        """Check against the exact result for full lengths."""
        if isinstance(call, AncestorAttentionCall):
            return self.check(registry.backend(self.op, "torch"), replace(call, spec=None), operands)
        full = torch.full_like(operands.lengths, call.length)
        whole = BeamOperands(operands.q, operands.k, operands.v, full)
        return self._judge(self.baseline(call, whole), call, partial(_law, whole), poison=False)

    def bytes_moved(self, call: Call) -> int:
        """Count queries, results, and the context once."""
        if isinstance(call, AncestorAttentionCall):
            return ancestors.bytes_moved(call)
        context = call.requests * call.length * call.groups * call.d * (1 if call.shared else 2)
        rows = 2 * call.requests * call.beams * call.heads * call.d
        return rows * call.dtype.itemsize + context * (call.cache or call.dtype).itemsize

    def flops(self, call: Call) -> int:
        """Count two products over the full context, also for ragged requests; 0 for decode steps, which use none."""
        if isinstance(call, AncestorAttentionCall):
            return 0
        return 4 * call.requests * call.beams * call.heads * call.length * call.d


def _judge_either(out: Tensor, call: RaggedCall, exact: EitherLaw) -> Conformance:
    """Judge a result as that of a kernel that widens the context, or else of one that multiplies in FP8."""
    expected = (call.requests, call.beams, call.heads, call.d)
    if out.shape != expected:
        return Conformance.failed(f"result is {tuple(out.shape)}, expected {expected}", 1.0)
    wide = as_share(conformance.judge(out.reshape(-1, call.d), exact.wide, _allowed(call), call.dtype))
    if wide:
        return wide
    low = low_context.judge_low(out, exact.low, call.dtype)
    return min(low, wide, key=lambda verdict: (not verdict, verdict.error))


def _make_peaked(call: RaggedCall, o: BeamOperands, *, seed: int) -> None:
    """Make drawn operands peaked: at the first key, or at a later one that every request has, by turns."""
    options: Any = {"device": o.q.device, "dtype": call.dtype}
    rows = call.requests * call.beams * call.heads
    o.q.copy_(peaked.draw_queries(rows, call.d, seed=3 * seed, **options).view(o.q.shape))
    o.k.mul_(peaked.REST)
    key = peaked.make_key(call.d, peaked.ABOVE, scale=call.d**-0.5, **options)
    for r in range(call.requests):
        for g in range(call.groups):
            at = (r + g) % 2 * (call.length // 4)
            o.k[r, at, g] = key
            if not call.shared:
                o.v[r, at, g] = 0


def _allowed(call: Call) -> float:
    rounding = math.hypot(ULP[call.dtype], 2 * ULP[call.dtype]) / math.sqrt(12)
    return math.hypot(rounding, 2.0**-20 * math.sqrt(call.d))


def _law(o: BeamOperands) -> Law:
    """Compute in float64, a few queries at a time to limit memory.

    The weights of equal keys are rounded alike, so that the errors of their terms add up instead of cancelling.
    """
    requests, beams, heads, d = o.q.shape
    share = heads // o.k.shape[2]
    y, terms = (torch.empty(o.q.shape, dtype=torch.float64, device=o.q.device) for _ in range(2))
    some = max(1, _SLICE // max(heads * o.k.shape[1], 1))
    for r in range(requests):
        n = int(o.lengths[r])
        k, v = (t[r, :n].double().repeat_interleave(share, 1) for t in (o.k, o.v))
        for start in range(0, beams, some):
            q = o.q[r, start : start + some].double()
            p = torch.softmax(torch.einsum("bhd,shd->bhs", q, k) * d**-0.5, -1)
            y[r, start : start + some] = torch.einsum("bhs,shd->bhd", p, v)
            if o.alike:
                terms[r, start : start + some] = torch.einsum("bhs,shd->bhd", p, v.abs()).square()
            else:
                terms[r, start : start + some] = torch.einsum("bhs,shd->bhd", p.square(), v.square())
    return Law(y.view(-1, d), (terms + y.square()).sqrt().view(-1, d))
