"""Records of serving: a ranker's bundle, a load test, an experiment on live traffic."""

from typing import Literal

from loka.records.ab import SplitCheck
from loka.records.measurement import Environment, Interval
from loka.records.record import Part, Record
from loka.records.run import Outcome


class RankerColumn(Part, frozen=True):
    """A categorical or sequence column. `max_length` marks a sequence; `shares` names a column whose table it uses."""

    name: str
    cardinality: int
    max_length: int | None = None
    shares: str | None = None


class RankerInfo(Record, frozen=True, tag="ranker_bundle"):
    """A frozen ranker in a folder: how to build it, and its inputs.

    `family` with `size` and `options` names a model of this library; `factory` names a function that the server must be
    given as well.
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
    """One time bin of a load test: requests offered and answered, and latencies of the answered."""

    second: float
    offered: int
    answered: int
    good: int
    p50_ms: float | None
    p99_ms: float | None


class LoadTest(Record, frozen=True, tag="load_test"):
    """Open-loop traffic against one server. Latency counts from when a request was due, not from when it was sent."""

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
    goodput: float  # good answers per second
    latency_ms: dict[str, float]  # quantiles over answered requests: p50, p90, p99, max
    shed_ms: dict[str, float]  # the same over requests rejected with 429
    send_lag_ms: dict[str, float]  # how late the load generator sent them
    bins: list[LoadBin]
    notes: list[str]
    environment: Environment

    @property
    def late_share(self) -> float:
        """The share of accepted requests that were answered late."""
        answered = self.good + self.late
        return self.late / answered if answered else 0.0


class OnlineMetric(Part, frozen=True):
    """One metric, averaged per user. The change is relative to the baseline; its interval is valid at any time."""

    metric: str
    baseline: float
    candidate: float
    users: list[int]
    change: Interval | None  # None: too few users
    margin: float
    outcome: Outcome


class Guardrail(Part, frozen=True):
    """A quantity that must not get worse."""

    name: str
    baseline: float
    candidate: float
    limit: str
    broken: bool  # significantly worse than the limit
    doubtful: bool = False  # beyond the limit, but with too few answers to be sure

    @property
    def verdict(self) -> str:
        """The result in words."""
        return "broken" if self.broken else "over it, too few answers to be sure" if self.doubtful else "kept"


class OnlineTest(Record, frozen=True, tag="online_test"):
    """An experiment on live traffic, evaluated from the server's event log."""

    baseline: str
    candidate: str
    salt: str
    split: SplitCheck
    requests: list[int]
    duplicates: int  # ignored events whose request id was seen before
    simulated: bool  # whether some of the traffic was marked as simulated users
    metrics: list[OnlineMetric]
    guardrails: list[Guardrail]
    notes: list[str]
    environment: Environment
