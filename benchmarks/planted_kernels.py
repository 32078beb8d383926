"""Kernels that are wrong on purpose: what the gates are tested with.

Each is a mistake somebody makes: a scale left out, a stride confused, a register too narrow. All of them return plausible numbers, and most
look right on N(0, 1) inputs, where every row, block and channel has nearly the same size and so every scale will do for every other. They
are plugged in as engines, as any kernel of one's own would be.

`inspect` shows a kernel to both gates and to the test it would usually have been given:

    conformance    against the law of the same Spec on the same quantised operands, at the site's widths
    learned        its error on the site's rows, copula and Gaussian, as if there were no conformance gate
    N(0, 1)        its error at 256 x 256 x 256, where kernels are tried out, and at the site's own shape: under a loose bound, it is "fine"
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loka.dispatch import recipe_named
from loka.formats import E4M3, QTensor, Spec
from loka.formats import quantize as quantize_by_law
from loka.kernels.backend import YES, Verdict
from loka.kernels.scaled_mm import MatmulCall, reference
from loka.probe.engine import Engine
from loka.probe.evaluate import JUDGED, Evaluator, Trial, run_rows, summarise
from loka.probe.problem import Problem
from loka.probe.watch import Watch
from loka.records import Candidate

USUAL = 256  # a shape kernels are tried out at: square, and a multiple of everything
LOOSE = 0.2
CHUNK = 64  # products between roundings of a partial sum


@dataclass(frozen=True)
class Planted:
    """A broken kernel: the recipe it claims to run, and what is wrong with it."""

    name: str
    recipe: str
    mistake: str
    engine: Engine


class Matmul:
    """A GEMM backend made of one function."""

    def __init__(self, run: Callable[[QTensor, QTensor], Tensor]) -> None:
        self._run = run

    def supports(self, call: MatmulCall, device: torch.device) -> Verdict:
        """It claims everything."""
        return YES

    def run(self, a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
        """Multiply, wrongly."""
        return self._run(a, b).to(out_dtype)


def _law(a: QTensor, b: QTensor) -> Tensor:
    return reference.run(a, b, out_dtype=torch.float32)


def _drop_last_scale(a: QTensor, b: QTensor) -> Tensor:
    scale = a.scale.clone()
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale[:, -1] = 1.0
    return _law(replace(a, scale=scale), b)


def _reuse_first_scale(a: QTensor, b: QTensor) -> Tensor:
    scale = a.scale.clone()
    if scale.dim() == 2 and scale.shape[1] > 1:
        scale[:, -1] = scale[:, 0]
    return _law(replace(a, scale=scale), b)


def _share_row_scale(a: QTensor, b: QTensor) -> Tensor:
    return _law(replace(a, scale=a.scale[:1].expand_as(a.scale).contiguous()), b)


def _overflow(a: QTensor, b: QTensor) -> Tensor:
    return _law(a, b).half().float()


def _stale(a: QTensor, b: QTensor) -> Tensor:
    return 1.1 * _law(a, b)


def _round_partial_sums(a: QTensor, b: QTensor) -> Tensor:
    left, right = a.dequantize(), b.dequantize()
    total = torch.zeros(left.shape[0], right.shape[0], device=left.device, dtype=torch.bfloat16)
    for x, w in zip(torch.split(left, CHUNK, dim=1), torch.split(right, CHUNK, dim=1), strict=True):
        total = total + (x @ w.T).bfloat16()
    return total.float()


def _lose_tail(a: QTensor, b: QTensor) -> Tensor:
    whole = a.shape[1] - a.shape[1] % 128
    return a.dequantize()[:, :whole] @ b.dequantize()[:, :whole].T


def _swap_scale_grid(a: QTensor, b: QTensor) -> Tensor:
    """128x128 scales read with the other stride, unless the grid is a multiple of 4 wide, as it is at 512, 1024, ..."""
    if b.scale.dim() != 2 or b.scale.shape[1] % 4 == 0:
        return _law(a, b)
    confused = b.scale.T.contiguous().reshape(b.scale.shape)
    return _law(a, replace(b, scale=confused))


def _wrap_instead_of_saturate(x: Tensor, spec: Spec) -> QTensor:
    """A row larger than float16 holds is scaled as if it were float16's largest: what lies beyond wraps around."""
    q = quantize_by_law(x, spec)
    limit = torch.finfo(torch.float16).max
    large = x.abs() > limit
    if not bool(large.any()):
        return q
    wrapped = torch.remainder(x + limit, 2 * limit) - limit
    mended = quantize_by_law(torch.where(large, wrapped, x), spec)
    return QTensor(mended.data, mended.scale, spec, mended.tensor_scale)


def _flush_small(x: Tensor, spec: Spec) -> QTensor:
    """Subnormal results are flushed to zero: FP8 loses its last three octaves."""
    q = quantize_by_law(x, spec)
    codes = q.data.view(torch.uint8)
    small = (codes & 0x78) == 0 if spec.format == E4M3 else (codes & 0x7C) == 0
    return replace(q, data=torch.where(small, torch.zeros_like(codes), codes).view(q.data.dtype))


def _with_matmul(name: str, run: Callable[[QTensor, QTensor], Tensor]) -> Engine:
    return Engine(name, quantize_by_law, Matmul(run))


def _with_quantizer(name: str, quantizer: Callable[[Tensor, Spec], QTensor]) -> Engine:
    return Engine(name, quantizer, Matmul(_law))


_MATMULS: tuple[tuple[str, str, str, Callable[[QTensor, QTensor], Tensor]], ...] = (
    ("none", "rowwise", "nothing: the law itself, which must pass everywhere", _law),
    ("dropped scale", "blockwise", "the scale of the last K block is left out", _drop_last_scale),
    ("reused scale", "blockwise", "the last K block gets the first one's scale", _reuse_first_scale),
    ("row scale per tensor", "rowwise", "every row gets the first row's scale", _share_row_scale),
    ("overflow", "rowwise", "large results overflow to infinity on their way through float16", _overflow),
    ("stale scale", "rowwise", "a scale of an earlier step, 10 % too large", _stale),
    ("bf16 partial sums", "rowwise", "partial sums are rounded to bf16 every 64 products", _round_partial_sums),
    ("lost K tail", "rowwise", "K is rounded down to a multiple of 128", _lose_tail),
    (
        "swapped scale grid",
        "blockwise",
        "128x128 scales are read with the wrong stride at some widths",
        _swap_scale_grid,
    ),
)
_QUANTIZERS: tuple[tuple[str, str, str, Callable[[Tensor, Spec], QTensor]], ...] = (
    ("wrapped rows", "rowwise", "values beyond float16 wrap around instead of saturating", _wrap_instead_of_saturate),
    ("flushed subnormals", "rowwise", "the quantiser flushes subnormals to zero", _flush_small),
)

PLANTED: tuple[Planted, ...] = (
    *(Planted(name, recipe, mistake, _with_matmul(name, run)) for name, recipe, mistake, run in _MATMULS),
    *(
        Planted(name, recipe, mistake, _with_quantizer(name, quantize))
        for name, recipe, mistake, quantize in _QUANTIZERS
    ),
)


@dataclass(frozen=True)
class Inspection:
    """What each gate said to a kernel; an error of None was not finite."""

    planted: Planted
    conformance: str | None  # why it was refused
    learned: str | None
    learned_error: float | None  # upper end of the worst interval
    usual_error: float  # MERE on N(0, 1) at the usual shape
    site_error: float  # the same at the site's shape

    @property
    def rejected_by(self) -> tuple[str, ...]:
        """The gates that found it."""
        found = {"conformance": self.conformance, "learned distributions": self.learned}
        return tuple(name for name, reason in found.items() if reason is not None)

    @property
    def looks_fine(self) -> bool:
        """Whether N(0, 1) inputs at the usual shape and a loose bound let it pass."""
        return self.usual_error < LOOSE


def make_hard_site(*, k: int = 320, n: int = 192, rows: int = 512, steps: int = 20, seed: int = 0) -> Watch:
    """A linear whose inputs are hard (rows of very different size, a few large channels), watched while it trains a little."""
    from loka.probe.probe import Probe

    torch.manual_seed(seed)
    first = nn.Linear(k, n)
    with torch.no_grad():
        first.weight *= torch.exp(torch.randn(n, 1))  # weights of a trained ranker differ in size too
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(n, 1))
    probe = Probe(model, lambda module, name: name == "0", every=4, rows=256, stagger=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = (model(stress_matrix(rows, k, seed=seed + step)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.step()
    probe.detach()
    return probe.watch("0")


def inspect(planted: Planted, watch: Watch, *, samples: int = 20, limit: float = LOOSE, seed: int = 0) -> Inspection:
    """Show a kernel to both gates on one site's fprop."""
    operands = recipe_named(planted.recipe).fprop
    assert operands is not None
    shape = (max(watch.largest, 1), watch.k, watch.n)
    refusal = planted.engine.refuse(operands, shape, watch.device)
    evaluator = Evaluator(
        [planted.recipe], [planted.engine], samples=samples, sources=JUDGED, judged_on=JUDGED, seed=seed, gate=False
    )
    (candidate,) = evaluator.evaluate(watch, "fprop")
    trial = Trial(planted.recipe, operands, planted.engine)
    usual, own = (_score_normal(trial, *widths, seed) for widths in ((USUAL, USUAL), (watch.k, watch.n)))
    reason, error = _refuse(candidate, limit)
    return Inspection(planted, refusal, reason, error, usual, own)


def _refuse(candidate: Candidate, limit: float) -> tuple[str | None, float | None]:
    if candidate.mere is None:
        return candidate.refusal or "not measured", None
    high = candidate.mere.high
    return (f"MERE up to {high:.3g} on {candidate.distribution}" if high > limit else None), high


@torch.no_grad()
def _score_normal(trial: Trial, k: int, n: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    problem = Problem("fprop", *(torch.randn(rows, k, generator=generator) for rows in (USUAL, n)))
    error: Any = summarise(*run_rows(problem, trial, problem.reference()))[0]
    return float(error)


def stress_matrix(
    rows: int,
    columns: int,
    *,
    sigma: float = 4.0,
    outlier_channels: int = 2,
    outlier_scale: float = 1000.0,
    bias: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Return a float32 matrix whose range lies inside scaling groups: lognormal row scales, outlier channels, biases."""
    if rows < 0 or columns < 0 or not 0 <= outlier_channels <= columns:
        raise ValueError(
            f"need rows, columns >= 0 and outlier_channels in [0, columns], got {rows, columns, outlier_channels}"
        )
    rng = np.random.default_rng([seed, rows, columns])
    scale = np.exp(sigma * rng.standard_normal((rows, 1)))
    channel = np.ones(columns)
    channel[rng.choice(columns, outlier_channels, replace=False)] = outlier_scale
    values = rng.standard_normal((rows, columns)) * scale * channel + bias * rng.standard_normal(columns)
    return torch.from_numpy(values.astype(np.float32))
