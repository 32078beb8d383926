"""What an error does to the loss: the error of a product weighed by the gradient that arrives at it.

Errors of products do not predict what a model loses (over 312 measured pairs MERE has a rank correlation of -0.1 with the change of the log loss).
Weighed by the gradient they do. For the forward GEMM, with y = x W^T + b, d = y_low - y and g = dL/dy as backward delivers it:

    r  = examples * sum(g * d) / L          one number per example: the change of its loss, to first order, as a share of the mean loss

L is the loss that was differentiated. A mean over the batch divides g and L alike, and so do a sum, a GradScaler and gradient accumulation, so r does not depend
on the reduction; the bias cancels in d. Only what varies with the rounding is needed, never y_low and y apart:

    sum(g d) = (x^ - x) . (g W + g E) + x . (g E),       E = W^ - W

so recipes share g W, and every distinct quantisation of W costs one more product.

From r to a change of the loss. The mean of r over training examples is the first-order change *there*; on other examples (later ones, a validation set) the mean
moves by more than its standard error, in either direction. What is stable is its size against the rms of r. A second-order term is added: where the
loss is a likelihood and the model roughly calibrated, E[g^2] is its curvature (Fisher), so the expected change gains nats / 2 * mean(r^2).

    harm.value = max(TYPICAL * rms, |mean| - 1.96 se) + nats / 2 * rms^2
    harm.high  = max(UPPER * above, |mean| + max(1.96 / sqrt(examples), TYPICAL) * above) + nats / 2 * above^2,    above: the upper end of the interval of the rms
    harm.low   = max(|mean| - 1.96 se, 0)

TYPICAL and UPPER are measured shares (docs/concepts/score.md has the table), not theory: UPPER is beyond the largest of a thousand pairs. What the sampled examples themselves
leave open comes on top: of a few hundred the mean is known to a tenth of its rms, and heavy tails, whose rms is known badly, widen both terms.

Gradient GEMMs do not change the loss but the step. A step along dW + E instead of dW, its length chosen anew, makes cos^2 of the progress:

    lost = 1 - cos^2(dW, dW + E)            wgrad, over the sampled rows, or what columns with an offset lose where that is more;      dgrad the same with dx

Rounding noise that is independent from row to row is noise like that of sampling a batch: `lost` is the share of the batch it is worth. What dgrad hands upstream
is worse where an error scales the whole gradient of an example: every parameter upstream then weighs that example differently, and nothing averages it away.

    gain_i    = sum(e_i dx_i) / sum(dx_i^2)                 e = dx_low - dx
    reweighed = mean of gain_i^2 over rows, by sum(dx_i^2)  dgrad alone

    harm.value = PROGRESS * lost + REWEIGHED * reweighed

A last layer with one output in tensorwise scales has an ordinary `lost` and ten times the `reweighed` of any other site: its gradient is one number per example,
rounded to three bits. PROGRESS and REWEIGHED come from the loss after ten steps with that GEMM rounded (docs/concepts/score.md).

Where it fails: see docs/concepts/score.md. In short: rows flattened before a linear count as examples; errors of several sites that share a cause add linearly and not
in squares; a loss nobody recognises needs `probe.step(loss)`; losses that are no likelihood have another curvature.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loka.dispatch import RECIPES, USUAL
from loka.formats import Spec, left_in_sum
from loka.kernels.scaled_mm import GemmWay
from loka.probe.paired import SURE
from loka.probe.shown import HEADROOM, RoundedOperands, Shown
from loka.records import GEMMS, Gemm, Interval

__all__ = [
    "GIVEN_SCALES", "HEADROOM", "SCORED", "Shown", "harm", "harm_from", "operands_of", "score_look", "score_operands",
]  # fmt: skip

TYPICAL = 0.03  # |change of the loss| / rms of r: what is usual
UPPER = 0.15  # ... and what no measured pair exceeds
PROGRESS = 0.01  # change of the loss / `lost`: -0.002 +- 0.005 over ten steps; the upper end, rounded up
REWEIGHED = 0.4  # |change of the loss| / `reweighed` over ten steps, rms
REWEIGHED_UPPER = 0.6  # ... and the largest
OFFSET = 8.0  # |mean| over the spread of a column from which its rounding is a matter of its own (`loka.probe.offset`)
WGRAD_OUTPUTS = 128  # rows of dW that are looked at

_STATIC = GemmWay.parse("e4m3:tensor:static@e4m3:tensor", fast_accum=True)
_DELAYED = GemmWay.parse("e4m3:tensor:delayed@e4m3:tensor", fast_accum=True)
_DELAYED_BOTH = GemmWay.parse("e4m3:tensor:delayed@e4m3:tensor:delayed")
GIVEN_SCALES: dict[str, dict[Gemm, GemmWay]] = {
    "static": {"fprop": _STATIC},
    "delayed": {"fprop": _DELAYED, "dgrad": _DELAYED, "wgrad": _DELAYED_BOTH},
}
"""Chains: one E4M3 scale per tensor that does not come from the tensor itself. Static scales are calibrated and have no gradients."""
SCORED = (*USUAL, *GIVEN_SCALES)


def operands_of(recipe: str, gemm: Gemm) -> GemmWay | None:
    """What a recipe, or "static" or "delayed", quantises the operands of a GEMM to; None where it leaves the GEMM in high precision."""
    if recipe in GIVEN_SCALES:
        return GIVEN_SCALES[recipe].get(gemm)
    if recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe!r}; recipes are {', '.join((*RECIPES, *GIVEN_SCALES))}")
    return RECIPES[recipe].operands(gemm)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Errors are multiplied, not their difference taken, so bf16 is enough: 0.4 % of the score, at the speed of the model's own GEMMs."""
    if a.is_cuda:
        return (a.bfloat16() @ b.bfloat16()).float()
    return a @ b


@torch.no_grad()
def score_look(shown: Shown, recipes: Sequence[str] = SCORED) -> dict[tuple[Gemm, str], Tensor]:
    """What every recipe does in every GEMM of one look, as sums that add up over looks.

    Args:
        shown: the rows.
        recipes: names; those that leave a GEMM in high precision have no entry for it.

    Returns:
        (gemm, recipe) -> float64 [4]. fprop: count, and sums of r, r^2 and r^4 over examples; gradients: 1, `lost` and `reweighed` of the look, 0.

    Example:
        >>> sums = score_look(Shown(x, dy, weight, loss, loss, len(x)))["fprop", "rowwise"]
        >>> rms = (sums[2] / sums[0]).sqrt()
    """
    if shown.dy is None:
        return {}
    operands, found = RoundedOperands(shown), {}
    known: dict[tuple[Gemm, GemmWay], Tensor] = {}
    pulled = _product(operands.plain("dy"), operands.plain("w"))  # dx, and g W
    for gemm in GEMMS:
        for recipe in recipes:
            chosen = operands_of(recipe, gemm)
            if chosen is None:
                continue
            key = (gemm, GemmWay(_given(chosen.a), _given(chosen.b)))
            if key not in known:
                known[key] = _MEASURES[gemm](operands, key[1], pulled, shown)
            found[gemm, recipe] = known[key]
    return found


@torch.no_grad()
def score_operands(operands: RoundedOperands, shown: Shown) -> dict[Gemm, Tensor]:
    """What operands that were rounded already do in the three GEMMs of one look, as `score_look` has it."""
    pulled = _product(operands.plain("dy"), operands.plain("w"))
    return {gemm: _MEASURES[gemm](operands, _STATIC, pulled, shown) for gemm in GEMMS}


def _given(spec: Spec) -> Spec:
    """Static and delayed scales are both given: within a look they are the same."""
    return spec if spec.mode == "dynamic" else replace(spec, mode="static")


def _score_fprop(operands: RoundedOperands, chosen: GemmWay, pulled: Tensor, shown: Shown) -> Tensor:
    x, xq = operands.plain("x"), operands.low("x", chosen.a)
    key = f"bent {chosen.b}"
    if key not in operands.kept:
        operands.kept[key] = _product(operands.plain("dy"), operands.low("w", chosen.b) - operands.plain("w"))
    bent = operands.kept[key]
    rows = ((xq - x) * (pulled + bent) + x * bent).sum(1)
    return _sums(_per_example(rows * (shown.examples / shown.loss), shown)) * shown.weighs


def _per_example(rows: Tensor, shown: Shown) -> Tensor:
    """r of every example, signed, from a few of its rows: T / t times their sum, its size corrected for what t rows say about T.

    E[(sum over T)^2] = T / t * sum r_i^2 + T (T - 1) / (t (t - 1)) * sum over i != j of r_i r_j.
    """
    t, total = shown.together, shown.per_example
    if total <= 1 or t < 1:
        return rows
    groups = rows[: rows.numel() // t * t].view(-1, t)
    mean = groups.sum(1) * (total / t)
    if t == total:
        return mean
    squares = groups.square().sum(1)
    cross = groups.sum(1).square() - squares
    second = total / t * squares + (
        total * (total - 1) / (t * (t - 1)) * cross if t > 1 else total * (total - 1) * squares
    )
    return mean.sign() * second.clamp(min=0).sqrt()


def _score_dgrad(operands: RoundedOperands, chosen: GemmWay, pulled: Tensor, shown: Shown) -> Tensor:
    low = _product(operands.low("dy", chosen.a), operands.low("w", chosen.b, transposed=True))
    return _gradient_sums(_lost(pulled, low), _reweighed(pulled, low))


def _score_wgrad(operands: RoundedOperands, chosen: GemmWay, pulled: Tensor, shown: Shown) -> Tensor:
    every = max(1, -(-shown.weight.shape[0] // WGRAD_OUTPUTS))  # some of the rows of dW say what all of them would
    if "exact" not in operands.kept:
        operands.kept["exact"] = _product(operands.plain("dy")[:, ::every].T, operands.plain("x"))
    dy, x = operands.low("dy", chosen.a, transposed=True), operands.low("x", chosen.b, transposed=True)
    low = _product(dy[:, ::every].T, x)
    exact, plain = operands.kept["exact"], operands.plain("dy")[:, ::every]
    columns = _lost_by_column(exact, low, plain, operands.plain("x"), x, operands.plain("w"), shown.left)
    lost = torch.maximum(_lost(exact, low), columns)
    return _gradient_sums(lost, torch.zeros_like(lost))


def _lost(exact: Tensor, low: Tensor) -> Tensor:
    """1 - cos^2: 0 for the same direction; 1 where nothing of it is left. A gradient of zeros that stays zero loses nothing."""
    largest = [t.abs().amax().clamp(min=1e-38) for t in (exact, low)]  # squares of squares leave float32's range early
    exact, low = exact / largest[0], low / largest[1]
    size, sizes = exact.square().sum(), exact.square().sum() * low.square().sum()
    return torch.where(sizes > 0, 1 - (exact * low).sum().square() / sizes, (size > 0).float()).clamp(0, 1)


def _lost_by_column(
    exact: Tensor, low: Tensor, dy: Tensor, x: Tensor, x_low: Tensor, weight: Tensor, left: Tensor | None
) -> Tensor:
    """What columns of x with a large mean and a small spread lose, as a share of all columns, each counting by how much it varies.

    Beside a raw timestamp every other gradient is small, so the direction of the whole says nothing about a raw year; an optimizer that divides by an element's own
    history makes no such difference. A column teaches by what varies in it, and loses it in two ways, of which the larger counts:

        its values     1 - corr^2 of the column and its rounded self. A year between 1970 and 2026 is one number in FP8: everything is lost, in every step
        its gradient   E^2 / (E^2 + sum dy^2 (x - mean)^2 + left * sum dy^2 mean^2). The rounding of dy is multiplied by the mean. So is dy itself, which is noise of a batch in exact
                       arithmetic too, unless it cancels (`left` is 0 behind a batch norm): then rounding is all that is left of the mean

    A column that hardly varies beside the others (a SiLU at its minimum, -0.278 for every example) has next to nothing to teach. Columns count by their spread as a share of the median's, or by
    what their spread comes to in the output, through the weight, whichever is more; at most once.
    """
    mean, spread = x.mean(0), x.std(0, correction=min(len(x) - 1, 1))  # of one row: 0, without a warning
    varies = x - mean
    values = 1 - (_to_unit(varies) * _to_unit(x_low - x_low.mean(0))).sum(0).square()
    error, drawn = (low - exact).square().sum(0), dy.square().sum(1) @ varies.square()
    if left is not None:
        drawn = drawn + left.clamp(max=1.0) * dy.square().sum() * mean.square()
    gradient = (error / (error + drawn).clamp(min=1e-38)).nan_to_num(1.0)  # of squares beyond float32
    reaches = spread * torch.linalg.vector_norm(weight, dim=0)
    counts = torch.maximum(*(size / size.median().clamp(min=1e-38) for size in (spread, reaches))).clamp(max=1.0)
    offset = (spread > 0) & (mean.abs() > OFFSET * spread)
    return torch.where(offset, counts * torch.maximum(values, gradient), 0.0).mean()


def _to_unit(columns: Tensor) -> Tensor:
    sizes: Tensor = torch.linalg.vector_norm(columns, dim=0)
    return columns / sizes.clamp(min=1e-38)


def _reweighed(exact: Tensor, low: Tensor) -> Tensor:
    """Mean square of the factor by which a row's gradient is scaled, by the row's own power."""
    power = exact.square().sum(1)
    along = ((low - exact) * exact).sum(1).square()
    return torch.where(power > 0, along / power.clamp(min=1e-38), 0.0).sum() / power.sum().clamp(min=1e-38)


def _gradient_sums(lost: Tensor, reweighed: Tensor) -> Tensor:
    """1, both, 0: the shape of `_sums`. A look that is not finite counts nothing."""
    one, zero = torch.ones_like(lost), torch.zeros_like(lost)
    found = torch.stack([one, lost, reweighed, zero]).double()
    return torch.where(found.isfinite().all(), found, torch.zeros_like(found))


def _sums(values: Tensor) -> Tensor:
    """count, sum, sum of squares, sum of fourth powers, of what is finite."""
    finite = values.isfinite()
    values = torch.where(finite, values, 0.0).double()
    square = values.square()
    return torch.stack([finite.sum().double(), values.sum(), square.sum(), square.square().sum()])


_MEASURES = {"fprop": _score_fprop, "dgrad": _score_dgrad, "wgrad": _score_wgrad}


def harm_from(gemm: Gemm, sums: Tensor, *, nats: float = 1.0) -> tuple[Interval, float] | None:
    """(harm, mean of r) from sums over looks, float64 [looks, 4] of `score_look`: relative change of the loss; None where nothing was counted. `nats`: mean loss of an example, 1 where it is no likelihood."""
    sums = sums[sums[:, 0] > 0]
    if not len(sums):
        return None
    if gemm != "fprop":
        return _harm_of_gradients(sums)
    count, total, square, fourth = sums.sum(0).tolist()
    mean, power = total / count, square / count
    upper = power + SURE * _standard_error(sums, power, fourth / count, count)
    rms, above = math.sqrt(power), math.sqrt(upper)
    low = max(abs(mean) - SURE * rms / math.sqrt(count), 0.0)
    value = max(TYPICAL * rms, low) + nats / 2 * power
    # by how much the mean may be off: here, and on other examples
    unknown = max(SURE / math.sqrt(count), TYPICAL) * above
    high = max(UPPER * above, abs(mean) + unknown) + nats / 2 * upper
    return Interval(value=value, low=min(low, value), high=max(high, value)), mean


def _harm_of_gradients(sums: Tensor) -> tuple[Interval, float]:
    """From `lost` and `reweighed` of every look; one look alone may be off by its own size."""
    means, errors = sums[:, 1:3].mean(0), sums[:, 1:3].mean(0)
    if len(sums) > 1:
        errors = SURE * sums[:, 1:3].std(0) / math.sqrt(len(sums))
    (lost, reweighed), (below, _), (above, high) = (
        (v.tolist()) for v in (means, (means - errors).clamp(min=0), means + errors)
    )
    value = PROGRESS * lost + REWEIGHED * reweighed
    upper = PROGRESS * min(above, 1.0) + REWEIGHED_UPPER * high
    return Interval(value=value, low=min(PROGRESS * below, value), high=max(upper, value)), lost


def _standard_error(sums: Tensor, power: float, fourth: float, count: float) -> float:
    """Of the mean square: over examples, or over looks where those differ by more than their examples explain."""
    inside = math.sqrt(max(fourth - power**2, 0.0) / count)
    if len(sums) < 3:
        return inside
    looks = sums[:, 2] / sums[:, 0]
    return max(inside, float(looks.std()) / math.sqrt(len(looks)))


def harm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    recipe: str | GemmWay,
    *,
    loss: float | Tensor,
    gemm: Gemm = "fprop",
    nats: float | None = None,
    largest: Mapping[str, Tensor] | None = None,
) -> Interval:
    """What a recipe costs one linear, from its tensors: for use offline, on one batch.

    Args:
        x: the input [..., K]; the first dimension counts examples.
        weight: [N, K].
        bias: [N] or None; it cancels, and is taken so that a call looks like the layer's own.
        dy: gradient of the loss with respect to the output [..., N].
        recipe: a name (`SCORED`), or the Specs of the two operands.
        loss: the value that was differentiated to give `dy`: mean, sum or scaled, as long as it is the same one.
        gemm: fprop, dgrad or wgrad.
        nats: mean loss of an example; by default `loss`, which is right for a mean.
        largest: values that given scales (static, delayed) come from, by "x" and "dy"; by default this batch's own.

    Returns:
        Relative change of the loss: the value is its usual size, `high` what verdicts go by.

    Raises:
        ValueError: shapes that do not belong to one linear, or a recipe that leaves this GEMM in high precision.

    Example:
        >>> harm(x, layer.weight, layer.bias, dy, "rowwise", loss=loss).high
    """
    if x.shape[:-1] != dy.shape[:-1] or weight.shape != (dy.shape[-1], x.shape[-1]):
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)}, dy {tuple(dy.shape)}: expected [..., K], [N, K], [..., N]"
        )
    chosen = operands_of(recipe, gemm) if isinstance(recipe, str) else recipe
    if chosen is None:
        raise ValueError(f"{recipe} leaves {gemm} in high precision: there is nothing to score")
    value = torch.as_tensor(loss, dtype=torch.float32, device=x.device).detach()
    per = math.prod(x.shape[1:-1]) if x.dim() > 2 else 1
    shown = Shown(
        x.detach().reshape(-1, x.shape[-1]),
        dy.detach().reshape(-1, dy.shape[-1]),
        weight.detach(),
        value,
        value,
        x.shape[0],
        together=per,
        per_example=per,
        before=largest,
        left=left_in_sum(dy.detach()),
    )
    operands = RoundedOperands(shown)
    with torch.no_grad():
        pulled = _product(operands.plain("dy"), operands.plain("w"))
        sums = _MEASURES[gemm](operands, chosen, pulled, shown)
    found = harm_from(gemm, sums[None].cpu(), nats=float(value) if nats is None else nats)
    if found is None:
        raise ValueError(f"no row of this batch gives a finite score; the loss is {float(value)}")
    return found[0]
