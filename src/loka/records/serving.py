"""What serving writes down: a ranker's bundle, a load test, an experiment on live traffic."""

from typing import Literal

from loka.records.ab import SplitCheck
from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record
from loka.records.run import Outcome


class RankerColumn(Part, frozen=True):
    """A categorical or sequence column of a ranker; `max_length` marks a sequence, `shares` the column whose table it reads."""

    name: str
    cardinality: int
    max_length: int | None = None
    shares: str | None = None


class RankerInfo(Record, frozen=True, tag="ranker_bundle"):
    """A frozen ranker in a folder: how to build it, and what it reads.

    `family` with `size` and `options` names a model of this library; `factory` one that whoever serves it must name as well.
    """

    name: str
    family: str | None
    size: str | None
    options: dict[str, str | int | float | bool | None]
    factory: str | None
    dense: list[str]
    columns: list[RankerColumn]
    labels: list[str]
    link: Literal["sigmoid", "identity"]
    environment: Environment


class LoadBin(Part, frozen=True):
    """One stretch of a load test: what was offered and answered in it, and latencies of the answered."""

    second: float
    offered: int
    answered: int
    good: int
    p50_ms: float | None
    p99_ms: float | None


class LoadTest(Record, frozen=True, tag="load_test"):
    """Open-loop traffic against one server. Latency counts from when a request was due, not from when the client got round to it."""

    url: str
    model: str
    arrivals: Literal["poisson", "uniform"]
    rate: float
    seconds: float
    sla_ms: float
    seed: int
    offered: int
    codes: dict[str, int]  # by HTTP status; "error" for connections that broke
    good: int  # answered with 200 inside the SLA
    late: int  # answered with 200 outside it
    goodput: float  # good answers a second
    latency_ms: dict[str, float]  # quantiles of the answered: p50, p90, p99, max
    shed_ms: dict[str, float]  # the same of 429
    send_lag_ms: dict[str, float]  # how late the generator itself was
    bins: list[LoadBin]
    notes: list[str]
    environment: Environment

    @property
    def late_share(self) -> float:
        """The share of accepted requests that were answered late."""
        answered = self.good + self.late
        return self.late / answered if answered else 0.0


class OnlineMetric(Part, frozen=True):
    """One metric, averaged per user; the change is relative to the baseline's mean, its interval may be looked at any time."""

    metric: str
    baseline: float
    candidate: float
    users: list[int]
    change: Interval | None  # None: too few users to say anything
    margin: float
    outcome: Outcome


class Guardrail(Part, frozen=True):
    """Something that must not get worse."""

    name: str
    baseline: float
    candidate: float
    limit: str
    broken: bool  # worse beyond the limit, and beyond doubt
    doubtful: bool = False  # beyond the limit, and too few answers to be sure of it

    @property
    def verdict(self) -> str:
        """In words."""
        return "broken" if self.broken else "over it, too few answers to be sure" if self.doubtful else "kept"


class OnlineTest(Record, frozen=True, tag="online_test"):
    """An experiment on live traffic, read from the server's events."""

    baseline: str
    candidate: str
    salt: str
    split: SplitCheck
    requests: list[int]
    duplicates: int  # events of a request id that was there already: left out
    simulated: bool  # some of the traffic said that its users are simulated
    metrics: list[OnlineMetric]
    guardrails: list[Guardrail]
    notes: list[str]
    environment: Environment
