"""Candidates on a site's own distributions: how far each way to run a GEMM is from high precision.

For every GEMM of a site, every recipe and every engine the operands are quantised and multiplied as the backend would, and compared with the
float64 product of the unquantised operands:

    fprop          guarded MERE    what the next layer sees
    dgrad, wgrad   relative L2     what the optimiser sees: a sum, where element-wise errors of small entries do not matter

Operands come from four origins (`loka.probe.problem`). A candidate is judged on the *worst* of rows, copula and gaussian, by the upper end of the
interval: rows are what was seen, the copula is what the learned marginals say can be seen together, the Gaussian is what the published method
draws and the only one with weights other than the actual one. Each misses something (rows: what the next thousand steps bring; the copula: how
x and dy hang together; the Gaussian: tails), and a wrong "safe" costs a training run where a wrong "unsafe" costs a little speed. N(0, 1)
never decides: it knows nothing about the site.

Intervals are 95 % bootstraps:

    rows       the rows are resampled, `samples` times; quantiles of the replicates, widened to contain the error of all rows
    learned    up to `samples` draws of 16 rows, in a few products that share a weight; the mean and the bootstrap of the mean, resampling weights where
               several draws share one. It stops early once the interval lies on one side of the limit. That the learned parameters are themselves
               estimates is not in the interval.
    wgrad      512 rows, whatever their origin; groups of 16 of them are resampled, the scales staying those of all rows

A row's error does not depend on other rows but through a shared scale, which is that of all rows looked at: so a resample needs no new product, and an
evaluation is a few large products per candidate and not thousands of small ones. Operands are quantised once for all candidates that share a Spec. Of wide
results some blocks of outputs are looked at (`Outputs`), so that the cost of a site does not grow with the square of its width.

The conformance gate comes first (`loka.probe.engine`); what fails it has a refusal and no error. Times are `loka.probe.speed`'s business.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from loka.dispatch import recipe_named
from loka.formats import QTensor, Spec
from loka.kernels.scaled_mm import GemmWay
from loka.measure.site import gemm_shape
from loka.probe.engine import Engine, Gate
from loka.probe.interval import Values, interval_of, make_entry, not_finite, summarise_draws
from loka.probe.problem import MAX_WGRAD_ROWS, ROWS_PER_SAMPLE, Chunk, Outputs, Problem, draw_chunks, rows_of
from loka.probe.row_errors import RowErrors, compare_rows, lost_by_row
from loka.probe.watch import Watch
from loka.records import SOURCES, Candidate, DistributionError, Gemm, Source

ENOUGH = 25  # draws before an interval may decide
WGRAD_GROUPS = 32
FEW_MERES = 8  # resamples of a weight gradient whose elements are compared one by one: its MERE is a column, not what it is judged by
JUDGED: tuple[Source, ...] = ("rows", "copula", "gaussian")


@dataclass(frozen=True)
class Trial:
    """One candidate for one GEMM."""

    recipe: str
    operands: GemmWay
    engine: Engine

    def describe(self, gemm: Gemm, refusal: str | None = None) -> Candidate:
        """The record, without errors."""
        a, b = str(self.operands.a), str(self.operands.b)
        return Candidate(gemm=gemm, recipe=self.recipe, backend=self.engine.name, a=a, b=b, refusal=refusal)


@dataclass
class Outcome:
    """What a trial gave, while it is being measured."""

    trial: Trial
    errors: list[DistributionError] = field(default_factory=list)
    refusal: str | None = None


class Evaluator:
    """Evaluates the GEMMs of sites; remembers which engines passed the gate and what N(0, 1) said at which shape."""

    def __init__(
        self,
        recipes: Sequence[str],
        engines: Sequence[Engine],
        *,
        samples: int,
        sources: Sequence[Source],
        judged_on: Sequence[Source],
        seed: int,
        gate: bool = True,
        limits: Mapping[Gemm, float] | None = None,
    ) -> None:
        check_sources(sources, judged_on)
        if samples < 1:
            raise ValueError(f"samples={samples}: an interval needs at least one resample")
        self.recipes = [recipe_named(name) for name in recipes]
        self.engines, self.samples = engines, samples
        self.sources, self.judged_on = tuple(sources), tuple(judged_on)
        self._generator = torch.Generator().manual_seed(seed)
        self._gate = Gate() if gate else None
        self._limits = dict(limits or {})  # where draws may stop early
        self._normal: dict[tuple[object, ...], DistributionError | str] = {}

    @torch.no_grad()
    def evaluate(self, watch: Watch, gemm: Gemm) -> list[Candidate]:
        """Every candidate of one GEMM; a recipe that leaves it in high precision has none."""
        outcomes = [
            Outcome(Trial(recipe.name, operands, engine))
            for recipe in self.recipes
            if (operands := recipe.operands(gemm)) is not None
            for engine in self.engines
        ]
        shape = gemm_shape(gemm, max(watch.largest, 1), watch.k, watch.n)
        for outcome in outcomes:
            if self._gate is not None:
                trial = outcome.trial
                outcome.refusal = self._gate.refuse(trial.engine, trial.operands, shape, watch.device)
        rows = rows_of(watch, gemm)
        outputs = Outputs.choose(rows, self._generator)
        for source in self.sources:
            able = [o for o in outcomes if o.refusal is None]
            self._measure(watch, rows.keep(outputs), outputs, source, able)
        return [judge_errors(o, gemm, self.judged_on) for o in outcomes]

    def _measure(
        self, watch: Watch, rows: Problem, outputs: Outputs, source: Source, outcomes: Sequence[Outcome]
    ) -> None:
        gemm = rows.gemm
        known: dict[int, tuple[object, ...]] = {
            id(o): (source, gemm, watch.n, watch.k, o.trial.operands, id(o.trial.engine)) for o in outcomes
        }
        fresh = [o for o in outcomes if source != "normal" or known[id(o)] not in self._normal]
        try:
            if source == "rows":
                found = measure_rows(rows, [o.trial for o in fresh], self.samples, self._generator)
            else:
                drawn = draw_chunks(watch, gemm, source, self.samples, self._generator, outputs) if fresh else ()
                trials, limit = [o.trial for o in fresh], self._limits.get(gemm)
                found = measure_draws(drawn, trials, source, self._generator, samples=self.samples, limit=limit)
                found = found if fresh else []
        except _NothingLearnedError as error:
            found = [str(error)] * len(fresh)
        results = {known[id(outcome)]: result for outcome, result in zip(fresh, found, strict=True)}
        if source == "normal":
            results = self._normal = {**self._normal, **results}
        for outcome in outcomes:
            result = results[known[id(outcome)]]
            if isinstance(result, DistributionError):
                outcome.errors.append(result)
            elif source in self.judged_on:
                outcome.refusal = result


class _NothingLearnedError(ValueError):
    """A distribution that cannot be drawn from."""


def check_sources(sources: Sequence[str], judged_on: Sequence[str]) -> None:
    """Refuse unknown origins, and a verdict on what is not measured."""
    unknown = [s for s in (*sources, *judged_on) if s not in SOURCES]
    if unknown or not sources:
        raise ValueError(f"sources {unknown or 'are missing'}; there are {', '.join(SOURCES)}")
    missing = [s for s in judged_on if s not in sources]
    if missing or not judged_on:
        raise ValueError(f"to be judged on {', '.join(missing) or 'nothing'}, which is not evaluated: {list(sources)}")


def judge_errors(outcome: Outcome, gemm: Gemm, judged_on: Sequence[Source]) -> Candidate:
    """The record of a candidate, with the entry that counts repeated at its top."""
    bare = outcome.trial.describe(gemm, outcome.refusal)
    if outcome.refusal is not None:
        return bare
    measured = [
        replace(_promote(bare, entry), errors=outcome.errors) for entry in outcome.errors if entry.source in judged_on
    ]
    return max(measured, key=lambda c: error.high if (error := c.error) else 0.0)


def _promote(bare: Candidate, entry: DistributionError) -> Candidate:
    return replace(
        bare,
        distribution=entry.source,
        samples=entry.samples,
        mere=entry.mere,
        relative_l2=entry.relative_l2,
        sqnr_db=None if entry.sqnr_db is None else entry.sqnr_db.value,
        saturated=entry.saturated.value,
        underflowed=entry.underflowed.value,
    )


class Quantized:
    """The operands of one problem under every quantiser and Spec that is asked for, each made once, with what it loses."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[tuple[str, object, Spec], tuple[QTensor, Tensor, Tensor]] = {}

    def get(self, side: Literal["a", "b"], trial: Trial) -> tuple[QTensor, Tensor, Tensor]:
        """(quantised, shares of each row that saturate, shares that vanish)."""
        operand = self._problem.a if side == "a" else self._problem.b
        spec = trial.operands.a if side == "a" else trial.operands.b
        key = (side, id(trial.engine.quantize), spec)
        if key not in self._made:
            q = trial.engine.quantize(operand.contiguous(), spec)
            self._made[key] = (q, *lost_by_row(operand, q))
        return self._made[key]


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def run_rows(
    problem: Problem, trial: Trial, reference: Tensor, quantized: Quantized | None = None
) -> tuple[RowErrors, tuple[float, float]]:
    """Errors of every row of the result, and the shares of b that saturate and vanish."""
    quantized = quantized or Quantized(problem)
    (qa, *lost), (qb, *of_b) = quantized.get("a", trial), quantized.get("b", trial)
    out = trial.engine.multiply(qa, qb, trial.operands)
    return RowErrors(*compare_rows(out, reference), *lost), (_mean(of_b[0]), _mean(of_b[1]))


def summarise(rows: RowErrors, of_b: tuple[float, float]) -> Values:
    """The four numbers of one sample."""
    everything = torch.arange(rows.mere.numel(), device=rows.mere.device)[None]
    return resample(rows, of_b, everything)[0]


def resample(rows: RowErrors, of_b: tuple[float, float], index: Tensor) -> list[Values]:
    """The four numbers of every sample of rows, [samples, rows] of indices, at once."""
    size, error = rows.size[index].sum(1), rows.error[index].sum(1)
    l2 = torch.where(size > 0, (error / size.clamp(min=1e-300)).sqrt(), torch.where(error == 0, 0.0, torch.inf))
    saturated = rows.saturated[index].mean(1).clamp(min=of_b[0])
    underflowed = rows.underflowed[index].mean(1).clamp(min=of_b[1])
    table = torch.stack([rows.mere[index].mean(1), l2, saturated, underflowed], 1)
    return [(row[0], row[1], row[2], row[3]) for row in table.tolist()]


def measure_draws(
    chunks: Iterable[Chunk],
    trials: Sequence[Trial],
    source: Source,
    generator: torch.Generator,
    *,
    samples: int = 100,
    limit: float | None = None,
) -> list[DistributionError | str]:
    """Every trial on the same draws; a reason instead of an error where there is none. With a limit it stops once every interval is on one side."""
    results: list[list[Values] | str] = [[] for _ in trials]
    weights: list[int] = []
    for number, chunk in enumerate(_drawn(chunks)):
        if chunk.problem.gemm == "wgrad":
            return measure_wgrad(chunk.problem, trials, samples, generator, source)
        reference, quantized = chunk.problem.reference(), Quantized(chunk.problem)
        weights += [number] * chunk.samples
        index = torch.arange(chunk.problem.rows, device=reference.device)
        index = index[: chunk.problem.rows // chunk.samples * chunk.samples].view(chunk.samples, -1)
        for place, trial in enumerate(trials):
            held = results[place]
            if isinstance(held, str):
                continue
            try:
                held += resample(*run_rows(chunk.problem, trial, reference, quantized), index)
            except Exception as error:  # a backend that fails is an answer, not the end of the others
                results[place] = f"fails on {source} operands: {type(error).__name__}: {error}"
        if limit is not None and all(isinstance(r, str) or _decided(r, limit) for r in results):
            break
    return [
        r if isinstance(r, str) else summarise_draws(r, weights, source, ROWS_PER_SAMPLE, generator) for r in results
    ]


def _decided(values: Sequence[Values], limit: float) -> bool:
    """Whether more draws could hardly move the mean to the other side of the limit: four standard errors away, from enough draws."""
    if len(values) < ENOUGH:
        return False
    errors = torch.tensor([value[0] for value in values], dtype=torch.float64)
    return bool((errors.mean() - limit).abs() > 4 * errors.std() / math.sqrt(len(values)))


def _drawn(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The same chunks; what drawing refuses is told apart from what a backend refuses."""
    try:
        yield from chunks
    except ValueError as error:
        raise _NothingLearnedError(f"cannot be drawn: {error}") from error


def measure_rows(
    problem: Problem, trials: Sequence[Trial], samples: int, generator: torch.Generator
) -> list[DistributionError | str]:
    """Every trial on the kept rows, with the bootstrap over them."""
    if problem.gemm == "wgrad":
        if problem.rows > MAX_WGRAD_ROWS:
            chosen = torch.randperm(problem.rows, generator=generator)[:MAX_WGRAD_ROWS]
            problem = problem.select(chosen.to(problem.a.device))
        return measure_wgrad(problem, trials, samples, generator, "rows")
    index = torch.randint(problem.rows, (samples, problem.rows), generator=generator).to(problem.a.device)
    reference, quantized = problem.reference(), Quantized(problem)

    def replicate(trial: Trial) -> tuple[Values, list[Values]]:
        errors, of_b = run_rows(problem, trial, reference, quantized)
        return summarise(errors, of_b), resample(errors, of_b, index)

    return [_measure_trial(trial, replicate, "rows", samples, problem.rows) for trial in trials]


def measure_wgrad(
    problem: Problem, trials: Sequence[Trial], samples: int, generator: torch.Generator, source: Source
) -> list[DistributionError | str]:
    """A weight gradient sums over its rows: groups of them are resampled, each group's part of the sum computed once.

    The product itself is the engine's; the parts that tell how much it varies are sums of the same quantised operands.
    """
    reference, quantized = problem.reference(), Quantized(problem)
    groups = min(max(problem.rows // 2, 1), WGRAD_GROUPS)
    index = torch.randint(groups, (samples, groups), generator=generator)
    counts = torch.zeros(samples, groups).scatter_add_(1, index, torch.ones(samples, groups)).to(problem.a)
    exact = _parts(problem.a, problem.b, groups).flatten(1)
    sizes = _squares(counts, exact)
    few = counts[:FEW_MERES]
    references = (few @ exact).view(-1, *reference.shape)

    def replicate(trial: Trial) -> tuple[Values, list[Values]]:
        value = summarise(*run_rows(problem, trial, reference, quantized))
        (qa, *_), (qb, *_) = quantized.get("a", trial), quantized.get("b", trial)
        low = _parts(qa.dequantize(), qb.dequantize(), groups).flatten(1)
        l2 = (_squares(counts, low - exact) / sizes).sqrt().tolist()
        rows = compare_rows((few @ low).view(references.shape).flatten(0, 1), references.flatten(0, 1))[0]
        mere = rows.view(len(few), -1).mean(1).tolist()
        return value, [(mere[i % len(mere)], error, *value[2:]) for i, error in enumerate(l2)]

    return [_measure_trial(trial, replicate, source, samples, problem.rows) for trial in trials]


def _squares(counts: Tensor, parts: Tensor) -> Tensor:
    """Squared norms of sums of parts, for many ways to count them, from the parts' Gram matrix."""
    return ((counts @ (parts @ parts.T)) * counts).sum(1)


def _parts(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """a b^T in parts, one for every group of contracted columns: [groups, rows of a, rows of b]."""
    padding = -a.shape[1] % groups
    a, b = (torch.nn.functional.pad(t.float(), (0, padding)).view(t.shape[0], groups, -1) for t in (a, b))
    return torch.einsum("ngr,kgr->gnk", a, b)


def _measure_trial(
    trial: Trial, replicate: Callable[[Trial], tuple[Values, list[Values]]], source: Source, samples: int, rows: int
) -> DistributionError | str:
    try:
        value, replicates = replicate(trial)
    except Exception as error:  # a backend that fails is an answer, not the end of the others
        return f"fails on {source} operands: {type(error).__name__}: {error}"
    bad = [r for r in (value, *replicates) if not all(math.isfinite(v) for v in r[:2])]
    if bad:
        return not_finite(source, bad[0])
    intervals = [interval_of(v, [r[i] for r in replicates]) for i, v in enumerate(value)]
    return make_entry(source, samples, rows, intervals)
