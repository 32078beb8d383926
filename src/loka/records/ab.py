"""An offline A/B comparison: two models on the same users, metric by metric, with what must hold before it is believed."""

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
    """Whether both arms answered for as many users as they should have."""

    observed: list[int]
    p_value: float
    mismatch: bool


class Overlap(Part, frozen=True):
    """Share of the first n recommended items that both arms have, mean over users."""

    n: int
    share: float


class PairedTest(Record, frozen=True, tag="paired_test"):
    """An offline A/B test: a baseline and a candidate on the same users."""

    baseline: str
    candidate: str
    data: str
    split: SplitCheck
    metrics: list[PairedMetric]
    overlap: list[Overlap]  # of the recommended sets; empty where lists were not compared
    environment: Environment
    notes: list[str] = msgspec.field(default_factory=list)  # metrics that could not be compared


class BundleInfo(Record, frozen=True, tag="bundle"):
    """A generative recommender in a folder: which data it was made from, and how."""

    data: str
    settings: dict[str, str | int | float | bool | None]  # options of the data set
    steps: int
    seed: int
    loss: float | None
    normalize: Literal["codebook", "valid"]  # what the model's probabilities sum to one over
    environment: Environment
