"""Candidates on real rows: how far each way to run a GEMM is from high precision.

For every GEMM of a site and every recipe the operands are quantised and multiplied as the backend would, and compared with the
product of the unquantised operands in float32:

    fprop          guarded MERE    what the next layer sees
    dgrad, wgrad   relative L2     what the optimiser sees: a sum, where element-wise errors of small entries do not matter

The guard of MERE, 0.01 rms, is taken row by row: a row is an example, and its size must not depend on its neighbours'. With one guard for
the whole output a tensorwise scale that flushes every small row to zero scores 0.004 (rows lognormal with sigma 5), since the large rows
alone set the guard; row by row it scores 0.99. For rows of one size the two are the same.

The interval is a bootstrap over rows: rows are drawn with replacement, the whole GEMM (scales included) is repeated on them, and the
2.5 % and 97.5 % quantiles of its error are reported, widened if need be to contain the error on all rows. The weight is the actual one.

This measures error only. Times are measured where there is a GPU, by `loka.measure`; here they stay None.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.dispatch import Operands, Recipe
from loka.formats import QTensor, mere, relative_l2, saturated_fraction, sqnr, underflowed_fraction
from loka.kernels import registry
from loka.kernels.quantize import quantize
from loka.kernels.scaled_mm import MatmulCall, scaled_mm
from loka.probe.watch import Watch
from loka.records import Candidate, Gemm, Interval

DISTRIBUTION = "real rows"


@dataclass(frozen=True)
class Problem:
    """One GEMM on sampled rows: out = a b^T. In wgrad the rows are the contracted axis."""

    gemm: Gemm
    a: Tensor
    b: Tensor

    @property
    def rows(self) -> int:
        """Number of sampled rows."""
        return self.a.shape[1] if self.gemm == "wgrad" else self.a.shape[0]

    def select(self, index: Tensor) -> "Problem":
        """The same GEMM on some of the rows."""
        if self.gemm == "wgrad":
            return Problem(self.gemm, self.a[:, index], self.b[:, index])
        return Problem(self.gemm, self.a[index], self.b)

    def reference(self) -> Tensor:
        """The product in float32."""
        return self.a @ self.b.T


def problem_of(watch: Watch, gemm: Gemm) -> Problem:
    """The operands of one GEMM, from the rows a site kept and its actual weight."""
    x, dy = watch.reservoir.x.float(), watch.reservoir.dy
    weight = watch.module.weight.detach().float()
    if gemm == "fprop":
        return Problem(gemm, x, weight)
    if dy is None:
        raise ValueError(f"{watch.name}: no gradient was seen, so {gemm} cannot be evaluated")
    return Problem(gemm, dy.float(), weight.T) if gemm == "dgrad" else Problem(gemm, dy.float().T, x.T)


@torch.no_grad()
def evaluate_candidate(
    problem: Problem, recipe: Recipe, backend: str, *, samples: int, generator: torch.Generator
) -> Candidate | None:
    """Measure one recipe on one GEMM; None where the recipe leaves this GEMM in high precision."""
    operands = recipe.operands(problem.gemm)
    if operands is None:
        return None
    refusal = _find_refusal(problem, operands, backend)
    if refusal is None:
        try:
            return _measure(problem, recipe.name, operands, backend, samples, generator)
        except _NotFiniteError as error:
            refusal = str(error)
    return Candidate(
        gemm=problem.gemm,
        recipe=recipe.name,
        backend=backend,
        a=str(operands.a),
        b=str(operands.b),
        refusal=refusal,
    )


class _NotFiniteError(ValueError):
    """An error that cannot be written down as a number."""


def _find_refusal(problem: Problem, operands: Operands, backend: str) -> str | None:
    call = MatmulCall(
        problem.a.shape[0],
        problem.a.shape[1],
        problem.b.shape[0],
        operands.a,
        operands.b,
        torch.float32,
        operands.fast_accum,
    )
    verdict = registry.backend("scaled_mm", backend).supports(call, problem.a.device)
    return None if verdict else verdict.reason


def _quantize(problem: Problem, operands: Operands, backend: str) -> tuple[QTensor, QTensor]:
    quantizer = "reference" if backend == "reference" else "auto"  # emulation is emulation throughout
    a, b = problem.a.contiguous(), problem.b.contiguous()
    return quantize(a, operands.a, backend=quantizer), quantize(b, operands.b, backend=quantizer)


def _run(problem: Problem, operands: Operands, backend: str) -> Tensor:
    qa, qb = _quantize(problem, operands, backend)
    return scaled_mm(qa, qb, out_dtype=torch.float32, backend=backend, fast_accum=operands.fast_accum)


def mere_by_row(out: Tensor, ref: Tensor) -> float:
    """Guarded MERE with each row's own guard; a row whose reference is all zero is measured against the whole."""
    whole = ref.square().mean().sqrt()
    size = ref.square().mean(dim=1, keepdim=True).sqrt()
    size = torch.where(size > 0, size, whole)
    size = torch.where(size > 0, size, torch.ones_like(size))
    return mere(out / size, ref / size)


def _errors(out: Tensor, ref: Tensor) -> tuple[float, float]:
    return (mere_by_row(out, ref) if ref.numel() else 0.0), relative_l2(out, ref)


def _measure(
    problem: Problem, recipe: str, operands: Operands, backend: str, samples: int, generator: torch.Generator
) -> Candidate:
    out, ref = _run(problem, operands, backend), problem.reference()
    whole = _errors(out, ref)
    if not all(math.isfinite(error) for error in whole):
        raise _NotFiniteError(f"the error is not finite on the sampled rows (MERE {whole[0]}, relative L2 {whole[1]})")
    replicates: list[tuple[float, float]] = []
    for _ in range(samples):
        index = torch.randint(problem.rows, (problem.rows,), generator=generator).to(problem.a.device)
        part = problem.select(index)
        replicates.append(_errors(_run(part, operands, backend), part.reference()))
    qa, qb = _quantize(problem, operands, backend)
    noise = sqnr(out, ref)
    return Candidate(
        gemm=problem.gemm,
        recipe=recipe,
        backend=backend,
        a=str(operands.a),
        b=str(operands.b),
        distribution=DISTRIBUTION,
        samples=samples,
        mere=interval_of(whole[0], [r[0] for r in replicates]),
        relative_l2=interval_of(whole[1], [r[1] for r in replicates]),
        sqnr_db=noise if math.isfinite(noise) else None,
        saturated=max(saturated_fraction(problem.a, qa), saturated_fraction(problem.b, qb)),
        underflowed=max(underflowed_fraction(problem.a, qa), underflowed_fraction(problem.b, qb)),
    )


def interval_of(value: float, replicates: Sequence[float]) -> Interval:
    """The 95 % quantile interval of the replicates, widened to contain the value."""
    finite = [r for r in replicates if math.isfinite(r)]
    if not finite:
        return Interval(value=value, low=value, high=value)
    levels = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(torch.tensor(finite, dtype=torch.float64), levels).tolist()
    return Interval(value=value, low=min(low, value), high=max(high, value))
