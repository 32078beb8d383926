"""Evaluate an experiment from its events: is the assignment sound, and did the metrics change?

The unit is the user. A user's value of a metric is the sum of the outcomes divided by the user's number of exposures,
so that frequent users do not count more. In order:

    sample ratio    users per arm against the split, by a test that may be repeated; no user may be in two arms
    metrics         relative change of the mean over users, with an anytime-valid interval (loka.metrics.sequential) and
                    one of four verdicts
    guardrails      p99 latency, refused and empty answers; broken if the candidate is significantly beyond the limit

An exposure counts once per request id, even if several processes wrote it. A request that was refused, and answered when
its client tried again with the same id, counts as both. An outcome counts once per request id and name, and only for
requests that were answered.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from loka.metrics import Moments, check_ratio_anytime, compare_anytime
from loka.records import Guardrail, Interval, OnlineMetric, OnlineTest, SplitCheck, capture_environment
from loka.serving.experiment import Described, Split

THRESHOLD = 0.001  # p-value of a sample-ratio mismatch
SURE = 3.29  # standard errors: one in a thousand, two-sided
# Limits of the guardrails: factor on p99 latency, additional share of refused and of empty answers
SLOWER, SHED_MORE, EMPTIER = 1.1, 0.01, 0.01


class Exposure(msgspec.Struct, tag_field="event", tag="exposure"):
    """A line of an events file: a request of a user was answered, or refused."""

    request_id: str
    user: str | int | None
    arm: str
    ms: float
    status: int
    empty: bool
    simulated: bool


class Outcome(msgspec.Struct, tag_field="event", tag="outcome"):
    """A line of an events file: what came of an answer."""

    request_id: str
    name: str
    value: float


class Shadow(msgspec.Struct, tag_field="event", tag="shadow"):
    """A line of an events file: the second model's answer in shadow mode."""


Line = Exposure | Outcome | Shadow
_decoder: "msgspec.json.Decoder[Line]" = msgspec.json.Decoder(Line)


@dataclass
class Arm:
    """The events of one arm, by user."""

    exposures: dict[str, int] = field(default_factory=dict)  # answered requests; 0 for a user who got no answer
    refusals: dict[str, int] = field(default_factory=dict)
    empties: dict[str, int] = field(default_factory=dict)  # answers without an item
    milliseconds: list[float] = field(default_factory=list)
    totals: dict[str, dict[str, float]] = field(default_factory=dict)  # metric -> user -> sum

    @property
    def answered(self) -> int:
        """How many requests were answered."""
        return sum(self.exposures.values())

    @property
    def refused(self) -> int:
        """How many requests were refused, or given up by the client."""
        return sum(self.refusals.values())


@dataclass
class Events:
    """The events of a folder."""

    names: list[str]
    shares: list[float]
    salt: str
    arms: dict[str, Arm]
    duplicates: int = 0
    damaged: int = 0
    orphans: int = 0
    shadows: int = 0
    simulated: bool = False


def read_events(folder: str | Path) -> Events:
    """Read every events file in the folder of an experiment; each request id counts once."""
    place = Path(folder)
    try:
        header = msgspec.json.decode((place / "experiment.json").read_bytes(), type=Described)
        Split(tuple(header.arms), tuple(header.shares), header.salt)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{place}: no experiment.json that can be read ({error}); hint: loka serve A B --events {place}"
        ) from error
    events = Events(header.arms, header.shares, header.salt, {name: Arm() for name in header.arms})
    seen: dict[tuple[str, bool], tuple[str, str]] = {}  # by request id, and whether it was answered
    outcomes: dict[tuple[str, str], float] = {}
    for path in sorted(place.glob("events-*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                _add_event(_decoder.decode(line), events, seen, outcomes)
            except (ValueError, KeyError, RecursionError):
                events.damaged += 1  # a killed process may leave an incomplete line; or it is of another arm
    for (request_id, name), value in outcomes.items():
        if (request_id, True) not in seen:
            events.orphans += 1
            continue
        user, arm = seen[request_id, True]
        totals = events.arms[arm].totals.setdefault(name, {})
        totals[user] = totals.get(user, 0.0) + value
    return events


def _add_event(event: Line, events: Events, seen: dict[tuple[str, bool], tuple[str, str]], outcomes: dict[tuple[str, str], float]) -> None:  # fmt: skip
    if isinstance(event, Shadow):
        events.shadows += 1
        return
    if isinstance(event, Outcome):
        if (event.request_id, event.name) in outcomes:
            events.duplicates += 1
        else:
            outcomes[event.request_id, event.name] = event.value
        return
    user, arm, answered = str(event.user), events.arms[event.arm], event.status == 200
    if (event.request_id, answered) in seen:
        events.duplicates += 1
        return
    seen[event.request_id, answered] = (user, event.arm)
    events.simulated |= event.simulated
    if answered:
        arm.exposures[user] = arm.exposures.get(user, 0) + 1
        arm.empties[user] = arm.empties.get(user, 0) + event.empty
        arm.milliseconds.append(event.ms)
    else:
        arm.refusals[user] = arm.refusals.get(user, 0) + 1
        arm.exposures.setdefault(user, 0)


def judge_experiment(
    folder: str | Path, *, margin: float = 0.01, alpha: float = 0.05, lower_is_better: Sequence[str] = ()
) -> OnlineTest:
    """Evaluate the events so far. May be called any number of times while the experiment runs.

    Args:
        folder: folder of the events.
        margin: relative change of a metric that counts as equivalent.
        alpha: probability that the interval of a metric is ever wrong.
        lower_is_better: names of metrics where lower is better.

    Returns:
        The record. If the sample ratio is off, the metrics must not be trusted.

    Example:
        >>> judge_experiment("runs/ab", margin=0.01).metrics                            # doctest: +SKIP
    """
    events = read_events(folder)
    if events.shadows:
        raise ValueError(f"{folder}: events of shadow mode, where {events.names[0]} answers everybody: there are no two groups of users to compare; the overlap of the answers is in its {events.shadows:,} shadow lines")  # fmt: skip
    if len(events.names) != 2:
        raise ValueError(f"{folder}: {len(events.names)} arms; expected a baseline and a candidate")
    baseline, candidate = (events.arms[name] for name in events.names)
    counts = [len(baseline.exposures), len(candidate.exposures)]
    both = baseline.exposures.keys() & candidate.exposures.keys()
    p_value = check_ratio_anytime(counts, events.shares)
    notes = []
    if both:
        notes.append(f"{len(both)} users were in both arms: the assignment was not sticky")
    if events.damaged:
        notes.append(f"{events.damaged} line{'s' * (events.damaged != 1)} could not be read: left out")
    if events.orphans:
        notes.append(f"{events.orphans} outcome{'s' * (events.orphans != 1)} without an answered request left out")
    if events.simulated:
        notes.append("users are simulated: this says that the machinery works, and nothing about people")
    names = sorted({*baseline.totals, *candidate.totals})
    metrics = [
        _compare(name, baseline, candidate, margin, alpha / max(1, len(names)), name in lower_is_better)
        for name in names
    ]
    if lower_is_better:
        absent = [name for name in lower_is_better if name not in names]
        notes.append(f"lower is better: {', '.join(lower_is_better)}" + (f"; no outcome of {', '.join(absent)} yet" if absent else ""))  # fmt: skip
    if len(names) > 1:
        notes.append(
            f"{len(names)} metrics share the error of {alpha:g}: each interval is at {1 - alpha / len(names):.2%}"
        )
    return OnlineTest(
        baseline=events.names[0],
        candidate=events.names[1],
        salt=events.salt,
        split=SplitCheck(observed=counts, p_value=p_value, mismatch=p_value < THRESHOLD or bool(both)),
        requests=[arm.answered + arm.refused for arm in (baseline, candidate)],
        duplicates=events.duplicates,
        simulated=events.simulated,
        metrics=metrics,
        guardrails=_check_guardrails(baseline, candidate),
        notes=notes,
        environment=capture_environment(),
    )


def user_values(arm: Arm, metric: str) -> list[float]:
    """Return, for every user with an answer, the sum of the outcomes divided by the number of answers."""
    totals = arm.totals.get(metric, {})
    return [totals.get(user, 0.0) / count for user, count in arm.exposures.items() if count]


def _compare(name: str, baseline: Arm, candidate: Arm, margin: float, alpha: float, lower: bool) -> OnlineMetric:
    a, b = Moments.of(user_values(baseline, name)), Moments.of(user_values(candidate, name))
    found = compare_anytime(b, a, margin=margin, lower_is_better=lower, alpha=alpha)
    change = None
    if found.estimate is not None and found.low is not None and found.high is not None:
        change = Interval(value=found.estimate, low=found.low, high=found.high)
    return OnlineMetric(
        metric=name, baseline=a.mean, candidate=b.mean, users=[a.units, b.units], change=change, margin=margin, outcome=found.verdict
    )  # fmt: skip


def _check_guardrails(baseline: Arm, candidate: Arm) -> list[Guardrail]:
    (_, base_p99, base_high), (cand_low, cand_p99, _) = (_p99(arm.milliseconds) for arm in (baseline, candidate))
    slow = cand_low is not None and base_high is not None and cand_low > SLOWER * base_high
    over = not slow and cand_p99 > SLOWER * base_p99
    found = [
        Guardrail(name="p99 ms", baseline=base_p99, candidate=cand_p99, limit=f"<= {SLOWER:g} x baseline", broken=slow, doubtful=over)
    ]  # fmt: skip
    shares = (
        ("refused", SHED_MORE, [_share(arm.refusals, _add(arm.exposures, arm.refusals)) for arm in (baseline, candidate)]),
        ("empty", EMPTIER, [_share(arm.empties, arm.exposures) for arm in (baseline, candidate)]),
    )  # fmt: skip
    for name, limit, ((p, one), (q, other)) in shares:
        broken = q - p - SURE * math.hypot(one, other) > limit
        over = not broken and q - p > limit
        found.append(Guardrail(name=name, baseline=p, candidate=q, limit=f"<= baseline + {limit:g}", broken=broken, doubtful=over))  # fmt: skip
    return found


def _add(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {user: a.get(user, 0) + b.get(user, 0) for user in a.keys() | b.keys()}


def _share(part: dict[str, int], whole: dict[str, int]) -> tuple[float, float]:
    """Return the share of requests, and its standard error over users, whose requests are not independent of each other.

    One user who breaks off a thousand requests must not stop an experiment. The error is infinite below two users.
    """
    users, total = sum(count > 0 for count in whole.values()), sum(whole.values())
    if users < 2:
        return (sum(part.values()) / total if total else 0.0), math.inf
    share = sum(part.values()) / total
    squares = sum((part.get(user, 0) - share * count) ** 2 for user, count in whole.items())
    return share, math.sqrt(squares * users / (users - 1)) / total + 1 / total


def _p99(values: list[float]) -> tuple[float | None, float, float | None]:
    """Return (low, p99, high) by order statistics; no interval below 1,000 answers."""
    ordered, n = sorted(values), len(values)
    if not n:
        return None, 0.0, None
    middle = ordered[min(n - 1, int(0.99 * n))]
    if n < 1000:
        return None, middle, None
    spread = SURE * math.sqrt(n * 0.99 * 0.01)
    return ordered[int(0.99 * n - spread)], middle, ordered[min(n - 1, math.ceil(0.99 * n + spread))]
