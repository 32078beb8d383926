"""Evaluate candidates on a site's own distributions: the error of each way to run a GEMM, compared with high precision.

For every GEMM, recipe and engine, the operands are quantized and multiplied as the backend would, and the result is
compared with the float64 product of the unquantized operands:

    fprop          guarded MERE    what the next layer sees
    dgrad, wgrad   relative L2     what the optimizer sees: a sum, where errors of small entries do not matter

Operands come from four sources (`loka.probe.problem`). A candidate is judged on the *worst* of rows, copula and
gaussian, by the upper end of the interval. Rows are what was observed; the copula combines the learned correlation and
marginals; the Gaussian is what the published method draws, and the only source with weights other than the actual one.
Each misses something (rows: what the next thousand steps bring; the copula: the dependence of x and dy; the Gaussian:
tails), and a wrong "safe" costs a training run while a wrong "unsafe" costs a little speed. N(0, 1) never decides,
because it knows nothing about the site.

Intervals are 95 % bootstraps:

    rows       rows are resampled `samples` times; quantiles of the replicates, widened to contain the error of all rows
    learned    up to `samples` draws of 16 rows, in a few products that share a weight; bootstrap of the mean,
               resampling weights if draws share one. Drawing stops early once the interval lies on one side of the
               limit. The interval does not include the uncertainty of the learned parameters.
    wgrad      512 rows from any source, resampled in groups of 16; the scales stay those of all rows

The error of a row depends on other rows only through a shared scale, which is that of all sampled rows. So a resample
needs no new product, and an evaluation is a few large products per candidate instead of thousands of small ones.
Operands are quantized once for all candidates that share a Spec. Of wide results only some blocks of outputs are
computed (`Outputs`), so that the cost does not grow with the square of the width.

The conformance gate runs first (`loka.probe.engine`); a candidate that fails has a refusal and no error.
`loka.probe.speed` measures times.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor

from loka.dispatch import recipe_named
from loka.formats import QTensor, Spec
from loka.kernels.scaled_mm import GemmWay
from loka.measure.gate import identify, judge_products, judge_quantizer
from loka.measure.site import gemm_shape
from loka.probe.engine import Engine, out_dtype, quantizer_calls
from loka.probe.interval import Values, intervals_of, make_entry, not_finite, summarise_draws
from loka.probe.problem import (
    MAX_OUTPUTS,
    MAX_WGRAD_ROWS,
    ROWS_PER_SAMPLE,
    WGRAD_ROWS,
    Chunk,
    Outputs,
    Problem,
    count_weights,
    draw_chunks,
    rows_of,
    split_samples,
)
from loka.probe.row_errors import RowErrors, compare_rows, lost_by_row
from loka.probe.watch import Watch
from loka.records import SOURCES, Candidate, DistributionError, Gemm, Source

ENOUGH = 25  # draws before drawing may stop early
WGRAD_GROUPS = 32
FEW_MERES = 8  # resamples of a weight gradient for which MERE is computed; MERE is reported there, but does not decide
QUANTIZED: dict[Gemm, int | None] = {"fprop": None, "dgrad": None, "wgrad": MAX_WGRAD_ROWS}  # along K, at most
JUDGED: tuple[Source, ...] = ("rows", "copula", "gaussian")


@dataclass(frozen=True)
class Trial:
    """One candidate for one GEMM."""

    recipe: str
    operands: GemmWay
    engine: Engine

    def describe(self, gemm: Gemm, refusal: str | None = None) -> Candidate:
        """Return the record without errors."""
        a, b = str(self.operands.a), str(self.operands.b)
        return Candidate(gemm=gemm, recipe=self.recipe, backend=self.engine.name, a=a, b=b, refusal=refusal)


@dataclass
class Outcome:
    """The results of a trial so far."""

    trial: Trial
    errors: list[DistributionError] = field(default_factory=list)
    refusal: str | None = None


class Evaluator:
    """Evaluates the GEMMs of sites. Results on N(0, 1) are cached by shape."""

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
        self._gate = gate
        # candidates of which a step runs a wrong kernel, by site, recipe and engine
        self.refused: Mapping[tuple[str, str, str], str] = {}
        self._limits = dict(limits or {})  # error limits that allow drawing to stop early
        self._normal: dict[tuple[object, ...], DistributionError | str] = {}

    @torch.no_grad()
    def evaluate(self, watch: Watch, gemm: Gemm) -> list[Candidate]:
        """Evaluate every candidate of one GEMM. Recipes that leave it in high precision have none."""
        outcomes = [Outcome(trial) for trial in self._trials(gemm)]
        for outcome in outcomes if self._gate else ():
            trial = outcome.trial
            outcome.refusal = self._refuse(watch, gemm, trial) or self.refused.get(
                (watch.name, trial.recipe, trial.engine.name)
            )
        rows = rows_of(watch, gemm)
        outputs = Outputs.choose(rows, self._generator)
        for source in self.sources:
            able = [o for o in outcomes if o.refusal is None]
            self._measure(watch, rows.keep(outputs), outputs, source, able)
        return [judge_errors(o, gemm, self.judged_on) for o in outcomes]

    def kernel_tasks(self, watches: Iterable[Watch]) -> list[Callable[[], object]]:
        """Return tasks that judge the kernels of every candidate by the conformance gate, which caches its verdicts.

        `evaluate` does the same one by one. In tasks, the kernels of all of them can be compiled side by side, and
        engines that multiply the same operands share these and their exact product. On a GPU, other tasks launch what
        measuring errors launches, so that it is compiled, too.

        Args:
            watches: the sites.

        Returns:
            The tasks, for `loka.kernels.compiling.run_overlapping`.
        """
        tasks: dict[object, Callable[[], object]] = {}
        for watch in watches if self._gate else ():
            for gemm in watch.gemms:
                for operands, engines in self.engines_by_operands(watch, gemm).items():
                    shape = self._shape(watch, gemm)
                    calls = quantizer_calls(operands, shape, quantized=QUANTIZED[gemm])
                    for engine, one in itertools.product(engines, calls):
                        key = (identify(engine.quantize), one, watch.device)
                        tasks.setdefault(key, partial(judge_quantizer, engine.quantize, one, watch.device))
                    product, backends = operands.call(*shape, out_dtype(watch.device)), [e.matmul for e in engines]
                    tasks.setdefault((product, watch.device), partial(judge_products, backends, product, watch.device))
                    sizes = self.sizes(watch, gemm) if watch.device.type == "cuda" else []
                    for engine, size in itertools.product(engines, sizes):
                        task = partial(_rehearse, engine, operands, size, watch.device)
                        tasks.setdefault((id(engine), operands, size, watch.device), task)
        return list(tasks.values())

    def engines_by_operands(self, watch: Watch, gemm: Gemm) -> dict[GemmWay, list[Engine]]:
        """Return the engines that support a GEMM of a site, for each way to quantize its operands."""
        found: dict[GemmWay, list[Engine]] = {}
        for trial in self._trials(gemm):
            call = trial.operands.call(*self._shape(watch, gemm), out_dtype(watch.device))
            if trial.engine.matmul.supports(call, watch.device):
                found.setdefault(trial.operands, []).append(trial.engine)
        return found

    def sizes(self, watch: Watch, gemm: Gemm) -> list[tuple[int, int, int]]:
        """Return M, K and N of the products whose errors are measured."""
        m, k, n = gemm_shape(gemm, watch.reservoir.kept, watch.k, watch.n)
        limit, drawn = MAX_OUTPUTS[gemm], self.samples * (WGRAD_ROWS if gemm == "wgrad" else ROWS_PER_SAMPLE)
        if gemm == "wgrad":
            return [(min(m, limit), min(rows, MAX_WGRAD_ROWS), min(n, limit)) for rows in dict.fromkeys((k, drawn))]
        counts = split_samples(self.samples, count_weights(watch.n, watch.k, self.samples))
        return [(rows, k, min(n, limit)) for rows in dict.fromkeys((m, drawn, *(c * ROWS_PER_SAMPLE for c in counts)))]

    def _trials(self, gemm: Gemm) -> list[Trial]:
        return [
            Trial(recipe.name, operands, engine)
            for recipe in self.recipes
            if (operands := recipe.operands(gemm)) is not None
            for engine in self.engines
        ]

    @torch.no_grad()
    def _refuse(self, watch: Watch, gemm: Gemm, trial: Trial) -> str | None:
        """Return why a candidate may not run at the site's shape; None if it may."""
        return trial.engine.refuse(trial.operands, self._shape(watch, gemm), watch.device, quantized=QUANTIZED[gemm])

    def _shape(self, watch: Watch, gemm: Gemm) -> tuple[int, int, int]:
        """Return M, K and N of a GEMM of a site's largest call."""
        return gemm_shape(gemm, max(watch.largest, 1), watch.k, watch.n)

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


def _rehearse(engine: Engine, operands: GemmWay, size: tuple[int, int, int], device: torch.device) -> None:
    """Run a product once, on zeros, so that its kernels are compiled. Errors come up when it is measured."""
    m, k, n = size
    with suppress(Exception), torch.no_grad():
        a, b = (torch.zeros(rows, k, device=device) for rows in (m, n))
        engine.multiply(engine.quantize(a, operands.a), engine.quantize(b, operands.b), operands)


class _NothingLearnedError(ValueError):
    """The learned distribution cannot be drawn from."""


def check_sources(sources: Sequence[str], judged_on: Sequence[str]) -> None:
    """Raise ValueError for unknown sources, or if `judged_on` names one that is not evaluated."""
    unknown = [s for s in (*sources, *judged_on) if s not in SOURCES]
    if unknown or not sources:
        raise ValueError(f"sources {unknown or 'are missing'}; there are {', '.join(SOURCES)}")
    missing = [s for s in judged_on if s not in sources]
    if missing or not judged_on:
        raise ValueError(f"to be judged on {', '.join(missing) or 'nothing'}, which is not evaluated: {list(sources)}")


def judge_errors(outcome: Outcome, gemm: Gemm, judged_on: Sequence[Source]) -> Candidate:
    """Return the record of a candidate, with the errors of its worst judged source copied to the top level."""
    bare = outcome.trial.describe(gemm, outcome.refusal)
    if outcome.refusal is not None:
        return bare
    measured = [
        replace(copy_errors(bare, entry), errors=outcome.errors)
        for entry in outcome.errors
        if entry.source in judged_on
    ]
    return max(measured, key=lambda c: error.high if (error := c.error) else 0.0)


def copy_errors(bare: Candidate, entry: DistributionError) -> Candidate:
    """Return a candidate with the errors measured on one source of operands."""
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
    """Quantized operands of one problem with their saturation and underflow, cached by quantizer and Spec."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[tuple[str, object, Spec], tuple[QTensor, Tensor, Tensor]] = {}

    def get(self, side: Literal["a", "b"], trial: Trial) -> tuple[QTensor, Tensor, Tensor]:
        """Return (quantized operand, saturated share of each row, underflowed share of each row)."""
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
    """Return the errors of every row of the result, and the saturated and underflowed shares of b."""
    quantized = quantized or Quantized(problem)
    (qa, *lost), (qb, *of_b) = quantized.get("a", trial), quantized.get("b", trial)
    out = trial.engine.multiply(qa, qb, trial.operands)
    return RowErrors(*compare_rows(out, reference), *lost), (_mean(of_b[0]), _mean(of_b[1]))


def summarise(rows: RowErrors, of_b: tuple[float, float]) -> Values:
    """Return (MERE, relative L2, saturated, underflowed) over all rows."""
    everything = torch.arange(rows.mere.numel(), device=rows.mere.device)[None]
    return resample(rows, of_b, everything)[0]


def resample(rows: RowErrors, of_b: tuple[float, float], index: Tensor) -> list[Values]:
    """Return (MERE, relative L2, saturated, underflowed) for every resample. `index` is [samples, rows]."""
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
    """Measure every trial on the same draws.

    Args:
        chunks: the draws, some at a time.
        trials: the candidates.
        source: the distribution that is drawn from, for the record.
        generator: of the bootstrap.
        samples: resamples of a weight gradient's interval.
        limit: an error limit; drawing stops once every interval lies on one side of it.

    Returns:
        For each trial its errors, or the reason why there are none.
    """
    results: list[list[Values] | str] = [[] for _ in trials]
    weights: list[int] = []
    for number, chunk in enumerate(_catch_draw_errors(chunks)):
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
            except Exception as error:  # a failing backend must not stop the others
                results[place] = f"fails on {source} operands: {type(error).__name__}: {error}"
        if limit is not None and all(isinstance(r, str) or _is_decided(r, limit) for r in results):
            break
    return [
        r if isinstance(r, str) else summarise_draws(r, weights, source, ROWS_PER_SAMPLE, generator) for r in results
    ]


def _is_decided(values: Sequence[Values], limit: float) -> bool:
    """Return whether enough draws put the mean four standard errors away from the limit, so that more are pointless."""
    if len(values) < ENOUGH:
        return False
    errors = torch.tensor([value[0] for value in values], dtype=torch.float64)
    return bool((errors.mean() - limit).abs() > 4 * errors.std() / math.sqrt(len(values)))


def _catch_draw_errors(chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks, turning errors of drawing into `_NothingLearnedError` to tell them from errors of a backend."""
    try:
        yield from chunks
    except ValueError as error:
        raise _NothingLearnedError(f"cannot be drawn: {error}") from error


def measure_rows(
    problem: Problem, trials: Sequence[Trial], samples: int, generator: torch.Generator
) -> list[DistributionError | str]:
    """Measure every trial on the kept rows, with a bootstrap over rows."""
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
    """Measure a weight gradient, which sums over rows: groups of rows are resampled, using one partial sum per group.

    The value itself comes from the engine; the partial sums for the interval use the same quantized operands.
    """
    reference, quantized = problem.reference(), Quantized(problem)
    groups = min(max(problem.rows // 2, 1), WGRAD_GROUPS)
    index = torch.randint(groups, (samples, groups), generator=generator)
    counts = torch.zeros(samples, groups).scatter_add_(1, index, torch.ones(samples, groups)).to(problem.a)
    exact = _partial_sums(problem.a, problem.b, groups).flatten(1)
    sizes = _squared_norms(counts, exact)
    few = counts[:FEW_MERES]
    references = (few @ exact).view(-1, *reference.shape)

    def replicate(trial: Trial) -> tuple[Values, list[Values]]:
        value = summarise(*run_rows(problem, trial, reference, quantized))
        (qa, *_), (qb, *_) = quantized.get("a", trial), quantized.get("b", trial)
        low = _partial_sums(qa.dequantize(), qb.dequantize(), groups).flatten(1)
        l2 = (_squared_norms(counts, low - exact) / sizes).sqrt().tolist()
        rows = compare_rows((few @ low).view(references.shape).flatten(0, 1), references.flatten(0, 1))[0]
        mere = rows.view(len(few), -1).mean(1).tolist()
        return value, [(mere[i % len(mere)], error, *value[2:]) for i, error in enumerate(l2)]

    return [_measure_trial(trial, replicate, source, samples, problem.rows) for trial in trials]


def _squared_norms(counts: Tensor, parts: Tensor) -> Tensor:
    """Return the squared norm of each count-weighted sum of parts, from the Gram matrix of the parts."""
    return ((counts @ (parts @ parts.T)) * counts).sum(1)


def _partial_sums(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """Split a b^T into one partial sum per group of contracted columns: [groups, rows of a, rows of b]."""
    padding = -a.shape[1] % groups
    a, b = (torch.nn.functional.pad(t.float(), (0, padding)).view(t.shape[0], groups, -1) for t in (a, b))
    return torch.einsum("ngr,kgr->gnk", a, b)


def _measure_trial(
    trial: Trial, replicate: Callable[[Trial], tuple[Values, list[Values]]], source: Source, samples: int, rows: int
) -> DistributionError | str:
    try:
        value, replicates = replicate(trial)
    except Exception as error:  # a failing backend must not stop the others
        return f"fails on {source} operands: {type(error).__name__}: {error}"
    bad = [r for r in (value, *replicates) if not all(math.isfinite(v) for v in r[:2])]
    if bad:
        return not_finite(source, bad[0])
    return make_entry(source, samples, rows, intervals_of(value, torch.tensor(replicates, dtype=torch.float64)))
