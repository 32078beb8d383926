"""The result of `loka.tune`: the converted model and everything measured about it."""

import itertools
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from loka.placing import revert
from loka.probe.paired import NEVER
from loka.records import Conversion, Interval, Plan, RecordError, load, save
from loka.records.prose import fold
from loka.records.tuning import TunedUnit, Tuning
from loka.report import Results, write_html

# What a call leaves in its folder besides its evidence; `ranker` is written by `loka tune --serve`. The record is moved
# last: as long as it is there, so is something to move, and a folder without it is one whose move was interrupted.
RESULT = ("plan.json", "conversion.json", "report.html", "ranker", "tuning.json")


@dataclass(frozen=True)
class TuningReport:
    """A tuning record as an HTML report.

    Args:
        record: the record.
    """

    record: Tuning

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page and return its path."""
        done = [] if self.record.conversion is None else [self.record.conversion]
        write_html(Results.of([self.record, *done]), path)
        return Path(path)


@dataclass(frozen=True)
class Tuned:
    """A tuned model, with the record of everything measured.

    Args:
        model: the user's model, converted in place.
        record: everything measured and decided.

    Example:
        >>> tuned = loka.tune(model, batches, loss)
        >>> print(tuned)
        >>> tuned.plan.save("plan.json")
    """

    model: nn.Module
    record: Tuning

    @property
    def plan(self) -> Plan:
        """The chosen plan; `loka.convert(model, plan)` applies it to another copy of the model."""
        return self.record.plan

    @property
    def conversion(self) -> Conversion | None:
        """The applied conversion; None if nothing was converted."""
        return self.record.conversion

    @property
    def report(self) -> "TuningReport":
        """The HTML report: `tuned.report.to_html("report.html")`."""
        return TuningReport(self.record)

    @property
    def speedup(self) -> Interval | None:
        """Speed-up of the whole step over the compiled 16-bit step; None if it was not measured."""
        return self.record.speedup

    def revert(self) -> int:
        """Undo the conversion. Return how many linears were converted."""
        mods = [name.partition("(")[0] for name in self.plan.mods]
        return revert(self.model, discard=mods) if self.conversion is not None else 0

    def save(self, folder: str | Path) -> Path:
        """Write plan, conversion, record and report into a folder, and return it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.plan.save(folder / "plan.json")
        save(self.record, folder / "tuning.json")
        if self.conversion is not None:
            save(self.conversion, folder / "conversion.json")
        else:  # a file of an earlier call would contradict the record
            (folder / "conversion.json").unlink(missing_ok=True)
        self.report.to_html(folder / "report.html")  # last, since it needs an optional library
        return folder

    def __str__(self) -> str:
        """Format the verdict, a table of units with the reason below each, and the notes."""
        head = ("unit", "runs as", "FLOPs", "speed", "predicted", "measured", "")
        rows = [head, *(_spell_row(unit) for unit in self.record.units)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.record.model}: {self.record.verdict}", ""]
        for row, unit in zip(rows, [None, *self.record.units], strict=True) if self.record.units else ():
            name, way, *numbers, why = row
            cells = [
                name.ljust(widths[0]),
                way.ljust(widths[1]),
                *(n.rjust(w) for n, w in zip(numbers, widths[2:], strict=False)),
            ]
            lines += ["  " + "  ".join(cells).rstrip(), *fold(why)]
            lines += [line for alarm in (unit.alarms if unit else ()) for line in fold(f"alarm: {alarm}")]
        notes = (line for note in self.record.notes for line in fold(f"note: {note}", first=""))
        return "\n".join([*lines, "", *notes]).rstrip()


def keep_earlier(folder: Path, record: Tuning) -> Path | None:
    """Move the result of another call out of the way of `record`, which will be saved in this folder.

    Args:
        folder: where `Tuned.save` will write.
        record: what it will write. A saved record with the same arguments is of the same call and stays.

    Returns:
        The folder where the earlier result is now; None if nothing was moved.

    Example:
        >>> keep_earlier(Path("runs/x"), tuned.record)
        PosixPath('runs/x/earlier-1')
    """
    if not (folder / "tuning.json").exists():
        return None
    try:
        if load(folder / "tuning.json", Tuning).arguments == record.arguments:
            return None
    except RecordError:
        pass  # of another version, or damaged: not ours to replace
    place = next(p for n in itertools.count(1) if not ((p := folder / f"earlier-{n}") / "tuning.json").exists())
    place.mkdir(exist_ok=True)
    for name in RESULT:
        if (folder / name).exists():
            (folder / name).rename(place / name)
    return place


def _spell_row(unit: TunedUnit) -> tuple[str, ...]:
    """Return the table row of a unit.

    The changes are those of the loss as predicted by the score, and of the metric with only this unit swapped in. The
    last name of a chain is written without what it shares with the first.
    """
    speed = "" if unit.speedup is None else f"{unit.speedup.value:.2f}x"
    if unit.estimated is not None:
        speed = f"~{unit.estimated.value:.2f}x (estimated)"
    predicted = "" if unit.harm is None else _spell_change(unit.harm.value)
    measured = "" if unit.metric_change is None else _spell_change(unit.metric_change.value)
    name = unit.name
    if len(unit.linears) > 1:
        first, last = unit.linears[0], unit.linears[-1]
        pairs = zip(first.split(".")[:-1], last.split(".")[:-1], strict=False)
        shared = ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        name = f"{first} to {last[len(shared) :]} ({len(unit.linears)})"
    return name, unit.way, f"{unit.flops_share:.1%}", speed, predicted, measured, unit.reason


def _spell_change(change: float) -> str:
    return "not finite" if change >= NEVER else f"{change:+.4%}"
