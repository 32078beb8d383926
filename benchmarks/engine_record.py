"""The generative engine on one machine: what a batch takes, step by step from the plain model, and where the time goes.

row        one variant (eager, compiled, the engine in bf16, in FP8 ...), one batch size, one context length
profile    milliseconds of a batch by kind of work
bar        a ratio that was asked for, and what was measured
"""

from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record


class EngineRow(Part, frozen=True):
    """The time of one batch."""

    variant: str
    batch: int
    context: int
    milliseconds: Interval
    queries_per_second: float
    run: str | None = None  # where it is of another run than the rest


class EngineProfile(Part, frozen=True):
    """Where the time of a batch goes."""

    variant: str
    batch: int
    context: int
    by_kind: dict[str, float]  # milliseconds


class EngineBar(Part, frozen=True):
    """A ratio and its bar, in the words of the benchmark."""

    context: int
    what: str
    value: float
    bar: str
    met: bool


class EngineBench(Record, frozen=True, tag="engine_bench"):
    """Everything measured of one model."""

    model: str
    beams: int
    rows: list[EngineRow]
    profiles: list[EngineProfile]
    bars: list[EngineBar]
    notes: list[str]
    environment: Environment

    @property
    def contexts(self) -> list[int]:
        """In the order of the rows."""
        return list(dict.fromkeys(row.context for row in self.rows))

    def waterfall(self, context: int) -> list[EngineRow]:
        """The variants of one context at the batch that most of them have, slowest first: what each step gave."""
        here = [row for row in self.rows if row.context == context]
        sizes = [row.batch for row in here]
        common = max(dict.fromkeys(sizes), key=sizes.count)
        return sorted((row for row in here if row.batch == common), key=lambda row: -row.milliseconds.value)
