"""A machine elsewhere: the plan for it and the speeds of this model's GEMMs there, from rows that ship with the package.

The rows were measured on that machine for products of the same shape, not for this model. A GEMM without a row has no speed here, and its site stays in
high precision in the plan: nothing is guessed.
"""

from collections.abc import Mapping

from loka.dispatch import Policy, make_plan
from loka.dispatch.database import Database
from loka.dispatch.speed import DatabaseSpeeds, choose_machine, shipped_database
from loka.records import Plan, ProbeReport
from loka.records.performance import PerformanceRows
from loka.records.speeds import SiteSpeed, TargetSpeeds

__all__ = ["Elsewhere", "look_elsewhere"]

LEAST_SPEEDUP = 1.05


class Elsewhere:
    """What the rows of one machine say about a report's sites."""

    def __init__(self, report: ProbeReport, target: str, row_factor: float, database: Database) -> None:
        self._report, self._target, self._factor, self._database = report, target, row_factor, database

    def plan(self, overrides: Mapping[str, str]) -> Plan:
        """The plan for that machine: errors measured here, speeds measured there."""
        policy = Policy(
            max_error=self._report.max_mere,
            max_gradient_error=self._report.max_gradient_error,
            min_speedup=LEAST_SPEEDUP,
            target=self._target,
            overrides=overrides,
            row_factor=self._factor,
        )
        return make_plan(self._report, policy, database=self._database)

    def speeds(self) -> TargetSpeeds:
        """Every row that has the shape of one of the sites' GEMMs."""
        machine, notes = choose_machine(self._database, self._target, self._report)
        known = DatabaseSpeeds(self._database, machine, row_factor=self._factor)
        rows = [
            SiteSpeed(
                site=site.name,
                gemm=gemm,
                recipe=option.candidate.recipe,
                backend=option.candidate.backend,
                microseconds=option.candidate.microseconds,
                speedup=option.candidate.speedup,
                source=option.source or "source unknown",
            )
            for site in self._report.sites
            for gemm in site.gemms
            for option in known.options(site, gemm)
            if option.candidate.speedup is not None and option.candidate.microseconds is not None
        ]
        return TargetSpeeds(target=self._target, rows=rows, notes=notes)

    def rows(self) -> PerformanceRows:
        """All rows of linears of that machine: what size FP8 begins to pay at."""
        return self._database.export(op="linear", device=self._target)


def look_elsewhere(report: ProbeReport, target: str, row_factor: float) -> Elsewhere:
    """The rows that ship with the package."""
    return Elsewhere(report, target, row_factor, shipped_database())
