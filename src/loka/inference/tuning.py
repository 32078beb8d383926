"""Choose the GEMM backends of an engine by number of rows, from the performance database; missing rows are measured.

    linears     all linears of a role (all queries, all QKV, ...) have the same shape and Specs, so they share a choice:
                the fprop rows of `loka.dispatch.tune` with cached weights
    experts     both grouped GEMMs and what is between them, separate or in one fused kernel, over the weights of all
                blocks in turn: rows of the op `experts`

Measurements use `loka.measure`: a correctness check of the same call, then timing in interleaved CUDA graphs. They are
stored at the upper edge of their bucket of rows, so that the next engine on this machine measures nothing. A candidate
that does not support the call, fails or is wrong is stored with the reason. Backends named by the configuration are not
tuned. Without a GPU, or if nothing is to be measured, the order of the registry decides, except where the number of rows
is known to suit another backend: see `_usual_backend`.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from loka.dispatch import Database, Machine, bucket_of, tune
from loka.dispatch.database import Key
from loka.dispatch.rows import machine_here, origin_of
from loka.dispatch.tune import key_of
from loka.formats import ROW, TENSOR, QTensor
from loka.inference.weights import Operand, PackedExperts, PackedLinear, PackedModel
from loka.kernels import registry
from loka.kernels.grouped_mm import permute, swiglu_quantize
from loka.kernels.grouped_mm.call import GroupedCall, Permutation
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm.cublaslt import fills
from loka.measure import Conformance, Contender, judge_backend, snapshot, time_together
from loka.measure.adapter import ADAPTERS
from loka.measure.rounding import judge_near
from loka.measure.site import SiteJob
from loka.records.performance import PerformanceRow
from loka.records.prose import spell_error

ROLES = ("query", "cross_out", "qkv", "self_out")
EXPERTS = "experts"
# For a whole layer of experts: roundings between its GEMMs differ here and there; a wrong kernel is an order beyond.
TOLERANCE = 0.03
SECONDS = 120.0  # time limit for the linears of one number of rows
# Up to here our GEMM with row scales takes 0.67x to 0.84x of the time of cuBLASLt's in a CUDA graph (H200, 8 to 256
# rows, K and N from 512 to 4,224): its smallest tile is 64 wide, so more multiprocessors read the weight.
FEW_ROWS = 256


@dataclass(frozen=True)
class Tuned:
    """A choice: role, rows, the chosen candidate, microseconds by candidate, and why others were not timed."""

    role: str
    rows: int
    chosen: str
    microseconds: dict[str, float]
    refused: dict[str, str]


class Tuning:
    """Copies of a packed model tuned for different numbers of rows. They share the weights.

    `fixed` are ops whose backend the configuration names. `measure`: choose by speed, measuring what the database has
    no row for. Without a `database`, that is the user's own, or one in memory if that cannot be opened.
    """

    def __init__(
        self,
        packed: PackedModel,
        dtype: torch.dtype,
        *,
        fixed: set[str],
        measure: bool,
        database: Database | None = None,
    ) -> None:
        self.packed, self.dtype, self.fixed, self.measure = packed, dtype, fixed, measure
        self.log: list[Tuned] = []
        self._database = database
        self._made: dict[int, PackedModel] = {}

    def tuned(self, rows: int) -> PackedModel:
        """Return the model with backends chosen for this number of rows."""
        if rows not in self._made:
            self._made[rows] = self._tune(rows) if self.measure else self._choose_by_order(rows)
        return self._made[rows]

    def forget(self) -> None:
        """Choose anew for numbers of rows that are asked for from now on, as after a backend was found to be wrong."""
        self._made.clear()

    def fused_calls(self) -> list[GroupedCall]:
        """Return the call of each block of experts whose gate, up and SwiGLU may run as one kernel."""
        experts = [block.ffn for block in self.packed.blocks if isinstance(block.ffn, PackedExperts)]
        return [_products(e, self.dtype, fused=True)[0] for e in experts if isinstance(e.activation, nn.SiLU)]

    @property
    def database(self) -> Database:
        """The performance database, opened on first use."""
        if self._database is None:
            try:
                self._database = Database.open()
            except (ValueError, OSError, sqlite3.Error):  # e.g. a home that is not writable
                self._database = Database(":memory:")
        return self._database

    def _choose_by_order(self, rows: int) -> PackedModel:
        blocks = []
        for block in self.packed.blocks:
            ffn = block.ffn
            if isinstance(ffn, PackedExperts):
                ffn = replace(ffn, fused=_has_fused(ffn, self.dtype))
            linears = {role: getattr(block, role) for role in ROLES}
            if "scaled_mm" not in self.fixed:
                linears = {role: m.on(_usual_backend(m, rows, self.dtype)) for role, m in linears.items()}
            blocks.append(replace(block, ffn=ffn, **linears))
        return replace(self.packed, blocks=blocks)

    def _tune(self, rows: int) -> PackedModel:
        blocks = list(self.packed.blocks)
        if "scaled_mm" not in self.fixed:
            found = self._choose_linears({role: [getattr(b, role) for b in blocks] for role in ROLES}, rows)
            for role, name in found.items():
                blocks = [
                    replace(b, **{role: getattr(b, role).on(name)}) if getattr(b, role).activation is not None else b
                    for b in blocks
                ]
        groups = [b.ffn for b in blocks if isinstance(b.ffn, PackedExperts)]
        if groups and "grouped_mm" not in self.fixed:
            backend, fused = self._choose_experts(groups, rows)
            blocks = [
                replace(b, ffn=b.ffn.on(backend, fused=fused)) if isinstance(b.ffn, PackedExperts) else b
                for b in blocks
            ]
        return replace(self.packed, blocks=blocks)

    def _choose_linears(self, linears: dict[str, list[PackedLinear]], rows: int) -> dict[str, str]:
        """Return the fastest backend of every low-precision role that has a measured row."""
        machine, device = machine_here(), self.packed.table.device
        jobs: dict[str, SiteJob] = {}
        refused: dict[str, dict[str, str]] = {}
        for role, found in linears.items():
            low = next((m for m in found if m.bound is not None), None)
            if low is not None:
                jobs[role], refused[role] = _job_of(low, rows, device, self.dtype)
        if any(job.candidates for job in jobs.values()):
            tune(list(jobs.values()), self.database, device, seconds=SECONDS)
        chosen = {}
        for role, job in jobs.items():
            times: dict[str, float] = {}
            for candidate in job.candidates:
                row = self.database.find(key_of(job, candidate), machine)
                if row.row is not None and row.row.microseconds is not None:
                    times[candidate.backend] = row.row.microseconds.value
                else:
                    refused[role][candidate.backend] = (row.row.refusal if row.row else None) or row.reason
            if times:
                chosen[role] = min(times, key=lambda name: times[name])
            self.log.append(Tuned(role, rows, chosen.get(role, "auto"), times, refused[role]))
        return chosen

    def _choose_experts(self, groups: list[PackedExperts], rows: int) -> tuple[str, bool]:
        """Return the fastest backend of the experts and whether it is fused; `auto` if none was measured."""
        race = _Race(groups, bucket_of(rows), self.dtype, self.database)
        times: dict[str, float] = {}
        refused = race.avoided()
        for name, row in race.run().items():
            if row.microseconds is not None:
                times[name] = row.microseconds.value
            else:
                refused[name] = row.refusal or "not timed"
        won = min(times, key=lambda n: times[n]) if times else "auto"
        self.log.append(Tuned(EXPERTS, rows, won, times, refused))
        return won.removesuffix(" fused"), won.endswith(" fused")


def _usual_backend(linear: PackedLinear, rows: int, dtype: torch.dtype) -> str:
    """Return the backend of an unmeasured linear: on a GPU one for few rows or for many, else what it runs on."""
    way, device = linear.bound, linear.weight.device
    if way is None or device.type != "cuda" or not {way.a.block, way.b.block} <= {ROW, TENSOR}:
        return "auto" if way is None else way.backend
    n, k = linear.weight.shape
    name = None
    if rows <= FEW_ROWS:
        name = "triton"
    elif fills(rows, n, torch.cuda.get_device_properties(device).multi_processor_count):
        name = "cublaslt"  # no memset in front of every product
    call = way.call(rows, k, n, dtype)
    if name is None or registry.is_avoided("scaled_mm", name, call):
        return way.backend
    return name if registry.backend("scaled_mm", name).supports(call, device) else way.backend


def _job_of(
    linear: PackedLinear, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[SiteJob, dict[str, str]]:
    """Return what to measure for a linear, on the backends that support it, and why not on the others."""
    assert linear.bound is not None
    (n, k), way = linear.weight.shape, linear.bound
    call = way.call(rows, k, n, dtype)
    able, refused = [], {}
    for name in registry.BACKENDS["scaled_mm"]:
        if name == "reference":
            continue
        verdict = registry.backend("scaled_mm", name).supports(call, device)
        if reason := registry.is_avoided("scaled_mm", name, call) or verdict.reason:
            refused[name] = reason
        else:
            able.append(way.on(name))
    return SiteJob("fprop", rows, k, n, tuple(able), "cached"), refused


class _Race:
    """All candidates for the experts of a model at one number of tokens: looked up, or checked, timed and stored."""

    def __init__(self, groups: Sequence[PackedExperts], rows: int, dtype: torch.dtype, database: Database) -> None:
        self.groups, self.rows, self.dtype, self.database = groups, rows, dtype, database
        first = groups[0]
        self.first, self.device = first, first.router.device
        here = snapshot()
        machine = machine_here(here)
        own = {"auto": f"loka {here.loka}"}  # auto may mix backends, so its version is that of loka
        self.machine = Machine(machine.device, machine.driver, machine.torch, {**machine.versions, **own})
        self.origin = origin_of(here)

    def run(self) -> dict[str, PerformanceRow]:
        """Return a row for every candidate that is not avoided, by name."""
        rows = {
            way: self.database.find(self._key(*way), self.machine).row for way in self._ways() if not self._why(*way)
        }
        missing = [way for way, row in rows.items() if row is None]
        found = {way: row for way, row in rows.items() if row is not None} | self._measure(missing)
        return {_spell(*way): row for way, row in found.items()}

    def avoided(self) -> dict[str, str]:
        """Return the candidates that run a kernel which was found to be wrong in this process, and why."""
        return {_spell(*way): why for way in self._ways() if (why := self._why(*way))}

    def _ways(self) -> list[tuple[str, bool]]:
        # in 16-bit, auto may combine one backend's fused kernel with another's plain one
        mixed = ("auto",) if self.first.specs[0] is None else ()
        names = [n for n in (*mixed, *registry.BACKENDS["grouped_mm"]) if n != "reference"]
        return [(n, fused) for n in names for fused in (False, True) if not fused or isinstance(self.first.activation, nn.SiLU)]  # fmt: skip

    def _why(self, name: str, fused: bool) -> str:
        """Return why a candidate is avoided; empty if it is not. `auto` avoids kernels by itself while it has others."""
        if name == "auto":
            return "no backend has a right fused kernel" if fused and not _has_fused(self.first, self.dtype) else ""
        calls = _products(self.first, self.dtype, fused=fused)
        return next((why for call in calls if (why := registry.is_avoided("grouped_mm", name, call))), "")

    def _key(self, name: str, fused: bool) -> Key:
        f, specs = self.first, ["16 bits" if s is None else str(s) for s in self.first.specs]
        weights = [str(w.spec) if isinstance(w, QTensor) else str(self.dtype).removeprefix("torch.") for w in (f.gate_up, f.down)]  # fmt: skip
        fast = " fast" * f.fast[0], " fast" * f.fast[1]
        pairs = [f"{s} @ {w}{x}" for s, w, x in zip(specs, weights, fast, strict=True)]
        variant = f"{' then '.join(pairs)}, {f.experts} experts, {self._visits} visits{', fused' if fused else ''}"
        return Key(EXPERTS, variant, self.rows, f.gate_up.shape[2], f.gate_up.shape[1], name)

    @property
    def _visits(self) -> int:
        return self.first.top + int(self.first.always)

    def _measure(self, ways: Sequence[tuple[str, bool]]) -> dict[tuple[str, bool], PerformanceRow]:
        if not ways:
            return {}
        x, sorting = self._operands()
        expected = _run_experts(self.first.on("reference"), x, sorting.offsets, self.dtype)
        checks: dict[tuple[str, bool], Conformance] = {}
        candidates: dict[tuple[str, bool], Contender] = {}
        for name, fused in ways:
            checks[name, fused] = check = self._judge(name, fused, x, sorting, expected)
            if check:
                thunks = [
                    partial(_run_experts, moe.on(name, fused=fused), x, sorting.offsets, self.dtype)
                    for moe in self.groups
                ]
                candidates[name, fused] = Contender(_spell(name, fused), thunks, check)
        timed = time_together(list(candidates.values()), self.device) if candidates else []
        times = dict(zip(candidates, timed, strict=True))
        rows = {}
        for way, check in checks.items():
            key = self._key(*way)
            rows[way] = PerformanceRow(
                **asdict(key), version=self.machine.versions[key.backend], refusal=None if check else check.reason,
                microseconds=times[way].microseconds() if way in times else None,
                conformance=check.error if check else None, tolerance=check.tolerance,
            )  # fmt: skip
        if self.device.type == "cuda":  # times on a CPU are for tests only
            self.database.add(self.origin, rows.values())
        return rows

    def _operands(self) -> tuple[Operand, Permutation]:
        f, generator = self.first, torch.Generator(self.device).manual_seed(0)
        shares = torch.rand(self.rows, f.routed, generator=generator, device=self.device)
        chosen = shares.topk(f.top).indices
        if f.always:
            chosen = nn.functional.pad(chosen, (0, 1), value=f.routed)
        x = torch.randn(self.rows * self._visits, f.gate_up.shape[2], device=self.device, generator=generator)
        rows = x.to(self.dtype)
        return rows if f.specs[0] is None else quantize(rows, f.specs[0]), permute(chosen, f.experts)

    def _judge(self, name: str, fused: bool, x: Operand, sorting: Permutation, expected: Tensor) -> Conformance:
        """Check both products by the gate, then the whole layer against the reference."""
        for call in _products(self.first, self.dtype, fused=fused) if name != "auto" else ():
            adopted = ADAPTERS["grouped_mm"].adopt(replace(call, m=self.rows * self._visits))
            backend = registry.backend("grouped_mm", name)
            verdict = judge_backend("grouped_mm", backend, adopted, self.device, moved=False)  # as a bucket's run does
            if not verdict:
                return verdict
        try:
            out = _run_experts(self.first.on(name, fused=fused), x, sorting.offsets, self.dtype)
        except Exception as failure:  # recorded as the reason; a failing backend must not break the engine
            return Conformance.failed(spell_error(failure), TOLERANCE)
        return judge_near(out, expected.double(), TOLERANCE, what="the layer")


def _run_experts(moe: PackedExperts, x: Operand, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    if moe.fused:
        inner = moe.multiply_gated(x, offsets, dtype)
    else:
        inner = swiglu_quantize(moe.expand(x, offsets, dtype), moe.specs[1])
    return moe.reduce(inner, offsets, dtype)


def _has_fused(moe: PackedExperts, dtype: torch.dtype) -> bool:
    """Return True if a backend other than the reference has gate, up, SwiGLU and quantization in one right kernel for it."""
    if not isinstance(moe.activation, nn.SiLU):
        return False
    call, _ = _products(moe, dtype, fused=True)
    names = [moe.backend] if moe.backend != "auto" else [n for n in registry.BACKENDS["grouped_mm"] if n != "reference"]
    return any(
        bool(registry.backend("grouped_mm", n).supports(call, moe.router.device))
        for n in names
        if not registry.is_avoided("grouped_mm", n, call)
    )


def _products(moe: PackedExperts, dtype: torch.dtype, *, fused: bool) -> list[GroupedCall]:
    """Return the calls of both products of a layer of experts, with a row for each. `fused`: the first with SwiGLU."""
    calls = []
    for weight, spec, fast, gated in zip((moe.gate_up, moe.down), moe.specs, moe.fast, (fused, False), strict=True):
        experts, n, k = weight.shape
        b = weight.spec if isinstance(weight, QTensor) else None
        kind = dtype if spec is None else spec.format.dtype
        out = moe.specs[1] if gated else None
        calls.append(GroupedCall(experts, k, n, experts, spec, b, kind, dtype, fast, gated, out))
    return calls


def _spell(name: str, fused: bool) -> str:
    return name + " fused" * fused
