"""The speed side of a candidate: measured by Probe where it ran, or joined from the performance database for a machine that is elsewhere.

Probe measures errors anywhere, by emulation if need be; times only exist for the machine they were taken on. For a plan `target="NVIDIA H200"` every
recipe Probe has an error for is looked up in the database, backend by backend: same GEMM, Specs and K x N, M in the same bucket, all rows of one
machine (the newest description of that device). The error stays Probe's: a backend that passed conformance computes the same function up to its
tolerance. What has no row is refused with the reason; no time is interpolated between shapes.

`fastest_backend` is the same question for a backend that was left to `auto`, where a module is placed: the rows of this very machine, the user's database before those that ship with the package.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from loka.dispatch.database import Database, Machine, default_path
from loka.dispatch.recipe import way_of
from loka.dispatch.rows import linear_key, machine_here, shipped
from loka.kernels.scaled_mm import GemmWay
from loka.measure.site import Weights
from loka.measure.timing import BASELINE
from loka.records import Candidate, Gemm, ProbeReport, Site
from loka.records.performance import Origin

_KEPT_FIRST: tuple[Weights, ...] = ("cached", "dynamic")


@dataclass(frozen=True)
class ProbeSpeeds:
    """Times Probe took itself, on the machine it ran on."""

    device: str

    def options(self, site: Site, gemm: Gemm) -> Iterator[Candidate]:
        """Every candidate as it was measured."""
        for candidate in site.candidates:
            if candidate.gemm == gemm:
                source = f"Probe on {self.device}" if candidate.speedup else None
                yield msgspec.structs.replace(candidate, speed_source=source)


@dataclass(frozen=True)
class DatabaseSpeeds:
    """Times of database rows of one machine. `row_factor`: rows per call there over rows per call where Probe ran."""

    database: Database
    machine: Machine
    weights: Weights = "dynamic"
    row_factor: float = 1.0

    def options(self, site: Site, gemm: Gemm) -> Iterator[Candidate]:
        """Every recipe that has an error, on every backend that was measured on the machine; then what Probe refused throughout."""
        backends = [name for name in self.machine.versions if name not in (BASELINE, "reference")]
        recipes = dict.fromkeys(c.recipe for c in site.candidates if c.gemm == gemm)
        for recipe in recipes:
            tried = [c for c in site.candidates if c.gemm == gemm and c.recipe == recipe]
            measured = [c for c in tried if c.refusal is None]
            if not measured:
                yield from tried
            for backend in backends if measured else ():
                yield self._join(site, _evidence_for(measured, backend), backend)

    def _join(self, site: Site, evidence: Candidate, backend: str) -> Candidate:
        m = max(1, round(site.m * self.row_factor))
        way = way_of(evidence)
        assert way is not None  # a candidate has operands
        key = linear_key(evidence.gemm, way.on(backend), m, site.k, site.n, self.weights)
        found = self.database.find(key, self.machine)
        row, speed = found.row, dict[str, Any](microseconds=None, speedup=None)
        if row is None or found.origin is None:
            speed["speed_note"] = f"not known: {found.reason}"
        elif row.refusal is not None:
            speed["refusal"] = f"on {self.machine.device}: {row.refusal}"
        else:
            speed = {"microseconds": row.microseconds, "speedup": row.speedup}
            speed["speed_source"] = _cite(found.origin, row.m, m, self.weights)
            speed["speed_note"] = None if row.speedup else "not known: the row has no bf16 time to compare with"
        return msgspec.structs.replace(evidence, backend=backend, **speed)


Speeds = ProbeSpeeds | DatabaseSpeeds


def _evidence_for(measured: list[Candidate], backend: str) -> Candidate:
    """The error to judge a backend by: its own where it was evaluated, the law's otherwise."""
    order = {backend: 0, "reference": 1}
    return min(measured, key=lambda candidate: order.get(candidate.backend, 2))


def _cite(origin: Origin, measured_at: int, m: int, weights: Weights) -> str:
    at = f"M {m}" if m == measured_at else f"M {measured_at}, the bucket of {m}"
    commit = f", commit {origin.commit[:12]}" if origin.commit else ""
    return f"database row of {origin.date[:10]}, {origin.device}, driver {origin.driver}, torch {origin.torch}{commit}; {at}, weights {weights}"


@dataclass(frozen=True)
class Fastest:
    """The backend with the shortest measured time for a call, and the row that says so."""

    backend: str
    source: str


def fastest_backend(
    gemm: Gemm, way: GemmWay, m: int, k: int, n: int, *, databases: Sequence[Database] | None = None, machine: Machine | None = None
) -> Fastest | None:  # fmt: skip
    """The fastest backend that was measured on this machine for one GEMM of a linear, in the bucket of its rows.

    Args:
        gemm: which one.
        way: what it runs; its backend does not count.
        m: rows of a call.
        k: inputs of the linear.
        n: outputs of the linear.
        databases: where to look, first to last; None for the user's own, then the rows that ship with the package.
        machine: whose rows count; None for this one.

    Returns:
        The backend and where its time comes from; None where no row counts. Times with weights that are quantised before the call come first: a placed linear keeps them.
    """
    machine = machine or _this_machine()
    for database in _databases() if databases is None else databases:
        for weights in _KEPT_FIRST:
            names = [name for name in machine.versions if name not in (BASELINE, "reference")]
            found = [database.find(linear_key(gemm, way.on(name), m, k, n, weights), machine) for name in names]
            timed = [
                (f.row.microseconds.value, f.row, f.origin) for f in found if f.row is not None and f.row.microseconds
            ]
            if timed:
                _, row, origin = min(timed, key=lambda entry: entry[0])
                assert origin is not None
                return Fastest(row.backend, _cite(origin, row.m, m, weights))
    return None


@lru_cache(maxsize=1)
def _this_machine() -> Machine:
    return machine_here()


def _databases() -> Iterator[Database]:
    """Those with rows of this machine's device, the user's first. A file that cannot be read is said, and passed over: `auto` has another answer."""
    device = _this_machine().device
    if default_path().exists():
        try:
            with Database.open(create=False) as own:
                yield own
        except ValueError as error:
            warnings.warn(f"measured rows are not used: {error}", stacklevel=4)
    if any(known.device == device for known in _shipped().machines()):
        yield _shipped()


@lru_cache(maxsize=1)
def _shipped() -> Database:
    return shipped_database()


def shipped_database() -> Database:
    """The rows that come with the package, in memory."""
    database = Database(":memory:")
    for _, record in shipped():
        database.merge(record)
    return database


def choose_machine(database: Database, target: str, report: ProbeReport) -> tuple[Machine, list[str]]:
    """The newest description of a device in a database, and notes on what was left out."""
    machines = database.machines()
    fitting = [machine for machine in machines if machine.device == target]
    if not fitting:
        known = ", ".join(dict.fromkeys(f"{m.device!r}" for m in machines)) or "none"
        raise ValueError(
            f"a plan for {target!r} needs times measured there; this report was made on {report.environment.device!r} and the database "
            f"knows {known}. Run Probe or `tune` on the target, merge its rows (loka db merge), or plan for accuracy only (min_speedup=None)"
        )
    notes = [f"speeds are of {fitting[0]}, from database rows: not of this machine, not of this model"]
    if len(fitting) > 1:
        others = "; ".join(str(machine) for machine in fitting[1:])
        notes.append(f"rows of other installations of that device were not used: {others}")
    return fitting[0], notes
