"""What `loka.tune` returns: the model as it runs now, and the proof."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from loka.placing import revert
from loka.probe.paired import NEVER
from loka.records import Conversion, Interval, Plan, save
from loka.records.tuning import Tuning
from loka.report import Results, write_html


def _spell(change: float) -> str:
    return "not finite" if change >= NEVER else f"{change:+.4%}"


@dataclass(frozen=True)
class TuningReport:
    """The record of a tuning as a page.

    Args:
        record: what was measured and decided.
    """

    record: Tuning

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page.

        Args:
            path: the file.

        Returns:
            The path.
        """
        done = [] if self.record.conversion is None else [self.record.conversion]
        write_html(Results.of([self.record, *done]), path)
        return Path(path)


@dataclass(frozen=True)
class Tuned:
    """A tuned model, with the record of everything that was measured.

    Args:
        model: the model that was given, converted in place.
        record: everything that was measured and decided.

    Example:
        >>> tuned = loka.tune(model, batches, loss)
        >>> print(tuned)
        >>> tuned.plan.save("plan.json")
    """

    model: nn.Module
    record: Tuning

    @property
    def plan(self) -> Plan:
        """What was chosen; `loka.convert(model, plan)` places it elsewhere."""
        return self.record.plan

    @property
    def conversion(self) -> Conversion | None:
        """What runs; None where nothing was converted."""
        return self.record.conversion

    @property
    def report(self) -> "TuningReport":
        """The page: `tuned.report.to_html("report.html")`."""
        return TuningReport(self.record)

    @property
    def speedup(self) -> Interval | None:
        """Of the whole step over compiled 16 bits; None where it was not measured."""
        return self.record.speedup

    def revert(self) -> int:
        """Take the conversion back; returns how many linears were converted."""
        mods = [name.partition("(")[0] for name in self.plan.mods]
        return revert(self.model, discard=mods) if self.conversion is not None else 0

    def save(self, folder: str | Path) -> Path:
        """Write plan, conversion and record into a folder.

        Args:
            folder: made where it is missing.

        Returns:
            The folder.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.save(folder / "plan.json")
        self.report.to_html(folder / "report.html")
        save(self.record, folder / "tuning.json")
        if self.conversion is not None:
            save(self.conversion, folder / "conversion.json")
        else:  # of an earlier call, which converted something
            (folder / "conversion.json").unlink(missing_ok=True)
        return folder

    def __str__(self) -> str:
        r = self.record
        lines = [f"{r.model}: {r.verdict}"]
        width = max((len(unit.name) for unit in r.units), default=0)
        for unit in r.units:
            harm = "" if unit.harm is None else f"  predicted {unit.harm.value:+.4%}"
            alone = "" if unit.metric_change is None else f"  swapped {_spell(unit.metric_change.value)}"
            speed = "" if unit.speedup is None else f"  {unit.speedup.value:.2f}x"
            if unit.estimated is not None:
                speed = f"  ~{unit.estimated.value:.2f}x estimated"
            lines.append(
                f"  {unit.name:{width}}  {unit.way:10} {unit.flops_share:6.1%}{speed}{harm}{alone}  {unit.reason}"
            )
            lines += [f"    alarm: {alarm}" for alarm in unit.alarms]
        return "\n".join([*lines, *(f"  note: {note}" for note in r.notes)])
