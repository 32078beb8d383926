"""Records of an offline A/B test: two models on the same users, metric by metric, with validity checks."""

from typing import Literal

import msgspec

from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record
from loka.records.run import Outcome


class PairedMetric(Part, frozen=True):
    """One metric per user in both arms; the change is relative to the baseline's mean."""

    metric: str
    baseline: float
    candidate: float
    change: Interval
    minimum_detectable: float
    margin: float
    outcome: Outcome
    users: int
    method: str


class SplitCheck(Part, frozen=True):
    """Result of the check that users were split between the arms as intended."""

    observed: list[int]
    p_value: float
    mismatch: bool


class Overlap(Part, frozen=True):
    """Share of the top n recommended items that both arms have in common, mean over users."""

    n: int
    share: float


class PairedTest(Record, frozen=True, tag="paired_test"):
    """An offline A/B test: a baseline and a candidate on the same users."""

    baseline: str
    candidate: str
    data: str
    split: SplitCheck
    metrics: list[PairedMetric]
    overlap: list[Overlap]  # of the recommended items; empty if lists were not compared
    environment: Environment
    notes: list[str] = msgspec.field(default_factory=list)  # metrics that could not be compared


class BundleInfo(Record, frozen=True, tag="bundle"):
    """A generative recommender in a folder: the data it was trained on, and how."""

    data: str
    settings: dict[str, str | int | float | bool | None]  # options of the data set
    steps: int
    seed: int
    loss: float | None
    normalize: Literal["codebook", "valid"]  # the set over which the model's probabilities sum to one
    environment: Environment
