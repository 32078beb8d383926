"""Speeds of candidates: measured by Probe itself, or looked up in the performance database for another machine.

Probe measures errors on any machine, by emulation if need be, but times are only valid on the machine they were taken
on. For a plan with `target="NVIDIA H200"` every recipe that Probe has an error for is looked up in the database,
backend by backend: same GEMM, Specs and K x N, M in the same bucket, all rows of one machine (the newest description of
that device). The error stays Probe's: a backend that passed conformance computes the same function up to its tolerance.
A candidate without a row is refused with the reason; times are not interpolated between shapes.

`fastest_backend` resolves the backend `auto` when a module is placed, from rows of this machine: first the user's
database, then the rows that ship with the package.
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

_CACHED_FIRST: tuple[Weights, ...] = ("cached", "dynamic")


@dataclass(frozen=True)
class ProbeSpeeds:
    """Times that Probe measured on the machine it ran on."""

    device: str

    def options(self, site: Site, gemm: Gemm) -> Iterator[Candidate]:
        """Yield the candidates of one GEMM as Probe measured them."""
        for candidate in site.candidates:
            if candidate.gemm == gemm:
                source = f"Probe on {self.device}" if candidate.speedup else None
                yield msgspec.structs.replace(candidate, speed_source=source)


@dataclass(frozen=True)
class DatabaseSpeeds:
    """Times from database rows of one machine. `row_factor`: rows per call there over rows per call where Probe ran."""

    database: Database
    machine: Machine
    weights: Weights = "dynamic"
    row_factor: float = 1.0

    def options(self, site: Site, gemm: Gemm) -> Iterator[Candidate]:
        """Yield each recipe that Probe could run, on every backend with rows of the machine; refused ones unchanged."""
        backends = [name for name in self.machine.versions if name not in (BASELINE, "reference")]
        recipes = dict.fromkeys(c.recipe for c in site.candidates if c.gemm == gemm)
        for recipe in recipes:
            tried = [c for c in site.candidates if c.gemm == gemm and c.recipe == recipe]
            measured = [c for c in tried if c.refusal is None]
            if not measured:
                yield from tried
            for backend in backends if measured else ():
                yield self._look_up(site, _evidence_for(measured, backend), backend)

    def _look_up(self, site: Site, evidence: Candidate, backend: str) -> Candidate:
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
            speed["speed_source"] = _describe_row(found.origin, row.m, m, self.weights)
            speed["speed_note"] = None if row.speedup else "not known: the row has no bf16 time to compare with"
        return msgspec.structs.replace(evidence, backend=backend, **speed)


Speeds = ProbeSpeeds | DatabaseSpeeds


def _evidence_for(measured: list[Candidate], backend: str) -> Candidate:
    """Return the candidate whose error stands for a backend: its own if evaluated, else the reference's."""
    order = {backend: 0, "reference": 1}
    return min(measured, key=lambda candidate: order.get(candidate.backend, 2))


def _describe_row(origin: Origin, measured_at: int, m: int, weights: Weights) -> str:
    at = f"M {m}" if m == measured_at else f"M {measured_at}, the bucket of {m}"
    commit = f", commit {origin.commit[:12]}" if origin.commit else ""
    return (
        f"database row of {origin.date[:10]}, {origin.device}, driver {origin.driver}, torch {origin.torch}{commit}; "
        f"{at}, weights {weights}"
    )


@dataclass(frozen=True)
class Fastest:
    """The backend with the shortest measured time for a call, and a description of the row it comes from."""

    backend: str
    source: str


def fastest_backend(
    gemm: Gemm, way: GemmWay, m: int, k: int, n: int, *, databases: Sequence[Database] | None = None, machine: Machine | None = None
) -> Fastest | None:  # fmt: skip
    """Return the fastest backend measured on this machine for one GEMM of a linear, in the bucket of its M.

    Times with cached quantized weights are preferred, since a placed linear caches them. `way` gives the formats; its
    backend is ignored. `databases` are searched in order; None for the user's, then those that ship with loka.
    Returns the backend and the source of its time; None if there is no row.
    """
    machine = machine or _this_machine()
    for database in _databases() if databases is None else databases:
        for weights in _CACHED_FIRST:
            names = [name for name in machine.versions if name not in (BASELINE, "reference")]
            found = [database.find(linear_key(gemm, way.on(name), m, k, n, weights), machine) for name in names]
            timed = [
                (f.row.microseconds.value, f.row, f.origin) for f in found if f.row is not None and f.row.microseconds
            ]
            if timed:
                _, row, origin = min(timed, key=lambda entry: entry[0])
                assert origin is not None
                return Fastest(row.backend, _describe_row(origin, row.m, m, weights))
    return None


@lru_cache(maxsize=1)
def _this_machine() -> Machine:
    return machine_here()


def _databases() -> Iterator[Database]:
    """Yield the user's database, then the shipped rows if they have this device. An unreadable file only warns."""
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
    """Load the rows that ship with the package into a database in memory."""
    database = Database(":memory:")
    for _, record in shipped():
        database.merge(record)
    return database


def choose_machine(database: Database, target: str, report: ProbeReport) -> tuple[Machine, list[str]]:
    """Return the newest description of a device in a database, and notes for the plan."""
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
