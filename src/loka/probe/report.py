"""Report: the findings of a Probe, to be read, saved, turned into a plan or rendered as an HTML page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loka import records
from loka.dispatch import Database, Policy, make_plan
from loka.dispatch.budget import Verify
from loka.measure.site import Weights
from loka.records import GEMMS, Candidate, Gemm, Plan, ProbeReport, Site, Source
from loka.records.prose import fold, name_some

_HEADER = ("site", "M x K x N", "FLOPs", "GEMM", "verdict", "speed")


@dataclass(frozen=True)
class Ratio:
    """Summary of error ratios: geometric mean, the largest, and the site where it occurs."""

    mean: float
    largest: float
    where: str
    count: int

    @classmethod
    def of(cls, found: Sequence[tuple[float, str]]) -> "Ratio":
        """Summarize (ratio, site) pairs."""
        largest, where = max(found)
        mean = math.exp(math.fsum(math.log(ratio) for ratio, _ in found) / len(found))
        return cls(mean, largest, where, len(found))


@dataclass(frozen=True)
class Report:
    """A `ProbeReport` record with methods to save, plan and summarize.

    Args:
        record: the data, which is what `save` writes.

    Example:
        >>> plan = Report.load("probe.json").plan(min_speedup=None)
    """

    record: ProbeReport

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Read a saved report."""
        return cls(records.load(path, ProbeReport))

    def save(self, path: str | Path) -> None:
        """Write the record to a file, as JSON that `Report.load` reads."""
        records.save(self.record, path)

    def to_html(self, path: str | Path) -> None:
        """Write the report as one self-contained HTML file."""
        from loka.report import Results, write_html

        write_html(Results(probe=self.record), path)

    def plan(
        self,
        *,
        max_error: float | None = None,
        max_gradient_error: float | None = None,
        min_speedup: float | None = Policy.min_speedup,
        target: str | None = None,
        overrides: Mapping[str, str] | None = None,
        recipe: str = "auto",
        weights: Weights = "dynamic",
        row_factor: float = 1.0,
        max_metric_change: float | None = None,
        margin: float | None = None,
        chains: bool | None = None,
        database: Database | None = None,
        verify: Verify | None = None,
    ) -> Plan:
        """Make a plan: for each GEMM the fastest candidate that is accurate enough and measurably faster than bf16.

        Args:
            max_error: largest allowed forward error (MERE), where there is no score; by default the report's own.
            max_gradient_error: largest allowed relative L2 error of a gradient, where there is no score; likewise.
            min_speedup: required speed-up over bf16. None ignores speed: the plan is for accuracy only, and says so.
            target: name of a device whose times come from `database`.
            overrides: maps site wildcards to a recipe name, "auto" or "high"; the first match wins.
            recipe: the only recipe to use, or "auto".
            weights: for `target`: times of weights quantized in every call ("dynamic") or once ("cached").
            row_factor: for `target`: rows per call there, relative to those that Probe saw.
            max_metric_change: budget for the relative change of the end metric; needs measured sensitivity.
            margin: relative change of the loss that counts as none; by default the report's own.
            chains: whether consecutive linears pass FP8 to each other where each is within its share of the margin.
                True requires it, or raises with the reasons; False never does it; None does it only in a plan for
                accuracy only, because a report has no timings of chains.
            database: by default the measurements that ship with the package.
            verify: for `max_metric_change`: measures the change of the metric with a plan applied, for all its sites
                together.

        Returns:
            The plan, with a reason for every GEMM. `loka.convert(model, plan)` applies it.
        """
        policy = Policy(
            max_error=self.record.max_mere if max_error is None else max_error,
            max_gradient_error=self.record.max_gradient_error if max_gradient_error is None else max_gradient_error,
            min_speedup=min_speedup,
            target=target,
            overrides=overrides or {},
            recipe=recipe,
            weights=weights,
            row_factor=row_factor,
            max_metric_change=max_metric_change,
            margin=self.record.margin if margin is None else margin,
            chains=chains,
        )
        return make_plan(self.record, policy, database=database, verify=verify)

    def site(self, name: str) -> Site:
        """Return one site by name."""
        for site in self.record.sites:
            if site.name == name:
                return site
        raise ValueError(f"no site {name!r}; sites are {', '.join(s.name for s in self.record.sites)}")

    def best(self, site: str, gemm: Gemm) -> Candidate | None:
        """Return the candidate with the smallest upper bound of its harm, or of its error if no harm is known.

        None if nothing was measured.
        """
        measured = [
            ((c.harm.high if c.harm else math.inf, e.high), c)
            for c in self.site(site).candidates
            if c.gemm == gemm and (e := c.error) is not None
        ]
        return min(measured, key=lambda pair: pair[0])[1] if measured else None

    def table(self) -> str:
        """Format every GEMM of every site with its verdict as aligned text, and below each the reason."""
        rows = [(*_HEADER, "")]
        for site in self.record.sites:
            shape = f"{site.m} x {site.k} x {site.n}"
            for number, verdict in enumerate(site.verdicts):
                head = (site.name, shape, f"{site.flops_share:.1%}") if number == 0 else ("", "", "")
                rows.append((*head, verdict.gemm, verdict.safety, verdict.speed, verdict.reason))
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = []
        for *cells, reason in rows:
            lines += ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()]
            lines += fold(reason)
        return "\n".join(lines)

    def compare_sources(self, gemm: Gemm = "fprop", recipe: str | None = None) -> dict[Source, Ratio]:
        """Compare the error on each source of operands with the error on N(0, 1), over all sites and recipes."""
        ratios: dict[Source, list[tuple[float, str]]] = {}
        for site in self.record.sites:
            for candidate in site.candidates:
                if candidate.gemm != gemm or recipe not in (None, candidate.recipe):
                    continue
                errors = {e.source: e.mere if gemm == "fprop" else e.relative_l2 for e in candidate.errors}
                plain = errors.pop("normal", None)
                for source, error in errors.items():
                    if plain is not None and plain.value > 0 and error.value > 0:
                        ratios.setdefault(source, []).append((error.value / plain.value, site.name))
        return {source: Ratio.of(found) for source, found in ratios.items()}

    def summary(self) -> list[str]:
        """Return the main findings in a few lines of text."""
        record = self.record
        lines = [
            f"{record.model}{f' on {record.data}' if record.data else ''}: {len(record.sites)} sites, "
            f"{record.steps} steps, {record.sampled_steps} sampled"
        ]
        for gemm in GEMMS:
            found = [v for site in record.sites for v in site.verdicts if v.gemm == gemm]
            counts = {s: sum(v.safety == s for v in found) for s in ("safe", "unsafe", "not measured")}
            speeds = {s: sum(v.speed == s for v in found) for s in ("fast", "slow", "not measured")}
            lines.append(f"{gemm}: {_spell_counts(counts)}; speed: {_spell_counts(speeds)}")
        if record.units > 1:
            share = record.margin / math.sqrt(record.units)
            lines.append(
                f"allowed for one of {record.units} units: {100 * share:.2g}% of the loss, "
                f"the margin of {record.margin:.2%} divided by the square root of their number"
            )
        for source, ratio in self.compare_sources().items():
            lines.append(
                f"forward error (MERE) on {source} as a multiple of that on N(0, 1): geometric mean {ratio.mean:.3f}, "
                f"largest {ratio.largest:.3f} ({ratio.where}), {ratio.count} candidates"
            )
        lines += self._describe_gaps()
        if record.combined_change is not None:
            together = f"all {len(record.combined_sites)} safe sites together"
            lines.append(f"{together}: {record.combined_change:+.4%} of {record.sensitivity}")
        return lines

    def _describe_gaps(self) -> list[str]:
        """Describe what was not observed, what stays in high precision, what failed, and hazards at inputs."""
        record, lines = self.record, []
        if record.unseen:
            names = [f"{part.name or 'the model itself'} ({part.type}: {part.reason})" for part in record.unseen]
            lines.append(f"not looked at: {name_some(names, 6)}")
        for site in record.sites:
            lines += [f"{site.name}: stays as it is: {site.kept}"] if site.kept else []
            lines += [f"{site.name}: {site.off}"] if site.off else []
            lines += [f"{site.name}: {alarm.text}; what helps: {alarm.help}" for alarm in site.alarms]
        lines += [f"{name}: no plan places its chain: {why}" for name, why in record.wrong_chains.items()]
        return lines + [f"while looking: {note}" for note in record.notes]

    def __str__(self) -> str:
        return self.table()


def _spell_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"
