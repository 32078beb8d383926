"""Offline A/B comparison of two models on the same users: a check of the sample ratio, then intervals and verdicts."""

import math
from collections.abc import Sequence

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
    lower_is_better: Sequence[str] = (),
) -> PairedTest:
    """Compare per-user metrics of two arms, paired by user. Users that only one arm has are left out of the metrics.

    Args:
        baseline: metric -> values [U] of the baseline.
        candidate: metric -> values [U] of the candidate.
        users: the users of both arms, int64 [U] each.
        margin: relative change that counts as equivalent; 0.01 is one percent. A metric with a negative baseline (a
            log-likelihood) is compared relative to its magnitude.
        names: names of the arms.
        data: name of the data.
        overlap: overlap of the recommended lists, for the record.
        seed: seed of the bootstrap.
        lower_is_better: metrics where lower is better, besides those with loss, error or latency in their name.

    Returns:
        The record of the comparison, with the check of the sample ratio.

    Example:
        >>> compare_arms(a, b, (users, users), margin=0.01, names=("a", "b"), data="ml-1m")    # doctest: +SKIP
    """
    missing = set(baseline) ^ set(candidate)
    if missing:
        raise ValueError(f"only one arm has the metrics {', '.join(sorted(missing))}")
    if unknown := set(lower_is_better) - set(baseline):
        raise ValueError(f"there is no metric {', '.join(sorted(unknown))}; there are {', '.join(baseline)}")
    lower = [name for name in baseline if name in lower_is_better or any(word in name for word in LOWER_IS_BETTER)]
    check = check_sample_ratio([len(users[0]), len(users[1])], [1, 1])
    both = torch.tensor(sorted(set(users[0].tolist()) & set(users[1].tolist())))
    if len(both) < 2:
        raise ValueError(f"the arms share {len(both)} users: a paired comparison needs at least two")
    places = [_places(one, both) for one in users]
    pairs = {name: (values[places[0]], candidate[name][places[1]]) for name, values in baseline.items()}
    empty = [name for name, (first, _) in pairs.items() if not bool(first.any())]
    if len(empty) == len(pairs):
        raise ValueError(f"{', '.join(empty)}: zero for every user of the baseline, so a relative change is undefined")
    found = {
        name: _compare(name, *pair, margin, seed, name in lower) for name, pair in pairs.items() if name not in empty
    }
    rare = [
        f"{name} is nonzero for only {int(pairs[name][0].count_nonzero())} of {len(both)} users of the baseline: too "
        "few for an interval of the relative change; hint: more users"
        for name, metric in found.items()
        if metric is None
    ]
    if len(rare) == len(found):
        raise ValueError("; ".join(rare))
    return PairedTest(
        baseline=names[0],
        candidate=names[1],
        data=data,
        split=SplitCheck(observed=list(check.observed), p_value=check.p_value, mismatch=check.mismatch),
        metrics=[metric for metric in found.values() if metric is not None],
        overlap=overlap or [],
        notes=[
            *([f"lower is better: {', '.join(lower)}"] if lower else []),
            *(f"{name} is zero for every user of the baseline: a relative change is undefined" for name in empty),
            *rare,
            *(
                f"{name} differs for no user: its interval is what {len(both):,} users can exclude"
                for name, pair in pairs.items()
                if found.get(name) is not None and torch.equal(*pair)
            ),
        ],
        environment=capture_environment(),
    )


def _places(users: Tensor, wanted: Tensor) -> Tensor:
    order = users.argsort()
    return order[torch.searchsorted(users[order], wanted)]


def _compare(
    name: str, baseline: Tensor, candidate: Tensor, margin: float, seed: int, lower: bool
) -> PairedMetric | None:
    """Compare one metric; None if the bootstrap has no interval, as samples of users may sum to zero."""
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
    if math.isnan(found.low) or math.isnan(found.high):
        return None
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
    """Compute the overlap of the lists that two arms recommended to their common users.

    Args:
        first: the first arm.
        second: the second arm.
        ns: list lengths; those longer than the recommended lists are left out.

    Returns:
        The overlap at every usable n.

    Example:
        >>> overlap_of(baseline, candidate, (10, 50))                                   # doctest: +SKIP
    """
    both = torch.tensor(sorted(set(first.users.tolist()) & set(second.users.tolist())))
    width = min(first.items.shape[1], second.items.shape[1])
    usable = [n for n in ns if n <= width]
    if not usable or not len(both):
        return []
    metric = BeamOverlap(usable)
    metric.update(first.items[_places(first.users, both)], second.items[_places(second.users, both)])
    return [Overlap(n=n, share=value) for n, value in metric.compute().overlap.items()]
