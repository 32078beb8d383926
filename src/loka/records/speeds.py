"""Times of a model's GEMMs on a machine elsewhere, joined from database rows: what a report draws when nothing could be timed here."""

import msgspec

from loka.records.measurement import Interval
from loka.records.probe import Gemm
from loka.records.record import Part, Record


class SiteSpeed(Part, frozen=True):
    """One way to run one GEMM of a site there. The row is of the same shape, not of the same model."""

    site: str
    gemm: Gemm
    recipe: str
    backend: str
    microseconds: Interval
    speedup: Interval  # over bf16
    source: str  # which row, measured when and where


class TargetSpeeds(Record, frozen=True, tag="target_speeds"):
    """All rows that fit a model's sites."""

    target: str
    rows: list[SiteSpeed]
    notes: list[str] = msgspec.field(default_factory=list)
