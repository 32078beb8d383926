"""Training runs and the comparison of two of them."""

from typing import Literal

from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record

Outcome = Literal["better", "worse", "equivalent", "inconclusive"]


class Point(Part, frozen=True):
    """One logged step."""

    step: int
    loss: float
    examples_per_second: float | None = None


class Run(Record, frozen=True, tag="run"):
    """One training run: its settings, loss curve and final metrics."""

    name: str
    model: str
    data: str
    precision: str
    seed: int
    steps: int
    examples: int
    seconds: float
    curve: list[Point]
    metrics: dict[str, float]  # on the test split
    low_precision_flops_share: float | None  # of all GEMM FLOPs of the model; None: not counted
    environment: Environment


class Comparison(Record, frozen=True, tag="comparison"):
    """Two runs on the same examples: the relative change of a metric, its interval and a verdict."""

    metric: str
    baseline: str
    candidate: str
    relative_change: Interval  # 0.001 = 0.1 %; lower is better for losses
    margin: float
    minimum_detectable: float
    outcome: Outcome
    pairs: int
    clusters: int  # independent units that were resampled, e.g. households
    method: str  # of the interval
    low_precision_flops_share: float


class Progress(Record, frozen=True, tag="progress"):
    """The finished stages of a job and its settings, so that an interrupted job can continue."""

    job: str
    settings: dict[str, str | int | float | bool | None]
    done: list[str]
