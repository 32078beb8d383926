"""The score: predict how a recipe changes the loss, from the error of a product weighted by the gradient at its output.

The error of a product alone does not predict the change of the loss: over 312 measured pairs, MERE has a rank
correlation of -0.1 with the change of the log loss. Weighted by the gradient, it does. For the forward GEMM, with y = x
W^T + b, d = y_low - y and g = dL/dy from the backward pass:

    r  = examples * sum(g * d) / L          per example: first-order change of its loss, relative to the mean loss

L is the loss that was differentiated. Mean or sum reduction, a GradScaler and gradient accumulation scale g and L
alike, so r does not depend on them. The bias cancels in d. With x^ and W^ the quantized operands and E = W^ - W,

    sum(g d) = (x^ - x) . (g W + g E) + x . (g E)

so all recipes share g W, and each distinct quantization of W costs one more product.

From r to a change of the loss: the mean of r is the first-order change on the training examples it was computed on. On
other examples (later ones, a validation set) the mean differs by more than its standard error, in either direction;
what carries over is its size relative to the rms of r. A second-order term is added: if the loss is a likelihood and
the model roughly calibrated, E[g^2] is its curvature (Fisher), so the expected change grows by nats / 2 * mean(r^2).
With `above` the upper confidence bound of the rms:

    harm.value = max(TYPICAL * rms, |mean| - 1.96 se) + nats / 2 * rms^2
    harm.high  = max(UPPER * above, |mean| + max(1.96 / sqrt(examples), TYPICAL) * above) + nats / 2 * above^2
    harm.low   = max(|mean| - 1.96 se, 0)

TYPICAL and UPPER are measured ratios, not theory (the table is in docs/concepts/score.md); UPPER exceeds the largest of
a thousand pairs. The uncertainty of the sample comes on top: from a few hundred examples the mean is known to a tenth
of the rms, and heavy tails, whose rms is poorly known, widen both terms.

Gradient GEMMs change the optimizer step, not the loss. A step along dW + E instead of dW, with its best length, makes
cos^2 of the progress:

    lost = 1 - cos^2(dW, dW + E)      wgrad, over the sampled rows, or the loss of columns with an offset if larger
    lost = 1 - cos^2(dx, dx + E)            dgrad

Rounding noise that is independent across rows acts like the noise of sampling a batch: `lost` is the share of the batch
it is worth. In dgrad there is a worse error: one that scales the whole gradient of an example. Every parameter upstream
then weights that example differently, and nothing averages it out.

    gain_i    = sum(e_i dx_i) / sum(dx_i^2)                 e = dx_low - dx
    reweighed = mean of gain_i^2 over rows, weighted by sum(dx_i^2); dgrad only

    harm.value = PROGRESS * lost + REWEIGHED * reweighed

A last layer with one output and tensorwise scales has an ordinary `lost` but ten times the `reweighed` of any other
site: its gradient is one number per example, rounded to three bits. PROGRESS and REWEIGHED were fitted to the loss
after ten steps with that GEMM rounded (docs/concepts/score.md).

Limitations (docs/concepts/score.md has the full list): rows flattened before a linear count as examples; errors of
sites that share a cause add linearly, not in squares; an unrecognized loss needs `probe.step(loss)`; the curvature term
assumes a likelihood.
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

TYPICAL = 0.03  # |change of the loss| / rms of r: the typical value
UPPER = 0.15  # ... and a bound that no measured pair exceeds
PROGRESS = 0.01  # change of the loss / `lost`: -0.002 +- 0.005 over ten steps; the upper end, rounded up
REWEIGHED = 0.4  # |change of the loss| / `reweighed` over ten steps, rms
REWEIGHED_UPPER = 0.6  # ... and the largest
OFFSET = 8.0  # |mean| / spread above which a column of x is scored separately (`loka.probe.offset`)
WGRAD_OUTPUTS = 128  # at most this many rows of dW are scored

_STATIC = GemmWay.parse("e4m3:tensor:static@e4m3:tensor", fast_accum=True)
_DELAYED = GemmWay.parse("e4m3:tensor:delayed@e4m3:tensor", fast_accum=True)
_DELAYED_BOTH = GemmWay.parse("e4m3:tensor:delayed@e4m3:tensor:delayed")
GIVEN_SCALES: dict[str, dict[Gemm, GemmWay]] = {
    "static": {"fprop": _STATIC},
    "delayed": {"fprop": _DELAYED, "dgrad": _DELAYED, "wgrad": _DELAYED_BOTH},
}
"""Ways used in chains: one E4M3 scale per tensor, known before the tensor is. Static scales are calibrated, and forward only."""
SCORED = (*USUAL, *GIVEN_SCALES)


def operands_of(recipe: str, gemm: Gemm) -> GemmWay | None:
    """Return how a recipe, "static" or "delayed" quantizes the operands of a GEMM; None for high precision."""
    if recipe in GIVEN_SCALES:
        return GIVEN_SCALES[recipe].get(gemm)
    if recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe!r}; recipes are {', '.join((*RECIPES, *GIVEN_SCALES))}")
    return RECIPES[recipe].operands(gemm)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply, in bf16 on a GPU: one factor is an error, so nothing cancels and bf16 costs only 0.4 % of the score."""
    if a.is_cuda:
        return (a.bfloat16() @ b.bfloat16()).float()
    return a @ b


@torch.no_grad()
def score_look(shown: Shown, recipes: Sequence[str] = SCORED) -> dict[tuple[Gemm, str], Tensor]:
    """Score every recipe on every GEMM of one look, as sums that can be added over looks.

    Returns (gemm, recipe) -> float64 [4]. fprop: count and sums of r, r^2 and r^4 over examples; gradients: 1, `lost`,
    `reweighed`, 0. A recipe that leaves a GEMM in high precision has no entry for it.
    """
    if shown.dy is None:
        return {}
    operands, found = RoundedOperands(shown), {}
    known: dict[tuple[Gemm, GemmWay], Tensor] = {}
    dx = _matmul(operands.plain("dy"), operands.plain("w"))  # exact dx, which is also g W
    for gemm in GEMMS:
        for recipe in recipes:
            chosen = operands_of(recipe, gemm)
            if chosen is None:
                continue
            key = (gemm, GemmWay(_as_static(chosen.a), _as_static(chosen.b)))
            if key not in known:
                known[key] = _SCORERS[gemm](operands, key[1], dx, shown)
            found[gemm, recipe] = known[key]
    return found


@torch.no_grad()
def score_operands(operands: RoundedOperands, shown: Shown) -> dict[Gemm, Tensor]:
    """Score operands that are already rounded, on the three GEMMs of one look. Same sums as `score_look`."""
    dx = _matmul(operands.plain("dy"), operands.plain("w"))
    return {gemm: _SCORERS[gemm](operands, _STATIC, dx, shown) for gemm in GEMMS}


def _as_static(spec: Spec) -> Spec:
    """Map delayed to static scales: both are known beforehand, so within one look they give the same result."""
    return spec if spec.mode == "dynamic" else replace(spec, mode="static")


def _score_fprop(operands: RoundedOperands, chosen: GemmWay, dx: Tensor, shown: Shown) -> Tensor:
    x, xq = operands.plain("x"), operands.low("x", chosen.a)
    key = f"g_e {chosen.b}"
    if key not in operands.kept:
        operands.kept[key] = _matmul(operands.plain("dy"), operands.low("w", chosen.b) - operands.plain("w"))
    g_e = operands.kept[key]
    rows = ((xq - x) * (dx + g_e) + x * g_e).sum(1)
    return _sum_powers(_estimate_per_example(rows * (shown.examples / shown.loss), shown)) * shown.weighs


def _estimate_per_example(rows: Tensor, shown: Shown) -> Tensor:
    """Estimate the signed r of every example from t of its T rows: the sign of their sum, and an unbiased square.

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


def _score_dgrad(operands: RoundedOperands, chosen: GemmWay, dx: Tensor, shown: Shown) -> Tensor:
    low = _matmul(operands.low("dy", chosen.a), operands.low("w", chosen.b, transposed=True))
    return _pack_gradient_sums(_measure_lost(dx, low), _measure_reweighed(dx, low))


def _score_wgrad(operands: RoundedOperands, chosen: GemmWay, dx: Tensor, shown: Shown) -> Tensor:
    every = max(1, -(-shown.weight.shape[0] // WGRAD_OUTPUTS))  # a subset of the rows of dW is enough
    if "exact" not in operands.kept:
        operands.kept["exact"] = _matmul(operands.plain("dy")[:, ::every].T, operands.plain("x"))
    dy, x = operands.low("dy", chosen.a, transposed=True), operands.low("x", chosen.b, transposed=True)
    low = _matmul(dy[:, ::every].T, x)
    exact, plain = operands.kept["exact"], operands.plain("dy")[:, ::every]
    columns = _measure_lost_columns(exact, low, plain, operands.plain("x"), x, operands.plain("w"), shown.left)
    lost = torch.maximum(_measure_lost(exact, low), columns)
    return _pack_gradient_sums(lost, torch.zeros_like(lost))


def _measure_lost(exact: Tensor, low: Tensor) -> Tensor:
    """Return 1 - cos^2 of the angle between two gradients; 0 if `exact` is zero, 1 if only `low` is."""
    largest = [t.abs().amax().clamp(min=1e-38) for t in (exact, low)]  # fourth powers would overflow float32
    exact, low = exact / largest[0], low / largest[1]
    size, sizes = exact.square().sum(), exact.square().sum() * low.square().sum()
    return torch.where(sizes > 0, 1 - (exact * low).sum().square() / sizes, (size > 0).float()).clamp(0, 1)


def _measure_lost_columns(
    exact: Tensor, low: Tensor, dy: Tensor, x: Tensor, x_low: Tensor, weight: Tensor, left: Tensor | None
) -> Tensor:
    """Return `lost` of the columns of x with a large mean and a small spread, as a weighted mean over all columns.

    A raw timestamp dominates dW, so the direction of the whole says nothing about a raw year in another column; but
    optimizers that normalize each element by its own history treat both alike. The model learns from the variation of a
    column, which can be lost in two ways. The larger counts:

        values      1 - corr^2 of the column and the rounded column. A year between 1970 and 2026 is one number in FP8:
                    everything is lost, in every step
        gradient    E^2 / (E^2 + sum dy^2 (x - mean)^2 + left * sum dy^2 mean^2). The rounding error of dy is multiplied
                    by the mean. So is dy itself, which is batch noise in exact arithmetic too, unless it cancels
                    (`left` is 0 behind a batch norm): then only the rounding error remains

    A column that hardly varies compared with the others (a SiLU at its minimum, -0.278 for every example) carries
    almost no information. So a column is weighted by its spread relative to the median, or by the spread it causes in
    the output (through the weight) relative to the median, whichever is larger, but at most 1.
    """
    mean, spread = x.mean(0), x.std(0, correction=min(len(x) - 1, 1))  # one row: spread 0, without a warning
    varies = x - mean
    values = 1 - (_to_unit(varies) * _to_unit(x_low - x_low.mean(0))).sum(0).square()
    error, signal = (low - exact).square().sum(0), dy.square().sum(1) @ varies.square()
    if left is not None:
        signal = signal + left.clamp(max=1.0) * dy.square().sum() * mean.square()
    gradient = (error / (error + signal).clamp(min=1e-38)).nan_to_num(1.0)  # NaN if the squares overflow
    reaches = spread * torch.linalg.vector_norm(weight, dim=0)
    counts = torch.maximum(*(size / size.median().clamp(min=1e-38) for size in (spread, reaches))).clamp(max=1.0)
    offset = (spread > 0) & (mean.abs() > OFFSET * spread)
    return torch.where(offset, counts * torch.maximum(values, gradient), 0.0).mean()


def _to_unit(columns: Tensor) -> Tensor:
    sizes: Tensor = torch.linalg.vector_norm(columns, dim=0)
    return columns / sizes.clamp(min=1e-38)


def _measure_reweighed(exact: Tensor, low: Tensor) -> Tensor:
    """Return the mean of gain_i^2 over rows, weighted by each row's power."""
    power = exact.square().sum(1)
    along = ((low - exact) * exact).sum(1).square()
    return torch.where(power > 0, along / power.clamp(min=1e-38), 0.0).sum() / power.sum().clamp(min=1e-38)


def _pack_gradient_sums(lost: Tensor, reweighed: Tensor) -> Tensor:
    """Return [1, lost, reweighed, 0], or zeros if the look is not finite."""
    one, zero = torch.ones_like(lost), torch.zeros_like(lost)
    found = torch.stack([one, lost, reweighed, zero]).double()
    return torch.where(found.isfinite().all(), found, torch.zeros_like(found))


def _sum_powers(values: Tensor) -> Tensor:
    """Return count, sum, sum of squares and sum of fourth powers of the finite values."""
    finite = values.isfinite()
    values = torch.where(finite, values, 0.0).double()
    square = values.square()
    return torch.stack([finite.sum().double(), values.sum(), square.sum(), square.square().sum()])


_SCORERS = {"fprop": _score_fprop, "dgrad": _score_dgrad, "wgrad": _score_wgrad}


def harm_from(gemm: Gemm, sums: Tensor, *, nats: float = 1.0) -> tuple[Interval, float] | None:
    """Return (harm, mean of r), or for gradient GEMMs (harm, mean `lost`); None if nothing was counted.

    `sums` is float64 [looks, 4] from `score_look`. `nats` is the mean loss of an example, 1 if the loss is not a
    likelihood. Harm is a relative change of the loss.
    """
    sums = sums[sums[:, 0] > 0]
    if not len(sums):
        return None
    if gemm != "fprop":
        return _harm_from_gradients(sums)
    count, total, square, fourth = sums.sum(0).tolist()
    mean, power = total / count, square / count
    upper = power + SURE * _standard_error(sums, power, fourth / count, count)
    rms, above = math.sqrt(power), math.sqrt(upper)
    low = max(abs(mean) - SURE * rms / math.sqrt(count), 0.0)
    value = max(TYPICAL * rms, low) + nats / 2 * power
    # uncertainty of the mean: on these examples, and on others
    unknown = max(SURE / math.sqrt(count), TYPICAL) * above
    high = max(UPPER * above, abs(mean) + unknown) + nats / 2 * upper
    return Interval(value=value, low=min(low, value), high=max(high, value)), mean


def _harm_from_gradients(sums: Tensor) -> tuple[Interval, float]:
    """Compute harm from `lost` and `reweighed` of every look. A single look may be off by its own size."""
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
    """Return the standard error of the mean square: over examples, or over looks if that is larger."""
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
    """Predict how a recipe in one GEMM of one linear changes the loss, offline, from the tensors of one batch.

    Args:
        x: the input [..., K]; the first dimension counts examples.
        weight: [N, K].
        bias: [N] or None; ignored, because it cancels. It is an argument so that the call mirrors the layer's own.
        dy: gradient of the loss with respect to the output [..., N].
        recipe: a name in `loka.dispatch.RECIPES`, "static", "delayed", or a `GemmWay`.
        loss: the value whose gradient is `dy`; mean, sum or scaled, as long as both match.
        gemm: fprop, dgrad or wgrad.
        nats: mean loss of an example; by default `loss`, which is right for a mean.
        largest: amax from which static and delayed scales come, by "x" and "dy"; by default that of this batch.

    Returns:
        Relative change of the loss: `value` is its typical size, `high` the upper bound that verdicts use.

    Raises:
        ValueError: the shapes do not match, or the recipe leaves this GEMM in high precision.

    Example:
        >>> layer, x = nn.Linear(64, 64), torch.randn(512, 64)
        >>> dy = torch.randn(512, 64) / 512  # gradient of the mean loss with respect to layer(x)
        >>> harm(x, layer.weight, layer.bias, dy, "rowwise", loss=0.5).high < 0.1
        True
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
        dx = _matmul(operands.plain("dy"), operands.plain("w"))
        sums = _SCORERS[gemm](operands, chosen, dx, shown)
    found = harm_from(gemm, sums[None].cpu(), nats=float(value) if nats is None else nats)
    if found is None:
        raise ValueError(f"no row of this batch gives a finite score; the loss is {float(value)}")
    return found[0]
