"""Losses of the same examples in two arithmetics: the relative change of their mean, with an interval that claims no more than was measured.

    change = sum(low - high) / sum(high)            paired, so free of the noise of drawing examples

What an interval over single numbers would miss:

    numbers of one example       tokens and tasks of one example err together: a loss of shape [B, ...] is compared by its B examples
    examples of one batch        share scales, so one extreme row can hurt all of its batch: where batches differ by more than their examples explain, batches are the unit
    the same batch twice         is one batch: copies are recognised by their losses
    the numbers' own rounding    a mean in bfloat16 moves in steps of 0.4 to 0.8 %: two that are equal differ by anything up to a step. Per number the rounding of a difference has
                                 the variance step^2 / 6 (two uniform errors), added in squares

Batches count as differing where the ratio of the two squared standard errors is beyond what chance gives once in 200 times: the quantile of chi^2_k / k, k = batches - 1,
after Wilson and Hilferty.
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

NEVER = 1e9  # a change that is within no margin; records hold no infinity
SURE = 1.96
BY_CHANCE = 2.576  # standard deviations: once in 200 times
SHORT = (torch.bfloat16, torch.float16)  # types whose steps are coarser than any margin
MOST_TASKS = 16  # columns of a loss that are compared by themselves; more are steps of a sequence
TELLING = 8  # different numbers in a batch, by which another is recognised as its copy
LEAST_BATCHES = 3  # of which a spread says something
UNSEEN = 3.0  # changes: where as many are expected among the pairs, once in 20 times none is there


@dataclass(frozen=True)
class Losses:
    """The loss of every example, or of every batch where only that is known.

    Args:
        values: float64, in order.
        per_example: whether there are several to a batch.
        examples: which example a value belongs to; None: every value is one of its own.
        batches: which batch it belongs to; None: not known.
        step: relative distance of neighbours in the type they were computed in, where that is a short one; else 0.
        columns: values of each example, where all have the same few: tasks.

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
        """The relative change that may be there where no value changes, of a metric that counts hits or errors: it moves in steps, at least of the smallest difference between two values, and n pairs that agree leave room for one that does not in n / 3."""
        known, size = torch.unique(self.values), abs(self.mean)
        if size == 0.0:
            return NEVER
        step = float(known.diff().min()) if len(known) > 1 else size  # of one value nothing shows how it changes
        pairs = self.values.numel() if self.examples is None else _distinct(self.examples)
        return UNSEEN / pairs * step / size

    @property
    def digest(self) -> str:
        """Of all of them: other weights, batches or another metric have other losses."""
        return hashlib.sha256(self.values.numpy().tobytes()).hexdigest()[:16]

    def change_from(
        self, base: "Losses", groups: Tensor | None = None, *, seed: int = 0, method: Method | Literal["auto"] = "student"
    ) -> Interval:  # fmt: skip
        """Relative change of the mean with its 95 % interval.

        Args:
            base: the same examples in high precision.
            groups: ids of what is independent, one per value, instead of examples.
            seed: of a bootstrap.
            method: of the interval.
        """
        chosen = base.examples if groups is None else groups
        return compare_losses(self.values, base.values, chosen, batches=base.batches, step=max(self.step, base.step), seed=seed, method=method)  # fmt: skip

    def changed_columns(self, base: "Losses", margin: float) -> dict[int, tuple[float, Interval]]:
        """Columns of the loss that surely change by more than a margin, whatever their sum does: by number, their share of the loss and their change.

        Args:
            base: the same examples in high precision.
            margin: relative change.
        """
        low, high = (losses.values.view(-1, self.columns).T for losses in (self, base))
        found = {}
        for number in range(self.columns if self.columns > 1 else 0):
            change = compare_losses(low[number], high[number], method="student")
            if change.low > margin:
                found[number] = (float(high[number].sum() / high.sum()), change)
        return found


def gather(parts: Sequence[Tensor]) -> Losses:
    """Collect the losses of several batches, in order.

    Args:
        parts: one floating tensor for every batch: a number, or one and more for each example, which are then the first dimension.

    Returns:
        All of them on the CPU.
    """
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
        examples=ids if _distinct(ids) < len(ids) else None,
        batches=torch.cat(batches),
        columns=_columns(parts),
        step=max(torch.finfo(part.dtype).eps if part.dtype in SHORT else 0.0 for part in parts),
    )


def _distinct(values: Tensor) -> int:
    """How many different ones."""
    return len(torch.unique(values))


def _columns(parts: Sequence[Tensor]) -> int:
    """Values of an example that are tasks: few, and as many in every batch."""
    widths = {part.shape[1] if part.dim() == 2 else 1 for part in parts}
    return max(widths) if len(widths) == 1 and max(widths) <= MOST_TASKS else 1


def _fingerprint(part: Tensor, number: int) -> bytes:
    """The same for batches whose losses are the same bit for bit, where these are numbers that two batches do not share by chance: not of a short type, hits or a count."""
    values = part.detach().cpu().contiguous().reshape(-1)
    telling = _distinct(values) >= min(TELLING, values.numel()) and not torch.equal(values, values.bfloat16().to(values.dtype))  # fmt: skip
    return values.numpy().tobytes() if telling and part.dtype not in SHORT else str(number).encode()


def has_drifted(again: Losses, base: Losses, margin: float) -> Interval | None:
    """The change of high precision against itself, where it may be half of a margin: then no other change can be held against that margin.

    Args:
        again: the same examples once more, nothing converted.
        base: the first time.
        margin: that changes are held against.

    Returns:
        The change; None where the second run says what the first did, or nearly.
    """
    change = compare_losses(again.values, base.values, base.examples, batches=base.batches, method="student")
    return change if max(-change.low, change.high) > margin / 2 + base.step else None  # a step of a short type may flip


def spell_change(change: Interval) -> str:
    """A change with its interval, in percent.

    Args:
        change: relative.
    """
    if change.value >= NEVER:
        return "to something that is not finite"
    return f"by {change:+.4%}"


def compare_losses(
    candidate: Tensor, baseline: Tensor, groups: Tensor | None = None, *, batches: Tensor | None = None, step: float = 0.0, seed: int = 0,
    method: Method | Literal["auto"] = "auto",
) -> Interval:  # fmt: skip
    """Relative change of the mean with its 95 % interval, paired.

    Args:
        candidate: one number per example, or per batch; lower is better.
        baseline: of the same ones.
        groups: ids of what is independent; None for the numbers themselves.
        batches: ids of the batches they were computed in; None: not known.
        step: relative distance of neighbours in the type they were computed in, `torch.finfo(dtype).eps`.
        seed: of the bootstrap.
        method: of the interval; `student` needs no resampling.

    Returns:
        (candidate - baseline) / |baseline|, as a share. A number that is not finite, in either, is a change of `NEVER`; a single pair is known up to its sign.

    Example:
        >>> compare_losses(torch.tensor([1.01, 1.03]), torch.ones(2)).value
        0.02
    """
    difference = candidate.double() - baseline.double()
    if not bool(difference.isfinite().all()):
        return Interval(value=NEVER, low=NEVER, high=NEVER)
    size = float(baseline.double().mean().abs().clamp(min=1e-30))
    rounding = SURE * _rounding(baseline.double(), step) / (size * difference.numel())
    if difference.numel() < 2 or (groups is not None and _distinct(groups) < 2):
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
    """(estimate, low, high) over the units that are independent: examples or groups, or batches where these differ."""

    def compare(ids: Tensor | None, method: Method | Literal["auto"]) -> tuple[float, tuple[float, float, float]]:
        made = compare_paired(candidate, baseline, margin=0.1, metric="loss", lower_is_better=True, groups=ids, relative=relative, method=method, seed=seed)  # fmt: skip
        return made.standard_error, (made.estimate, made.low, made.high)

    error, found = compare(groups, method)
    freedom = 0 if batches is None else _distinct(batches) - 1
    if batches is None or freedom + 1 < LEAST_BATCHES or batches.numel() == freedom + 1:
        return found
    between, by_batch = compare(batches, "student")
    return by_batch if between**2 > _chance(freedom) * error**2 else found


def _chance(freedom: int) -> float:
    """What chi^2 / freedom exceeds once in 200 times."""
    part = 2 / (9 * freedom)
    return (1 - part + BY_CHANCE * math.sqrt(part)) ** 3


def _rounding(values: Tensor, step: float) -> float:
    """Standard deviation of a sum of differences of numbers that were rounded to a type with this relative step."""
    powers = torch.exp2(values.abs().clamp(min=1e-30).log2().floor())
    return step * math.sqrt(float(powers.square().sum()) / 6)
