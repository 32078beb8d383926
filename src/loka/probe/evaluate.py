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

    rows       the rows are resampled, `samples` times, scales included; quantiles of the replicates, widened to contain the error of all rows
    learned    `samples` independent draws of 16 rows (wgrad: of 128); the mean and the bootstrap of the mean, resampling weights where several
               draws share one. That the learned parameters are themselves estimates is not in the interval.

A row's error does not depend on other rows, unless they share a scale: so a resample of rows needs no new product, but for a tensor scale one
product per distinct largest row. In wgrad the rows are summed: every replicate is computed (on at most 512 rows). Of wide results some blocks of
outputs are looked at (`Outputs`), so that the cost of a site does not grow with the square of its width.

The conformance gate comes first (`loka.probe.engine`); what fails it has a refusal and no error. Times are `loka.probe.speed`'s business.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace
from torch import Tensor

from loka.dispatch import Operands, error_of, recipe_named
from loka.formats import TENSOR, QTensor
from loka.measure.site import gemm_shape
from loka.probe.engine import Engine, Gate
from loka.probe.interval import Values, interval_of, make_entry, not_finite, summarise_draws
from loka.probe.problem import (
    MAX_WGRAD_ROWS,
    ROWS_PER_SAMPLE,
    WGRAD_ROWS,
    Chunk,
    Outputs,
    Problem,
    RowErrors,
    compare_rows,
    draw_chunks,
    lost_by_row,
    rows_of,
)
from loka.probe.watch import Watch
from loka.records import SOURCES, Candidate, DistributionError, Gemm, Source

JUDGED: tuple[Source, ...] = ("rows", "copula", "gaussian")


@dataclass(frozen=True)
class Trial:
    """One candidate for one GEMM."""

    recipe: str
    operands: Operands
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
    ) -> None:
        check_sources(sources, judged_on)
        if samples < 1:
            raise ValueError(f"samples={samples}: an interval needs at least one resample")
        self.recipes = [recipe_named(name) for name in recipes]
        self.engines, self.samples = engines, samples
        self.sources, self.judged_on = tuple(sources), tuple(judged_on)
        self._generator = torch.Generator().manual_seed(seed)
        self._gate = Gate() if gate else None
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
                found = measure_draws(drawn, [o.trial for o in fresh], source, self._generator)
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
    return max(measured, key=lambda c: error.high if (error := error_of(c)) else 0.0)


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


@dataclass(frozen=True)
class Right:
    """The right operand as a trial has it, and the shares of it that saturate and vanish."""

    q: QTensor
    lost: tuple[float, float]

    @classmethod
    def of(cls, b: Tensor, trial: Trial) -> "Right":
        """Quantised once, for as many products as share it."""
        q = trial.engine.quantize(b.contiguous(), trial.operands.b)
        saturated, underflowed = lost_by_row(b, q)
        return cls(q, (_mean(saturated), _mean(underflowed)))


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else 0.0


def run_rows(
    problem: Problem, trial: Trial, reference: Tensor, right: Right | None = None
) -> tuple[RowErrors, tuple[float, float]]:
    """Errors of every row of the result, and the shares of b that saturate and vanish."""
    right = right or Right.of(problem.b, trial)
    qa = trial.engine.quantize(problem.a.contiguous(), trial.operands.a)
    out = trial.engine.multiply(qa, right.q, trial.operands)
    return RowErrors(*compare_rows(out, reference), *lost_by_row(problem.a, qa)), right.lost


def summarise(rows: RowErrors, of_b: tuple[float, float]) -> Values:
    """The four numbers of one sample."""
    size, error = float(rows.size.sum()), float(rows.error.sum())
    l2 = math.sqrt(error / size) if size > 0 else (0.0 if error == 0 else math.inf)
    saturated, underflowed = max(_mean(rows.saturated), of_b[0]), max(_mean(rows.underflowed), of_b[1])
    return _mean(rows.mere), l2, saturated, underflowed


def measure_draws(
    chunks: Iterable[Chunk], trials: Sequence[Trial], source: Source, generator: torch.Generator
) -> list[DistributionError | str]:
    """Every trial on the same draws; a reason instead of an error where there is none."""
    results: list[list[Values] | str] = [[] for _ in trials]
    weights: list[int] = []
    rows = ROWS_PER_SAMPLE
    for number, chunk in enumerate(_drawn(chunks)):
        reference = chunk.problem.reference()
        weights += [number] * chunk.samples
        rows = WGRAD_ROWS if chunk.problem.gemm == "wgrad" else ROWS_PER_SAMPLE
        for index, trial in enumerate(trials):
            held = results[index]
            if isinstance(held, str):
                continue
            try:
                held += _run_chunk(chunk, trial, reference)
            except Exception as error:  # a backend that fails is an answer, not the end of the others
                results[index] = f"fails on {source} operands: {type(error).__name__}: {error}"
    return [r if isinstance(r, str) else summarise_draws(r, weights, source, rows, generator) for r in results]


def _drawn(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The same chunks; what drawing refuses is told apart from what a backend refuses."""
    try:
        yield from chunks
    except ValueError as error:
        raise _NothingLearnedError(f"cannot be drawn: {error}") from error


def _run_chunk(chunk: Chunk, trial: Trial, reference: Tensor) -> list[Values]:
    problem, count = chunk.problem, chunk.samples
    if problem.gemm == "wgrad" or count == 1:
        return [summarise(*run_rows(problem, trial, reference))]
    height = problem.rows // count
    parts = [slice(i * height, (i + 1) * height) for i in range(count)]
    right = Right.of(problem.b, trial)
    if trial.operands.a.block.rows == 1:  # rows do not share a scale: one product serves all samples
        errors, of_b = run_rows(problem, trial, reference, right)
        return [summarise(errors[part], of_b) for part in parts]
    split = [(Problem(problem.gemm, problem.a[part], problem.b), reference[part]) for part in parts]
    return [summarise(*run_rows(some, trial, expected, right)) for some, expected in split]


def measure_rows(
    problem: Problem, trials: Sequence[Trial], samples: int, generator: torch.Generator
) -> list[DistributionError | str]:
    """Every trial on the kept rows, with the bootstrap over them."""
    if problem.gemm == "wgrad" and problem.rows > MAX_WGRAD_ROWS:
        chosen = torch.randperm(problem.rows, generator=generator)[:MAX_WGRAD_ROWS]
        problem = problem.select(chosen.to(problem.a.device))
    index = torch.randint(problem.rows, (samples, problem.rows), generator=generator).to(problem.a.device)
    reference = problem.reference()
    found: list[DistributionError | str] = []
    for trial in trials:
        try:
            whole, of_b = run_rows(problem, trial, reference)
            value = summarise(whole, of_b)
            if not all(math.isfinite(v) for v in value[:2]):
                found.append(not_finite("rows", value))
                continue
            if problem.gemm == "wgrad":
                replicates = [_replicate_wgrad(problem.select(part), trial) for part in index]
            elif trial.operands.a.block == TENSOR:
                replicates = _replicate_tensorwise(problem, trial, reference, index)
            else:
                replicates = [summarise(whole[part], of_b) for part in index]
        except Exception as error:  # a backend that fails is an answer, not the end of the others
            found.append(f"fails on rows operands: {type(error).__name__}: {error}")
            continue
        bad = [r for r in replicates if not all(math.isfinite(v) for v in r)]
        if bad:
            found.append(not_finite("rows", bad[0]))
            continue
        intervals = [interval_of(v, [r[i] for r in replicates]) for i, v in enumerate(value)]
        found.append(make_entry("rows", samples, problem.rows, intervals))
    return found


def _replicate_wgrad(problem: Problem, trial: Trial) -> Values:
    return summarise(*run_rows(problem, trial, problem.reference()))


def _replicate_tensorwise(problem: Problem, trial: Trial, reference: Tensor, index: Tensor) -> list[Values]:
    """Resamples under one scale for all their rows: it is that of the largest row among them, so few products serve them all."""
    right = Right.of(problem.b, trial)
    largest = problem.a.abs().nan_to_num(0.0, 0.0, 0.0).amax(1)
    tops = largest[index].amax(1)
    known: dict[float, tuple[RowErrors, tuple[float, float], Tensor]] = {}
    replicates = []
    for part, top in zip(index, tops.tolist(), strict=True):
        if top not in known:
            inside = (largest <= top).nonzero().flatten()
            place = torch.full_like(largest, -1, dtype=torch.long)
            place[inside] = torch.arange(inside.numel(), device=place.device)
            known[top] = (*run_rows(problem.select(inside), trial, reference[inside], right), place)
        errors, of_b, place = known[top]
        replicates.append(summarise(errors[place[part]], of_b))
    return replicates
