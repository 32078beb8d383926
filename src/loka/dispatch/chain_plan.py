"""The plan of a chain from the rows of a machine: which kernels there are between which representations, and the cheapest way through.

What has no row is no edge; the plan lists what was missing, so that a slow path is not taken for the best one unawares. Weights are quantised
beforehand, as in inference. There is no edge from FP8 back to bf16 alone: no kernel here does only that. Accuracy enters from outside:
`refuse(op, a, b)` names why a linear must not run under these Specs, or None (`refuse_by_report` asks Probe's evidence).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from loka.dispatch.chain import BF16, SPECS, STATIC, WEIGHTS, ChainOp, Edge, check_chain, shortest_path
from loka.dispatch.database import Database, Key, Machine, bucket_of
from loka.dispatch.policy import Policy, error_of
from loka.dispatch.rows import BASELINE, LINEAR, linear_variant
from loka.formats import Block, Spec
from loka.kernels import registry
from loka.kernels.fused_linear.call import NORM_BLOCK, FusedCall
from loka.kernels.norm_quantize.call import NormCall
from loka.kernels.quantize.call import QuantizeCall
from loka.kernels.scaled_mm.call import MatmulCall
from loka.records import ChainPlan, ChainStep, Plan, ProbeReport
from loka.records.performance import PerformanceRow

__all__ = ["Refuse", "measured_edges", "plan_chain", "refuse_by_report", "with_chains"]

Refuse = Callable[[ChainOp, str, str], str | None]
_PLAIN, _WITH_QUANTIZE = "bf16 linear", "quantise + "
_MULTIPLIES = (_PLAIN, _WITH_QUANTIZE, "scaled_mm ", "fused_linear ")  # how the labels of steps that run a linear begin


def plan_chain(
    ops: Sequence[ChainOp],
    m: int,
    database: Database,
    machine: Machine,
    *,
    first: str = BF16,
    last: str = BF16,
    refuse: Refuse | None = None,
) -> ChainPlan:
    """The cheapest way to run a chain on M rows on a machine; raises where measured kernels do not lead through it."""
    check_chain(ops, first, last)
    refusals: list[str] = []
    edges = list(measured_edges(ops, m, database, machine, refuse=refuse, refusals=refusals))
    path = shortest_path(len(ops), edges, first=first, last=last)
    if path is None:
        missing = "\n  ".join(refusals)
        raise ValueError(f"no measured kernels lead from {first} to {last} through {_spell(ops)}:\n  {missing}")
    plain = shortest_path(len(ops), (e for e in edges if e.kernel.startswith(BF16)), first=BF16, last=BF16)
    return ChainPlan(
        ops=[op.name for op in ops],
        steps=[
            ChainStep(
                ops=[op.name for op in ops[e.start : e.stop]], kernel=e.kernel, reads=e.reads, writes=e.writes,
                microseconds=e.microseconds,
            )
            for e in path
        ],
        microseconds=sum(edge.microseconds for edge in path),
        baseline_microseconds=sum(edge.microseconds for edge in plain) if plain else None,
        refusals=refusals,
    )  # fmt: skip


def with_chains(plan: Plan, chains: Sequence[ChainPlan]) -> Plan:
    """The plan with its chains: steps must cover their ops in order, and every linear must be a site of the plan, in one chain only."""
    known = {site.site for site in plan.sites}
    seen = [name for chain in plan.chains for name in _linears(chain)]
    for chain in chains:
        spelled = " -> ".join(chain.ops)
        if not chain.ops or [name for step in chain.steps for name in step.ops] != chain.ops:
            raise ValueError(f"the steps of the chain {spelled or '(no ops)'} do not run its ops one after another")
        linears = _linears(chain)
        unknown = [name for name in linears if name not in known]
        if unknown or not linears:
            raise ValueError(
                f"the chain {spelled}: {', '.join(unknown) or 'no op of it'} is no site of the plan for {plan.model}"
            )
        seen += linears
    twice = sorted({name for name in seen if seen.count(name) > 1})
    if twice:
        raise ValueError(f"linears may be in one chain only: {', '.join(twice)}")
    return msgspec.structs.replace(plan, chains=[*plan.chains, *chains])


def _linears(chain: ChainPlan) -> list[str]:
    """Names of a chain's linears: a kernel that multiplies begins with one."""
    return [step.ops[0] for step in chain.steps if step.ops and step.kernel.startswith(_MULTIPLIES)]


def refuse_by_report(report: ProbeReport, policy: Policy) -> Refuse:
    """Allow a linear only the Specs that Probe measured on it and found accurate enough; a static scale is judged as the same block, dynamic."""
    evidence = {site.name: [c for c in site.candidates if c.gemm == "fprop"] for site in report.sites}

    def refuse(op: ChainOp, a: str, b: str) -> str | None:
        a = a.removesuffix(":static")
        found = [c for c in evidence.get(op.name, []) if (c.a, c.b) == (a, b)]
        errors = [error for c in found if (error := error_of(c)) is not None]
        if not errors:
            return "its error was not measured"
        worst = max(error.high for error in errors)
        return None if worst <= policy.max_error else f"error up to {worst:.3g} exceeds {policy.max_error:g}"

    return refuse


def _spell(ops: Sequence[ChainOp]) -> str:
    return " -> ".join(f"{op.name} ({op.detail or op.kind})" for op in ops)


def measured_edges(
    ops: Sequence[ChainOp],
    m: int,
    database: Database,
    machine: Machine,
    *,
    refuse: Refuse | None = None,
    refusals: list[str] | None = None,
) -> Iterator[Edge]:
    """Every edge a machine has rows for; what it has none for, or what accuracy forbids, is added to `refusals`."""
    look = _Lookup(m, database, machine, refusals if refusals is not None else [])
    for place in range(len(ops)):
        for spec in SPECS:
            yield from look.convert(place, ops[place].k, spec)
        if ops[place].kind == "norm":
            yield from _norm_edges(look, ops, place)
        elif ops[place].kind == "linear":
            yield from _linear_edges(look, ops, place, refuse)
    if ops:
        for spec in SPECS:
            yield from look.convert(len(ops), ops[-1].n, spec)
    look.refusals[:] = dict.fromkeys(look.refusals)
    for op, calls in look.missing.items():
        look.refusals.append(f"{op}: {len(calls)} calls have no row of {machine.device}, e.g. {min(calls)}")


def _norm_edges(look: "_Lookup", ops: Sequence[ChainOp], place: int) -> Iterator[Edge]:
    norm = ops[place]
    for stop, activation in _tails(ops, place + 1):
        for spec in SPECS:
            if spec == STATIC and norm.detail != "block":
                continue  # without a bound on the values a static scale needs calibration, which is not this graph's to assume
            call = NormCall(look.m, norm.k, spec, norm.detail, activation)
            yield from look.kernels("norm_quantize", str(call), norm.k, 0, place, stop, BF16, str(spec))
        plain = NormCall(look.m, norm.k, SPECS[2], norm.detail, activation)
        prefix = str(plain).partition(" ")[2].partition(" -> ")[0]
        yield from look.baseline(
            "norm_quantize", norm.k, 0, place, stop, f"{prefix} -> ", f"{norm.detail} norm, {activation}"
        )


def _linear_edges(look: "_Lookup", ops: Sequence[ChainOp], place: int, refuse: Refuse | None) -> Iterator[Edge]:
    linear = ops[place]
    yield from look.baseline("scaled_mm", linear.k, linear.n, place, place + 1, "", "linear")
    yield from look.plain_linear(linear, place)
    if _pattern(ops, place, ("norm", "activation")):
        yield from look.baseline(
            "fused_linear", linear.k, linear.n, place, place + 3, "", "linear + RMSNorm + SiLU, compiled"
        )
    for spec in SPECS:
        a = Spec(spec.format, spec.block)  # a GEMM does not care where a scale came from
        b = WEIGHTS[a.block]
        why = refuse(linear, str(spec), str(b)) if refuse is not None else None
        if why is not None:
            look.refusals.append(f"{linear.name} under {spec} @ {b}: {why}")
            continue
        if spec != STATIC:
            yield from look.quantised_linear(linear, place, a, b)
        fast = a.block != Block(1, 128)
        call = MatmulCall(look.m, linear.k, linear.n, a, b, torch.bfloat16, fast)
        yield from look.kernels("scaled_mm", str(call), linear.k, linear.n, place, place + 1, str(spec), BF16)
        yield from _fused_edges(look, ops, place, spec, a, b)


def _fused_edges(look: "_Lookup", ops: Sequence[ChainOp], place: int, spec: Spec, a: Spec, b: Spec) -> Iterator[Edge]:
    linear = ops[place]
    normed = place + 1 < len(ops) and ops[place + 1].kind == "norm" and ops[place + 1].detail == "block"
    forms = [(0, tail) for tail in _tails(ops, place + 1)] + [(NORM_BLOCK, t) for t in _tails(ops, place + 2) if normed]
    for block, (stop, activation) in forms:
        outs: list[Spec | torch.dtype] = [torch.bfloat16, *(s for s in SPECS if s != STATIC or block)]
        for out in outs:
            call = FusedCall(look.m, linear.k, linear.n, a, b, out, block, activation)
            writes = str(out) if isinstance(out, Spec) else BF16
            yield from look.kernels("fused_linear", str(call), linear.k, linear.n, place, stop, str(spec), writes)


def _tails(ops: Sequence[ChainOp], place: int) -> list[tuple[int, str]]:
    """Where a kernel may end that could take the next activation along: without it, and with it."""
    tails = [(place, "none")]
    if place < len(ops) and ops[place].kind == "activation":
        tails.append((place + 1, ops[place].detail))
    return tails


def _pattern(ops: Sequence[ChainOp], place: int, kinds: tuple[str, ...]) -> bool:
    return tuple(op.kind for op in ops[place + 1 : place + 1 + len(kinds)]) == kinds


@dataclass(frozen=True)
class _Lookup:
    """Rows of one machine as edges; remembers what was not there."""

    m: int
    database: Database
    machine: Machine
    refusals: list[str]
    missing: dict[str, set[str]] = field(default_factory=dict)  # op -> calls without a usable row

    def kernels(
        self, op: str, call: str, k: int, n: int, start: int, stop: int, reads: str, writes: str
    ) -> Iterator[Edge]:
        """One edge for the fastest backend of a call."""
        variant = call.partition(" ")[2]
        yield from self._fastest(op, variant, k, n, start, stop, reads, writes, f"{op} {variant}")

    def _fastest(
        self, op: str, variant: str, k: int, n: int, start: int, stop: int, reads: str, writes: str, label: str
    ) -> Iterator[Edge]:
        times: list[tuple[float, str]] = []
        known = registry.BACKENDS.get("scaled_mm" if op == LINEAR else op, ())
        for backend in (name for name in self.machine.versions if name in known and name != "reference"):
            found = self.database.find(Key(op, variant, self.m, k, n, backend), self.machine)
            if found.row is not None and found.row.microseconds is not None:
                times.append((found.row.microseconds.value, backend))
            elif found.row is not None:
                self.refusals.append(f"{label} on {backend}: {found.row.refusal}")
            elif found.stale:
                self.refusals.append(f"{label} on {backend}: {found.reason}")
        if times:
            microseconds, backend = min(times)
            yield Edge(start, stop, reads, writes, f"{label} on {backend}", microseconds)
        else:
            self.missing.setdefault(op, set()).add(f"{self.m}x{k}x{n} {variant}")

    def convert(self, place: int, width: int, spec: Spec) -> Iterator[Edge]:
        """Quantisation alone. A static scale is only known after a block norm, which writes FP8 itself."""
        if spec != STATIC:
            yield from self.kernels(
                "quantize", str(QuantizeCall(self.m, width, spec)), width, 0, place, place, BF16, str(spec)
            )

    def quantised_linear(self, linear: ChainOp, place: int, a: Spec, b: Spec) -> Iterator[Edge]:
        """Quantise and multiply, timed as one."""
        fast = a.block != Block(1, 128)
        variant = linear_variant("fprop", str(a), str(b), fast_accum=fast, weights="cached")
        yield from self._fastest(
            LINEAR, variant, linear.k, linear.n, place, place + 1, BF16, BF16, f"{_WITH_QUANTIZE}{a} @ {b}"
        )

    def plain_linear(self, linear: ChainOp, place: int) -> Iterator[Edge]:
        """The bf16 GEMM that rows of a Linear were paired with."""
        found = self._rows(LINEAR, linear.k, linear.n)
        times = [r.baseline.value for r in found if r.baseline is not None and r.variant.startswith("fprop ")]
        if times:
            yield Edge(place, place + 1, BF16, BF16, _PLAIN, min(times))

    def baseline(self, op: str, k: int, n: int, start: int, stop: int, prefix: str, label: str) -> Iterator[Edge]:
        """The bf16 form of an op: the baseline of any of its calls of this shape."""
        found = [r for r in self._rows(op, k, n) if r.backend == BASELINE and r.variant.startswith(prefix)]
        times = [r.microseconds.value for r in found if r.microseconds is not None]
        if times:
            yield Edge(start, stop, BF16, BF16, f"bf16 {label}", min(times))
        else:
            self.missing.setdefault(f"bf16 {label}", set()).add(f"{self.m}x{k}x{n}")

    def _rows(self, op: str, k: int, n: int) -> list[PerformanceRow]:
        where = {"device": self.machine.device, "driver": self.machine.driver or "", "torch": self.machine.torch}
        return [row for _, row in self.database.entries(op=op, m=bucket_of(self.m), k=k, n=n, **where)]
