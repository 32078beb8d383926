"""Compare losses of the same examples in two precisions: the relative change of their mean, with an honest interval.

    change = sum(low - high) / sum(high)            paired, so free of the noise of drawing examples

An interval over single numbers would miss four effects:

    numbers of one example       tokens and tasks of one example err together: a loss [B, ...] is compared by example
    examples of one batch        they share scales, so one extreme row can hurt its batch. If batches differ more than
                                 their examples explain, batches are the unit
    the same batch twice         counts as one batch; copies are recognized by their losses
    rounding of the losses       a mean in bfloat16 moves in steps of 0.4 to 0.8 %, and equal losses may differ by one.
                                 The rounding of a difference has variance step^2 / 6 (two uniform errors)

Batches differ if the ratio of the two squared standard errors exceeds what chance gives once in 200 times: the quantile
of chi^2_k / k with k = batches - 1, by the Wilson-Hilferty approximation.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from loka.metrics import compare_paired
from loka.metrics.bootstrap import Method
from loka.records import Interval

NEVER = 1e9  # a change beyond any margin; stands for infinity, which records cannot hold
SURE = 1.96
BY_CHANCE = 2.576  # standard deviations that chance exceeds once in 200 times
SHORT = (torch.bfloat16, torch.float16)  # dtypes whose steps are coarser than any margin
MOST_TASKS = 16  # columns of a loss that are compared separately; more are taken for steps of a sequence
TELLING = 8  # distinct losses a batch needs for its copies to be recognized
LEAST_BATCHES = 3  # batches needed to estimate their spread
UNSEEN = 3.0  # rule of three: if 3 changes are expected among the pairs, none is observed once in 20 times


@dataclass(frozen=True)
class Losses:
    """The loss of every example, or of every batch if only that is known.

    Args:
        values: float64, in order.
        per_example: whether a batch has several values.
        examples: the example each value belongs to; None if every value is its own example.
        batches: the batch each value belongs to; None if unknown.
        step: machine epsilon of the dtype the values were computed in if it is a 16-bit one, else 0.
        columns: values per example, if all have the same small number (tasks).

    Example:
        >>> low.change_from(high).high
    """

    values: Tensor
    per_example: bool
    examples: Tensor | None = None
    batches: Tensor | None = None
    step: float = 0.0
    columns: int = 1

    @property
    def mean(self) -> float:
        """The mean loss."""
        return float(self.values.mean())

    @property
    def unseen(self) -> float:
        """Relative change that may remain undetected if no value changes, for a metric that counts hits or errors.

        Such a metric moves in steps, at least the smallest difference between two values. If n pairs all agree, up to 3
        / n of all pairs may still differ.
        """
        known, size = torch.unique(self.values), abs(self.mean)
        if size == 0.0:
            return NEVER
        step = float(known.diff().min()) if len(known) > 1 else size  # a single value does not show the step
        pairs = self.values.numel() if self.examples is None else _count_distinct(self.examples)
        return UNSEEN / pairs * step / size

    @property
    def digest(self) -> str:
        """Hash of all values, which changes with the weights, the batches or the metric."""
        return hashlib.sha256(self.values.numpy().tobytes()).hexdigest()[:16]

    def change_from(
        self, base: "Losses", groups: Tensor | None = None, *, seed: int = 0, method: Method | Literal["auto"] = "student"
    ) -> Interval:  # fmt: skip
        """Return the relative change of the mean with its 95 % interval, of the same examples as `base`.

        `groups` are ids of independent units, one per value; by default the examples.
        """
        chosen = base.examples if groups is None else groups
        return compare_losses(
            self.values,
            base.values,
            chosen,
            batches=base.batches,
            step=max(self.step, base.step),
            seed=seed,
            method=method,
        )

    def changed_columns(self, base: "Losses", margin: float) -> dict[int, tuple[float, Interval]]:
        """Find columns (tasks) whose loss significantly increases by more than `margin`, even if the sum does not.

        Returns column -> (its share of the loss, its change). `base` holds the same examples in high precision.
        """
        low, high = (losses.values.view(-1, self.columns).T for losses in (self, base))
        found = {}
        for number in range(self.columns if self.columns > 1 else 0):
            change = compare_losses(low[number], high[number], method="student")
            if change.low > margin:
                found[number] = (float(high[number].sum() / high.sum()), change)
        return found


def gather(parts: Sequence[Tensor]) -> Losses:
    """Collect the losses of several batches on the CPU, in order; each is a scalar or [examples, ...]."""
    examples, batches, first, seen = [], [], 0, dict[bytes, tuple[int, int]]()
    for number, part in enumerate(parts):
        count = part.shape[0] if part.dim() else 1
        start, batch = seen.setdefault(_fingerprint(part, number), (first, number))
        first += count
        each = torch.arange(start, start + count)
        examples.append(each.repeat_interleave(part.numel() // max(count, 1)))
        batches.append(torch.full((part.numel(),), batch))
    ids = torch.cat(examples)
    return Losses(
        torch.cat([part.detach().double().reshape(-1).cpu() for part in parts]),
        per_example=any(part.numel() > 1 for part in parts),
        examples=ids if _count_distinct(ids) < len(ids) else None,
        batches=torch.cat(batches),
        columns=_count_columns(parts),
        step=max(torch.finfo(part.dtype).eps if part.dtype in SHORT else 0.0 for part in parts),
    )


def _count_distinct(values: Tensor) -> int:
    return len(torch.unique(values))


def _count_columns(parts: Sequence[Tensor]) -> int:
    """Return the number of tasks per example: small, and the same in every batch; else 1."""
    widths = {part.shape[1] if part.dim() == 2 else 1 for part in parts}
    return max(widths) if len(widths) == 1 and max(widths) <= MOST_TASKS else 1


def _fingerprint(part: Tensor, number: int) -> bytes:
    """Return a key that is equal for batches with bit-identical losses.

    Losses that two batches may share by chance (16-bit values, hits, counts) get a key of their own.
    """
    values = part.detach().cpu().contiguous().reshape(-1)
    telling = _count_distinct(values) >= min(TELLING, values.numel()) and not torch.equal(values, values.bfloat16().to(values.dtype))  # fmt: skip
    return values.numpy().tobytes() if telling and part.dtype not in SHORT else str(number).encode()


def has_drifted(again: Losses, base: Losses, margin: float) -> Interval | None:
    """Return the change between two runs with nothing converted if it may exceed half the margin, else None."""
    change = compare_losses(again.values, base.values, base.examples, batches=base.batches, method="student")
    return (
        change if max(-change.low, change.high) > margin / 2 + base.step else None
    )  # 16-bit values may flip by a step


def spell_change(change: Interval) -> str:
    """Spell out a relative change and its interval, in percent."""
    if change.value >= NEVER:
        return "to something that is not finite"
    return f"by {change:+.4%}"


def compare_losses(
    candidate: Tensor, baseline: Tensor, groups: Tensor | None = None, *, batches: Tensor | None = None, step: float = 0.0, seed: int = 0,
    method: Method | Literal["auto"] = "auto",
) -> Interval:  # fmt: skip
    """Return the relative change of the mean with its 95 % interval, paired.

    Args:
        candidate: one number per example, or per batch; lower is better.
        baseline: the numbers of the same examples.
        groups: ids of independent units; None if the numbers are independent.
        batches: ids of the batches they were computed in; None if unknown.
        step: `torch.finfo(dtype).eps` of the dtype they were computed in, if it is a 16-bit one.
        seed: seed of the bootstrap.
        method: method of the interval; `student` needs no resampling.

    Returns:
        (candidate - baseline) / |baseline| as a fraction; `NEVER` if any number is not finite. For a single pair the
        interval is symmetric, because only the size of the change is known.

    Example:
        >>> compare_losses(torch.tensor([1.01, 1.03]), torch.ones(2)).value
        0.02
    """
    difference = candidate.double() - baseline.double()
    if not bool(difference.isfinite().all()):
        return Interval(value=NEVER, low=NEVER, high=NEVER)
    size = float(baseline.double().mean().abs().clamp(min=1e-30))
    rounding = SURE * _rounding_deviation(baseline.double(), step) / (size * difference.numel())
    if not bool(difference.any()):  # losses are smooth: the computation did not change; for hits see `Losses.unseen`
        return Interval(value=0.0, low=-rounding, high=rounding)
    if difference.numel() < 2 or (groups is not None and _count_distinct(groups) < 2):
        alone = float(difference.mean()) / size
        return Interval(value=alone, low=-abs(alone) - rounding, high=abs(alone) + rounding)
    relative = float(baseline.double().sum()) > 0
    value, low, high = (
        x / (100 if relative else size) for x in _interval(candidate, baseline, groups, batches, relative, method, seed)
    )
    low, high = value - math.hypot(value - low, rounding), value + math.hypot(high - value, rounding)
    return Interval(value=value, low=min(low, value), high=max(high, value))


def _interval(
    candidate: Tensor, baseline: Tensor, groups: Tensor | None, batches: Tensor | None, relative: bool, method: Method | Literal["auto"], seed: int
) -> tuple[float, float, float]:  # fmt: skip
    """Return (estimate, low, high) over the independent units: examples or groups, or batches if these differ."""

    def compare(ids: Tensor | None, method: Method | Literal["auto"]) -> tuple[float, tuple[float, float, float]]:
        made = compare_paired(
            candidate,
            baseline,
            margin=0.1,
            metric="loss",
            lower_is_better=True,
            groups=ids,
            relative=relative,
            method=method,
            seed=seed,
        )
        return made.standard_error, (made.estimate, made.low, made.high)

    error, found = compare(groups, method)
    freedom = 0 if batches is None else _count_distinct(batches) - 1
    if batches is None or freedom + 1 < LEAST_BATCHES or batches.numel() == freedom + 1:
        return found
    between, by_batch = compare(batches, "student")
    return by_batch if between**2 > _chi_square_quantile(freedom) * error**2 else found


def _chi_square_quantile(freedom: int) -> float:
    """Return the value that chi^2 / freedom exceeds once in 200 times."""
    part = 2 / (9 * freedom)
    return (1 - part + BY_CHANCE * math.sqrt(part)) ** 3


def _rounding_deviation(values: Tensor, step: float) -> float:
    """Return the standard deviation of a sum of differences of numbers rounded with this relative step."""
    powers = torch.exp2(values.abs().clamp(min=1e-30).log2().floor())
    return step * math.sqrt(float(powers.square().sum()) / 6)
