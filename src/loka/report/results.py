"""What a report is made of: the records of one job, by kind."""

import json
from dataclasses import dataclass
from pathlib import Path

from loka.records import Comparison, Plan, ProbeReport, Record, RecordError, Run, load

_KINDS: dict[str, type[Record]] = {"probe": ProbeReport, "plan": Plan, "run": Run, "comparison": Comparison}


@dataclass(frozen=True)
class Results:
    """The records of one job. Every part may be absent; the report says what it has."""

    probe: ProbeReport | None = None
    plans: tuple[Plan, ...] = ()
    runs: tuple[Run, ...] = ()
    comparisons: tuple[Comparison, ...] = ()

    @classmethod
    def load(cls, folder: str | Path) -> "Results":
        """Read every *.json of a folder; a file that is no record of a known kind is an error naming it."""
        files = sorted(Path(folder).glob("*.json"))
        if not files:
            raise ValueError(f"{folder} holds no records (*.json); give the `records` folder of a job")
        found = [load(path, _kind_of(path)) for path in files]
        probes = [r for r in found if isinstance(r, ProbeReport)]
        if len(probes) > 1:
            raise ValueError(f"{folder} holds {len(probes)} probe reports; a report is about one")
        plans = [r for r in found if isinstance(r, Plan)]
        return cls(
            probe=probes[0] if probes else None,
            plans=tuple(sorted(plans, key=lambda plan: plan.recipe != "auto")),
            runs=tuple(r for r in found if isinstance(r, Run)),
            comparisons=tuple(r for r in found if isinstance(r, Comparison)),
        )

    @property
    def plan(self) -> Plan | None:
        """The plan the evidence made; the first one where there are several."""
        return self.plans[0] if self.plans else None

    @property
    def ordered_comparisons(self) -> tuple[Comparison, ...]:
        """The comparison of the planned run first, a control in high precision last, the others by name between."""
        planned = {run.name for run in self.runs if run.precision.startswith("auto")}

        def place(c: Comparison) -> tuple[bool, bool, str]:
            return c.candidate not in planned, c.low_precision_flops_share == 0, c.candidate

        return tuple(sorted(self.comparisons, key=place))

    @property
    def ordered_runs(self) -> tuple[Run, ...]:
        """Baselines first, then runs in the order of their comparisons."""
        order = [c.candidate for c in self.ordered_comparisons]
        return tuple(sorted(self.runs, key=lambda run: order.index(run.name) + 1 if run.name in order else 0))


def _kind_of(path: Path) -> type[Record]:
    try:
        header = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not valid JSON ({error}); the file is truncated or damaged") from error
    kind = header.get("kind") if isinstance(header, dict) else None
    if kind not in _KINDS:
        raise RecordError(f"{path}: field `kind` is {kind!r}, expected one of {', '.join(_KINDS)}")
    return _KINDS[kind]
