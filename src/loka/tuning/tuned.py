"""What `loka.tune` returns: the model as it runs now, and the proof."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from loka.placing import revert
from loka.probe.paired import NEVER
from loka.records import Conversion, Interval, Plan, save
from loka.records.tuning import TunedUnit, Tuning
from loka.report import Results, write_html


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
        """Write plan, conversion, record and report into a folder.

        Args:
            folder: made where it is missing.

        Returns:
            The folder.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.save(folder / "plan.json")
        save(self.record, folder / "tuning.json")
        if self.conversion is not None:
            save(self.conversion, folder / "conversion.json")
        else:  # of an earlier call, which converted something
            (folder / "conversion.json").unlink(missing_ok=True)
        self.report.to_html(folder / "report.html")  # last: it needs a library that may be missing
        return folder

    def __str__(self) -> str:
        """The verdict, a row for every unit, and the notes."""
        head = ("unit", "runs as", "FLOPs", "speed", "predicted", "measured", "why")
        rows = [head, *(_spell_row(unit) for unit in self.record.units)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.record.model}: {self.record.verdict}", ""]
        for row, unit in zip(rows, [None, *self.record.units], strict=True):
            name, way, *numbers, why = row
            cells = [name.ljust(widths[0]), way.ljust(widths[1]), *(n.rjust(w) for n, w in zip(numbers, widths[2:], strict=False)), why]  # fmt: skip
            lines += ["  " + "  ".join(cells), *(f"    alarm: {alarm}" for alarm in (unit.alarms if unit else ()))]
        return "\n".join([*lines, "", *(f"note: {note}" for note in self.record.notes)]).rstrip()


def _spell_row(unit: TunedUnit) -> tuple[str, ...]:
    """A unit as cells: its share of the linears' FLOPs, its own speed-up, and the change of the loss that the score predicts and that swapping it in showed."""
    speed = "" if unit.speedup is None else f"{unit.speedup.value:.2f}x"
    if unit.estimated is not None:
        speed = f"~{unit.estimated.value:.2f}x (estimated)"
    predicted = "" if unit.harm is None else _spell_change(unit.harm.value)
    measured = "" if unit.metric_change is None else _spell_change(unit.metric_change.value)
    name = unit.name if len(unit.linears) < 2 else f"{unit.linears[0]} to {unit.linears[-1]} ({len(unit.linears)})"
    return name, unit.way, f"{unit.flops_share:.1%}", speed, predicted, measured, unit.reason


def _spell_change(change: float) -> str:
    return "not finite" if change >= NEVER else f"{change:+.4%}"
