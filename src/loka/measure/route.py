"""Benchmark adapter of route: tokens to their best experts (shape tokens x width x experts).

A variant is `top=T`, the number of experts per token. Options: `always` (plus a shared expert), `sorted` (visits sorted
by expert, as grouped_mm needs them), and a dtype.

Which of two nearly equal experts wins depends on the summation order, so choices are judged by their scores in float64:
no expert left out may score higher than a chosen one, nor a later choice higher than an earlier one, by more than the
rounding of a logit explains. Weights must be those of the chosen experts. Where sums are exact (small integers, with
many equal scores) everything must equal the reference, ties included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.grouped_mm.reference import permute
from loka.kernels.route import reference
from loka.kernels.route.call import RouterCall
from loka.measure import inputs
from loka.measure.conformance import ULP, Conformance, worst_of
from loka.measure.fused import compiled, judge_twice
from loka.measure.inputs import Shape
from loka.measure.op import Op, read_variant, spell_variant
from loka.measure.timing import Thunk

FLOAT32 = 2.0**-20  # error of sums in another order, relative to their terms
FEW = 4096  # tokens in the exact case


@dataclass(frozen=True)
class SortedRouterCall(RouterCall):
    """A call, and whether its visits are sorted."""

    sorted: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}{', sorted' if self.sorted else ''}"


@dataclass(frozen=True)
class RouterOperands:
    """Tokens, the router's weight and the balance bias."""

    x: Tensor
    weight: Tensor
    balance: Tensor


class Route(Op[SortedRouterCall]):
    """Routing of tokens to experts."""

    op = "route"
    OWN = SortedRouterCall
    DIMENSIONS = ("tokens", "k", "experts")
    VARIANTS = ("top=3", "top=3|always|sorted")

    def adopt(self, call: Any) -> SortedRouterCall | None:
        """See `Op.adopt`. A kernel's call does not say whether visits were sorted, so both forms are judged."""
        made = super().adopt(call)
        return made if made is None or made is call else replace(made, sorted=True)

    def parse(self, shape: Shape, variant: str) -> SortedRouterCall:
        """See `Op.parse`: tokens, width, experts and `top=T`."""
        spelled = f"top=T[|always][|sorted][|dtype]; e.g. {self.VARIANTS[1]}"
        match, options, dtype = read_variant(variant, r"top=(\d+)", ("always", "sorted"), spelled)
        return SortedRouterCall(*shape, int(match[1]), dtype, "always" in options, "sorted" in options)

    def spell(self, call: SortedRouterCall) -> str:
        """See `Op.spell`."""
        return spell_variant(f"top={call.top}", call, ("always", "sorted"))

    def operands(self, call: SortedRouterCall, *, seed: int, distribution: str, device: torch.device) -> RouterOperands:
        """Draw tokens, a router whose logits are of order one, and a balance that affects some choices."""
        x = inputs.draw(call.tokens, call.k, distribution=distribution, seed=3 * seed, device=device, dtype=call.dtype)
        weight = inputs.draw(call.experts, call.k, seed=3 * seed + 1, device=device) * call.k**-0.5
        balance = 0.1 * inputs.draw(1, call.experts, seed=3 * seed + 2, device=device)[0]
        return RouterOperands(x, weight.to(call.dtype), balance)

    def thunk(self, backend: Any, call: SortedRouterCall, operands: RouterOperands) -> Thunk:
        """Return the routing, sorted or not."""
        run, o = backend.run_sorted if call.sorted else backend.run, operands
        return lambda: run(o.x, o.weight, o.balance, call.top, always=call.always)

    def check(self, backend: Any, call: SortedRouterCall, operands: RouterOperands) -> Conformance:
        """Check by scores in float64, and for equality where sums are exact; plain and with poisoned allocations.

        A sorted call is checked without sorting, too.
        """
        verdict = self._check(backend, call, operands)
        if not verdict or not call.sorted:
            return verdict
        return worst_of([verdict, self._check(backend, replace(call, sorted=False), operands)])

    def _check(self, backend: Any, call: SortedRouterCall, operands: RouterOperands) -> Conformance:
        near = judge_twice(
            self.thunk(backend, call, operands), lambda result: _judge(_undo_sorting(call, result), call, operands)
        )
        if not near:
            return near
        whole = _integers(call, operands)
        law = self.thunk(reference, call, whole)()
        exact = judge_twice(self.thunk(backend, call, whole), lambda result: _equal(result, law))
        return worst_of([near, exact])

    def baseline(self, call: SortedRouterCall, operands: RouterOperands) -> Thunk:
        """Return linear, sigmoid, topk, gather and normalization in plain torch, unsorted; compiled on a GPU."""
        o = operands

        def plain(x: Tensor, weight: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
            scores = F.linear(x, weight).float().sigmoid()
            ids = (scores + balance).topk(call.top, dim=1).indices
            gates = scores.gather(1, ids)
            return ids, gates / gates.sum(-1, keepdim=True)

        run = compiled(plain, o.x.device)
        return lambda: run(o.x, o.weight, o.balance)

    def check_baseline(self, call: SortedRouterCall, operands: RouterOperands) -> Conformance:
        """Check by scores. The baseline has no shared expert."""
        plain = SortedRouterCall(call.tokens, call.k, call.experts, call.top, call.dtype)
        return _judge(self.baseline(call, operands)(), plain, operands)

    def bytes_moved(self, call: SortedRouterCall) -> int:
        """Count tokens, router, an index and a weight per visit and, if sorted, the inverse permutation."""
        visits = call.tokens * (call.top + call.always)
        return (call.tokens + call.experts) * call.k * call.dtype.itemsize + visits * (20 if call.sorted else 12)

    def flops(self, call: SortedRouterCall) -> int:
        """Count one GEMM."""
        return 2 * call.tokens * call.k * call.experts


def _undo_sorting(call: SortedRouterCall, result: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return experts and weights per token. An inconsistent sorted result gives invalid experts (-1)."""
    if not call.sorted:
        return result[0], result[1]
    order, offsets, inverse, gates = result
    columns, experts = call.top + call.always, call.experts + call.always
    none = torch.full((call.tokens, columns), -1, dtype=torch.int64, device=order.device)
    places = torch.arange(call.tokens * columns, device=order.device)
    of_place = torch.bucketize(places, offsets[1:].long(), right=True)
    if inverse.shape != places.shape or not bool(((inverse >= 0) & (inverse < len(places))).all()):
        return none, gates
    ids = of_place[inverse].view(call.tokens, columns)
    if bool((ids >= experts).any()):
        return none, gates
    same = zip((order, offsets, inverse), permute(ids, experts), strict=True)
    return (ids if all(torch.equal(a, b) for a, b in same) else none), gates


def _judge(result: tuple[Tensor, Tensor], call: SortedRouterCall, o: RouterOperands) -> Conformance:
    """Compare choices and weights with scores in float64. The error is the worst gap over what rounding explains."""
    ids, gates = result
    wanted = (call.tokens, call.top + call.always)
    if ids.shape != wanted or gates.shape != wanted or ids.dtype != torch.int64:
        seen = f"{tuple(ids.shape)} {ids.dtype} and weights {tuple(gates.shape)}"
        return Conformance.failed(f"experts are {seen}, expected {wanted}", 1.0)
    if call.always:
        if not ((ids[:, -1] == call.experts).all() and (gates[:, -1] == 1).all()):
            return Conformance.failed("the shared expert is not visited by all, with weight one", 1.0)
        ids, gates = ids[:, :-1], gates[:, :-1]
    if ids.numel() == 0:
        return Conformance(True, 0.0, 1.0)
    ordered = ids.sort(dim=1).values
    if ids.min() < 0 or ids.max() >= call.experts or (ordered[:, 1:] == ordered[:, :-1]).any():
        return Conformance.failed(
            "a token visits an expert that does not exist, or one twice; or the sorted visits contradict themselves",
            1.0,
        )
    logits = o.x.double() @ o.weight.double().T
    terms = (o.x.double().square() @ o.weight.double().square().T).sqrt()
    scores = logits.sigmoid()
    slack = (ULP[call.dtype] * logits.abs() + 8 * FLOAT32 * terms) * scores * (1 - scores) + 2.0**-22
    total = scores + o.balance.double()
    chosen, given = total.gather(1, ids), slack.gather(1, ids)
    left_out = (total - slack).scatter(1, ids, -torch.inf).amax(1)
    gap = (left_out - (chosen + given).amin(1)).clamp(min=0) / slack.amax(1)
    order = (chosen[:, 1:] - given[:, 1:] - chosen[:, :-1] - given[:, :-1]).clamp(min=0)
    if order.numel():
        gap = torch.maximum(gap, order.amax(1) / slack.amax(1))
    share = scores.gather(1, ids)
    exact = share / share.sum(1, keepdim=True)
    loss = (given / share.clamp(min=1e-300)).amax(1, keepdim=True)  # relative error of a score and of the sum
    off = ((gates.double() - exact).abs() / (exact * (2 * loss + 2.0**-20))).amax(1)
    worst = float(torch.maximum(1 + gap, off).max()) if gap.max() > 0 else float(off.max())
    what = "a better expert was left out, or visited later" if gap.max() > 0 else "a weight is not that of its expert"
    return Conformance.within(worst, 1.0, f"{what}: {worst:.3g} times what rounding explains")


def _integers(call: SortedRouterCall, o: RouterOperands) -> RouterOperands:
    """Make operands whose sums are exact in every order and dtype: at most 16 products of -1, 0 and 1 per logit."""
    generator = torch.Generator(device=o.x.device).manual_seed(11)

    def whole(rows: int) -> Tensor:
        made = torch.randint(-1, 2, (rows, call.k), generator=generator, device=o.x.device)
        return torch.where(torch.arange(call.k, device=o.x.device) < 16, made, 0).to(call.dtype)

    return RouterOperands(whole(min(call.tokens, FEW)), whole(call.experts), torch.zeros_like(o.balance))


def _equal(result: Sequence[Tensor], law: Sequence[Tensor]) -> Conformance:
    *ids, gates = result
    *expected, weights = law
    if any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(ids, expected, strict=True)):
        reason = "on whole numbers: other experts than in the reference, or equal scores in another order"
        return Conformance.failed(reason, 1.0)
    off = float((gates - weights).abs().max()) / 2.0**-20 if gates.numel() else 0.0
    return Conformance.within(off, 1.0, f"on whole numbers: a weight is off by {off * 2.0**-20:.3g}")
