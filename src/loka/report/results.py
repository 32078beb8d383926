"""The input of a report: the records of one job, by kind."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka.records import (
    Analysis,
    Comparison,
    Conversion,
    DriftReport,
    Environment,
    LoadTest,
    ModSummary,
    OnlineTest,
    PairedTest,
    Plan,
    ProbeReport,
    Quantized,
    Record,
    RecordError,
    Run,
    load,
)
from loka.records.performance import KernelBench, PerformanceRows
from loka.records.tuning import SizeEstimates, Tuning

# the fields of `Results`
_FIELDS: dict[str, type[Record]] = {
    "probe": ProbeReport, "plans": Plan, "runs": Run, "comparisons": Comparison, "drift": DriftReport, "mods": ModSummary,
    "benches": KernelBench, "rows": PerformanceRows, "quantized": Quantized, "tests": PairedTest, "analyses": Analysis,
    "loads": LoadTest, "experiments": OnlineTest, "tunings": Tuning, "sizes": SizeEstimates, "conversions": Conversion,
}  # fmt: skip
_KINDS: dict[str, type[Record]] = {str(kind.__struct_config__.tag): kind for kind in _FIELDS.values()}


@dataclass(frozen=True)
class Results:
    """The records of one job. Any of them may be absent; the report shows what there is.

    Args:
        probe: the probe report.
        plans: plans of what runs in which precision.
        runs: training runs.
        comparisons: comparisons of training runs.
        drift: how statistics drifted during training.
        mods: summaries of applied mods.
        benches: kernel benchmarks.
        rows: rows of the performance database.
        quantized: models quantized for serving.
        tests: paired tests of two models on the same users.
        analyses: analyses of distributions.
        loads: load tests of a server.
        experiments: experiments on live traffic.
        tunings: results of `loka.tune`.
        sizes: speed estimates for other model sizes.
        conversions: which modules run in which precision.

    Example:
        >>> write_html(Results(probe=report.record, plans=(plan,)), "report.html")
    """

    probe: ProbeReport | None = None
    plans: tuple[Plan, ...] = ()
    runs: tuple[Run, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    drift: DriftReport | None = None
    mods: tuple[ModSummary, ...] = ()
    benches: tuple[KernelBench, ...] = ()
    rows: tuple[PerformanceRows, ...] = ()
    quantized: tuple[Quantized, ...] = ()
    tests: tuple[PairedTest, ...] = ()
    analyses: tuple[Analysis, ...] = ()
    loads: tuple[LoadTest, ...] = ()
    experiments: tuple[OnlineTest, ...] = ()
    tunings: tuple[Tuning, ...] = ()
    sizes: tuple[SizeEstimates, ...] = ()
    conversions: tuple[Conversion, ...] = ()

    @classmethod
    def load(cls, folder: str | Path, add: Iterable[str | Path] = ()) -> "Results":
        """Read one record file, or every *.json of a folder, and the files of `add`.

        Files from which `tune` resumes (evidence*.json) are skipped. Any other file without a known record is an error.
        """
        place = Path(folder)
        if not place.exists():
            raise ValueError(f"there is no file or folder {folder}")
        found = [place] if place.is_file() else sorted(place.glob("*.json"))
        files = [path for path in found if path == place or not path.name.startswith("evidence")]
        if not files:
            raise ValueError(f"{folder} holds no records (*.json); give the `records` folder of a job")
        if place.is_dir() and (place / "records").is_dir():
            raise ValueError(f"{folder} is the folder of a job; its records are in {place / 'records'}")
        return cls.of([read_any(path) for path in [*files, *map(Path, add)]], str(folder))

    @classmethod
    def of(cls, found: Sequence[Record], name: str = "these records") -> "Results":
        """Sort records by kind. There may be at most one probe report and one drift report."""
        parts: dict[str, Any] = {
            field: tuple(record for record in found if isinstance(record, kind)) for field, kind in _FIELDS.items()
        }
        for field in ("probe", "drift"):
            if len(parts[field]) > 1:
                raise ValueError(f"{name} holds {len(parts[field])} {field} reports; a report is about one")
            parts[field] = parts[field][0] if parts[field] else None
        parts["plans"] = tuple(
            sorted(parts["plans"], key=lambda plan: (plan.recipe != "auto", plan.target is not None))
        )
        return cls(**parts)

    @property
    def plan(self) -> Plan | None:
        """The plan that ran: the first of `plans`, where `of` puts plans made from evidence and for this machine first."""
        return self.plans[0] if self.plans else None

    @property
    def target_plan(self) -> Plan | None:
        """A plan for another machine, in addition to the one that ran."""
        return next((plan for plan in self.plans[1:] if plan.target is not None and plan.recipe == "auto"), None)

    @property
    def ordered_comparisons(self) -> tuple[Comparison, ...]:
        """The comparisons: the planned run first, then the others by name, controls in high precision last."""
        planned = {run.name for run in self.runs if run.precision.startswith("auto")}

        def place(c: Comparison) -> tuple[bool, bool, str]:
            return c.candidate not in planned, c.low_precision_flops_share == 0, c.candidate

        return tuple(sorted(self.comparisons, key=place))

    @property
    def ordered_runs(self) -> tuple[Run, ...]:
        """Baselines first, then runs in the order of their comparisons."""
        order = [c.candidate for c in self.ordered_comparisons]
        return tuple(sorted(self.runs, key=lambda run: order.index(run.name) + 1 if run.name in order else 0))

    @property
    def environments(self) -> dict[str, Environment]:
        """The environments that produced the records, one entry per command and machine."""
        parts = {
            "training": self.ordered_runs,
            "probe": (self.probe,) if self.probe else (),
            "plan": self.plans,
            "mods": self.mods,
            "quantized model": self.quantized,
            "A/B": self.tests,
            "distributions": self.analyses,
            "kernels": self.benches,
            "load test": self.loads,
            "experiment": self.experiments,
            "tuning": self.tunings,
            "conversion": self.conversions,
        }
        found: dict[str, Environment] = {}
        seen = set()
        for name, records in parts.items():
            for record in records:
                key = (record.environment.command, record.environment.device)
                if key not in seen:
                    seen.add(key)
                    found[name if name not in found else f"{name} {len(found) + 1}"] = record.environment
        return found


def read_any(path: Path) -> Record:
    """Read one record file of any kind that a report can show."""
    try:
        header = json.loads(path.read_bytes())
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not valid JSON ({error}); the file is truncated or damaged") from error
    kind = header.get("kind") if isinstance(header, dict) else None
    if kind not in _KINDS:
        raise RecordError(f"{path}: field `kind` is {kind!r}, expected one of {', '.join(_KINDS)}")
    return load(path, _KINDS[kind])
