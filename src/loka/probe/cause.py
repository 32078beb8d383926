"""Causes of a large GEMM error, found by intervention: remove one suspected cause at a time and measure again.

A suspicious statistic is only a coincidence until the error disappears with it. Each suspicion changes one operand:

    outlier channels    channels whose absmax exceeds 8 x the median channel's are scaled down to the median
    mean                the mean of every channel over the rows is subtracted: "bias dominates amax"
    sizes of rows       every row is divided by its absmax (only where rows share a scale)
    tails               elements beyond 4 x the rms of their scaling group are clipped to it: range inside a group

The product of the changed operands has its own reference, so only the low-precision error is compared. A cause counts
if the error falls by half, or from above the limit to below it. Two more causes cannot be removed and are detected
instead:

    cancellation        the terms of a sum are far larger than the sum, and so is their error
    the limit           N(0, 1) operands of the same shape exceed it too: this format cannot meet it anywhere

The suggested remedy is the name of a mod (`loka.mods`). It is advice, not a measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import TENSOR, Spec
from loka.probe.evaluate import Trial, run_rows, summarise
from loka.probe.problem import Outputs, Problem, draw_chunks, rows_of
from loka.probe.watch import Watch
from loka.records import Cause, Gemm, Role, Source

OPERANDS: dict[Gemm, tuple[Role, Role]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
NAMES: dict[Role, str] = {"x": "the input", "w": "the weight", "dy": "the output gradient"}
OUTLIER = 8.0
TAIL = 4.0
MAX_ROWS = 512
CANCELLING = 8.0  # terms this many times larger than their sum count as cancellation
MAX_CAUSES = 3

MODS = {
    "block_norm": "block_norm: normalize the input of this linear in fixed blocks",
    "no_bias": "no_bias: drop the bias that feeds this linear",
    "norm_order": "norm_order: quantize after the norm, where the range is bounded",
    "protect_intermediates": "protect_intermediates: keep this product in high precision",
    "align_shapes": "align_shapes: pad the widths to a multiple the kernels take",
    "fuse": "fuse: let the producer of the operand quantize it",
}


@dataclass(frozen=True)
class Suspicion:
    """A possible cause: its description, the operand without it, and the mod that would remove it."""

    text: str
    without: Tensor
    mod: str | None


def find_causes(problem: Problem, trial: Trial, limit: float) -> list[Cause]:
    """Return the confirmed causes, strongest first."""
    error = measure_error(problem, trial)
    found = []
    for place, role in enumerate(OPERANDS[problem.gemm]):
        operand, spec = ((problem.a, trial.operands.a), (problem.b, trial.operands.b))[place]
        for suspicion in suspect(operand, spec, role, problem.gemm):
            changed = (suspicion.without, problem.b) if place == 0 else (problem.a, suspicion.without)
            without = measure_error(Problem(problem.gemm, *changed), trial)
            if without < error / 2 or (error > limit and without < min(limit, 0.9 * error)):
                found.append(Cause(text=suspicion.text, error=error, without=without, mod=suspicion.mod))
    found.sort(key=lambda cause: cause.without or 0.0)
    return (found or recognise(problem, trial, error, limit))[:MAX_CAUSES]


def measure_error(problem: Problem, trial: Trial) -> float:
    """Measure MERE in fprop, relative L2 in the gradient GEMMs; infinity instead of NaN."""
    mere, l2, *_ = summarise(*run_rows(problem, trial, problem.reference()))
    error = mere if problem.gemm == "fprop" else l2
    return error if error == error else float("inf")


def suspect(operand: Tensor, spec: Spec, role: Role, gemm: Gemm) -> list[Suspicion]:
    """Return the possible causes in one operand [rows, contracted]."""
    finite = operand.nan_to_num(0.0, 0.0, 0.0)
    tests: tuple[Callable[[Tensor, Spec, Role, Gemm], Suspicion | None], ...] = (
        _suspect_outliers,
        _suspect_mean,
        _suspect_row_sizes,
        _suspect_tails,
    )
    return [suspicion for test in tests if (suspicion := test(finite, spec, role, gemm)) is not None]


def _suspect_outliers(x: Tensor, spec: Spec, role: Role, gemm: Gemm) -> Suspicion | None:
    peaks = x.abs().amax(0)
    alive = peaks[peaks > 0]
    if alive.numel() < 2:
        return None
    median = alive.median()
    out = peaks > OUTLIER * median
    count = int(out.sum())
    if not count:
        return None
    factor = torch.where(out, median / peaks.clamp(min=torch.finfo(x.dtype).tiny), torch.ones_like(peaks))
    what = "example" if gemm == "wgrad" else "channel"
    largest = float(peaks.max() / median)
    text = f"{count} outlier {what}{'s' * (count > 1)} in {NAMES[role]} (up to {largest:.0f} x the median)"
    return Suspicion(text, x * factor, MODS["block_norm"] if role == "x" else None)


def _suspect_mean(x: Tensor, spec: Spec, role: Role, gemm: Gemm) -> Suspicion | None:
    if role == "w":
        return None
    axis = 1 if gemm == "wgrad" else 0  # over the examples
    mean = x.mean(axis, keepdim=True)
    spread = (x - mean).square().mean().sqrt()
    size = mean.square().mean().sqrt()
    if not size > spread:
        return None
    ratio = float(size / spread) if spread > 0 else float("inf")
    text = f"bias dominates amax of {NAMES[role]} (its mean is {ratio:.3g} x its spread)"
    return Suspicion(text, x - mean, MODS["no_bias"] if role == "x" else None)


def _suspect_row_sizes(x: Tensor, spec: Spec, role: Role, gemm: Gemm) -> Suspicion | None:
    if spec.block.rows == 1:
        return None
    peaks = x.abs().amax(1, keepdim=True)
    alive = peaks[peaks > 0]
    if alive.numel() < 2 or not alive.max() > OUTLIER * alive.median():
        return None
    octaves = float(torch.log2(alive.max() / alive.median()))
    scaled = x / torch.where(peaks > 0, peaks, torch.ones_like(peaks))
    shared = "one scale" if spec.block == TENSOR else f"a {spec.block} scale"
    text = f"rows of {NAMES[role]} differ in size: 2^{octaves:.0f} from the median to the largest, under {shared}"
    return Suspicion(text, scaled, MODS["block_norm"] if role == "x" else None)


def _suspect_tails(x: Tensor, spec: Spec, role: Role, gemm: Gemm) -> Suspicion | None:
    width = spec.block.cols if spec.block.cols > 0 else x.shape[1]
    parts = torch.split(x, max(width, 1), dim=1)
    clipped, octaves = [], 0.0
    for part in parts:
        bound = TAIL * part.square().mean(1, keepdim=True).sqrt()
        clipped.append(part.clamp(-bound, bound))
        octaves = max(octaves, _measure_range(part))
    without = torch.cat(clipped, 1)
    if torch.equal(without, x):
        return None
    group = {"tensor": "row", "row": "row"}.get(str(spec.block), f"{spec.block} group")
    text = f"range inside a {group} of {NAMES[role]}: 2^{octaves:.0f} from the median to the largest"
    return Suspicion(text, without, MODS["norm_order"] if role == "x" else None)


def _measure_range(part: Tensor) -> float:
    """Return log2 of (largest / median magnitude) of a row's non-zero elements, as the median over rows."""
    magnitude = part.abs()
    known = torch.where(magnitude > 0, magnitude, torch.full_like(magnitude, torch.nan))
    ratio = known.nan_to_num(0.0).amax(1) / known.nanmedian(1).values
    ratio = ratio[ratio.isfinite() & (ratio > 0)]
    return float(torch.log2(ratio).median()) if ratio.numel() else 0.0


def recognise(problem: Problem, trial: Trial, error: float, limit: float) -> list[Cause]:
    """Detect causes that cannot be removed: cancellation, and a limit below the format's own error."""
    found = []
    terms = (problem.a.double().square() @ problem.b.double().square().T).sum().sqrt()
    ratio = float(terms / problem.reference().norm().clamp(min=torch.finfo(torch.float64).tiny))
    if ratio > CANCELLING:
        text = f"the products cancel: their terms are {ratio:.0f} x the sum"
        found.append(Cause(text=text, error=error, without=None, mod=MODS["protect_intermediates"]))
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(t.shape, generator=generator).to(t) for t in (problem.a, problem.b)]
    floor = measure_error(Problem(problem.gemm, *plain), trial)
    if floor > limit:
        text = f"the limit is below the format's own error: N(0, 1) operands of this shape score {floor:.3g}"
        found.append(Cause(text=text, error=error, without=floor))
    return found


def operands_from(watch: Watch, gemm: Gemm, source: Source, generator: torch.Generator) -> Problem:
    """Return a problem to test causes on: operands from the source that decided, at most MAX_ROWS rows."""
    problem = rows_of(watch, gemm)
    outputs = Outputs.choose(problem, generator)
    if source != "rows":
        return next(iter(draw_chunks(watch, gemm, source, 1, generator, outputs))).problem
    problem = problem.keep(outputs)
    chosen = torch.randperm(problem.rows, generator=generator)[:MAX_ROWS].to(problem.a.device)
    return problem.select(chosen)
