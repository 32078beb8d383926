"""The offline A/B: two models, the same users, every metric with its interval and a verdict, and the check that the arms are comparable at all."""

import torch
from torch import Tensor

from loka.inference.evaluation import UserMetrics
from loka.metrics import BeamOverlap, check_sample_ratio, compare_paired
from loka.records import Interval, Overlap, PairedMetric, PairedTest, SplitCheck, capture_environment

LOWER_IS_BETTER = ("loss", "error", "latency")


def compare_arms(
    baseline: dict[str, Tensor],
    candidate: dict[str, Tensor],
    users: tuple[Tensor, Tensor],
    *,
    margin: float,
    names: tuple[str, str],
    data: str,
    overlap: list[Overlap] | None = None,
    seed: int = 0,
) -> PairedTest:
    """Per-user values of both arms, [U] each and with their users; users that only one arm answered for are counted and left out.

    `margin` is relative: 0.01 says that a change below one percent does not matter. A metric whose baseline is negative (a log-likelihood) is compared
    relative to its size.
    """
    missing = set(baseline) ^ set(candidate)
    if missing:
        raise ValueError(f"only one arm has the metrics {', '.join(sorted(missing))}")
    check = check_sample_ratio([len(users[0]), len(users[1])], [1, 1])
    both = torch.tensor(sorted(set(users[0].tolist()) & set(users[1].tolist())))
    if len(both) < 2:
        raise ValueError(f"the arms share {len(both)} users: a paired comparison needs at least two")
    places = [_places(one, both) for one in users]
    pairs = {name: (values[places[0]], candidate[name][places[1]]) for name, values in baseline.items()}
    empty = [name for name, (first, _) in pairs.items() if not bool(first.any())]
    if len(empty) == len(pairs):
        raise ValueError(f"{', '.join(empty)}: zero for every user of the baseline, no relative change can be told")
    metrics = [_compare(name, *pair, margin, seed) for name, pair in pairs.items() if name not in empty]
    return PairedTest(
        baseline=names[0],
        candidate=names[1],
        data=data,
        split=SplitCheck(observed=list(check.observed), p_value=check.p_value, mismatch=check.mismatch),
        metrics=metrics,
        overlap=overlap or [],
        notes=[f"{name} is zero for every user of the baseline: no relative change can be told" for name in empty],
        environment=capture_environment(),
    )


def _places(users: Tensor, wanted: Tensor) -> Tensor:
    order = users.argsort()
    return order[torch.searchsorted(users[order], wanted)]


def _compare(name: str, baseline: Tensor, candidate: Tensor, margin: float, seed: int) -> PairedMetric:
    lower = any(word in name for word in LOWER_IS_BETTER)
    sign = -1.0 if float(baseline.sum()) < 0 else 1.0
    found = compare_paired(
        sign * candidate,
        sign * baseline,
        margin=100 * margin,
        metric=name,
        lower_is_better=lower != (sign < 0),
        relative=True,
        seed=seed,
    )
    value, ends = sign * found.estimate / 100, sorted((sign * found.low / 100, sign * found.high / 100))
    return PairedMetric(
        metric=name,
        baseline=float(baseline.mean()),
        candidate=float(candidate.mean()),
        change=Interval(value=value, low=min(ends[0], value), high=max(ends[1], value)),
        minimum_detectable=found.mde / 100,
        margin=margin,
        outcome=found.verdict,
        users=found.units,
        method=found.method,
    )


def overlap_of(first: UserMetrics, second: UserMetrics, ns: tuple[int, ...]) -> list[Overlap]:
    """Overlap of what both arms recommended, for the users both answered for, at every n that the lists are long enough for."""
    both = torch.tensor(sorted(set(first.users.tolist()) & set(second.users.tolist())))
    width = min(first.items.shape[1], second.items.shape[1])
    usable = [n for n in ns if n <= width]
    if not usable or not len(both):
        return []
    metric = BeamOverlap(usable)
    metric.update(first.items[_places(first.users, both)], second.items[_places(second.users, both)])
    return [Overlap(n=n, share=value) for n, value in metric.compute().overlap.items()]
