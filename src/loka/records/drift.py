"""What moved while a model trained: per site and operand, when, from what to what, and whether a verdict moved with it."""

from typing import Literal

from loka.records.probe import Role
from loka.records.record import Part, Record

Feature = Literal["absmax", "std", "tail", "kurtosis", "zeros", "histogram"]


class Move(Part, frozen=True):
    """One operand of a site that is no longer what it was."""

    site: str
    role: Role
    feature: Feature  # absmax, std, tail (absmax / std), kurtosis + 3: log2; zeros: a share; histogram: mean |log2 x|
    since: int  # step from which the comparison window starts
    step: int  # step at which the window that differs starts
    before: float
    after: float
    sigmas: float | None  # change over its standard error; None where windows hold too few looks to know it


class VerdictChange(Part, frozen=True):
    """A site whose candidates are judged differently on its latest rows than on its first."""

    site: str
    before: str
    after: str


class DriftReport(Record, frozen=True, tag="drift"):
    """Windows of training compared, site by site."""

    model: str
    steps: int
    window_steps: int  # length of a window now; windows double when there are many
    sites: int  # compared
    too_short: list[str]  # sites without two complete windows: nothing can be said of them yet
    moves: list[Move]
    judged: bool  # whether verdicts were compared; if not, `changes` says nothing
    changes: list[VerdictChange]
