"""Evaluation of all sites: measure errors, then times, then judge every GEMM, and return records.

Settings    what to try (recipes x backends), on which operands (samples, sources), and the limits
Survey      evaluates site by site; gate results, N(0, 1) results and times are shared between sites of the same shape
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from msgspec.structs import replace

from loka.dispatch import recipe_named
from loka.dispatch.choosing import CHAIN
from loka.dispatch.margin import MARGIN
from loka.lowp.chain import chain_of
from loka.lowp.chain_trace import operand_specs
from loka.measure.site import OURS, SiteJob, SiteTiming, Weights, rehearse
from loka.probe.cause import MODS, find_causes, operands_from
from loka.probe.engine import Engine
from loka.probe.evaluate import JUDGED, Evaluator, Trial, check_sources, copy_errors
from loka.probe.offset import find_offsets
from loka.probe.score import GIVEN_SCALES, operands_of
from loka.probe.speed import TimingKey, explain_slow, time_candidates
from loka.probe.verdict import Allowed, judge
from loka.probe.watch import UNKNOWN_LOSS, Watch
from loka.records import SOURCES, Alarm, Candidate, Cause, Gemm, GemmVerdict, Site, Source

DEFAULT_RECIPES = ("tensorwise", "rowwise", "blockwise")
MAX_ERROR, MAX_GRADIENT_ERROR, MIN_SPEEDUP = 0.2, 0.1, 1.05
IN_CHAIN = "not measured: a chain is timed as a whole"


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation. `backends` are names in the kernel registry, or custom engines."""

    recipes: Sequence[str] = DEFAULT_RECIPES
    backends: Sequence[str | Engine] = ("reference",)
    samples: int = 100
    sources: Sequence[Source] = SOURCES
    judged_on: Sequence[Source] = JUDGED
    max_error: float = MAX_ERROR
    max_gradient_error: float = MAX_GRADIENT_ERROR
    min_speedup: float = MIN_SPEEDUP
    margin: float = MARGIN  # relative change of the loss allowed for the whole model, shared by its units
    gate: bool = True  # False skips the conformance gate, to see what the errors alone would catch
    weights: Weights = "dynamic"
    repeats: int = 15
    seconds: float = 60.0  # time limit for timing one GEMM

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples={self.samples}: an interval needs at least one resample")
        if not self.recipes or not self.backends:
            raise ValueError("nothing to evaluate: name at least one recipe and one backend")
        for name in ("max_error", "max_gradient_error", "min_speedup", "margin", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}, expected a positive number")
        check_sources(self.sources, self.judged_on)

    def limit(self, gemm: Gemm) -> float:
        """Return the largest error allowed in a GEMM."""
        return self.max_error if gemm == "fprop" else self.max_gradient_error


class Survey:
    """Evaluates sites one by one."""

    def __init__(self, settings: Settings, *, seed: int) -> None:
        self.settings, self._seed = settings, seed
        self._engines = {e.name: e for e in (Engine.named(b) if isinstance(b, str) else b for b in settings.backends)}
        if len(self._engines) < len(settings.backends):
            raise ValueError(f"a backend is named twice: {[getattr(b, 'name', b) for b in settings.backends]}")
        self._timed: dict[TimingKey, SiteTiming] = {}
        self._slow: dict[tuple[object, ...], str | None] = {}
        self._evaluator = Evaluator(
            settings.recipes,
            list(self._engines.values()),
            samples=settings.samples,
            sources=settings.sources,
            judged_on=settings.judged_on,
            seed=seed,
            gate=settings.gate,
            limits={"fprop": settings.max_error},
        )

    def refuse(self, refused: Mapping[tuple[str, str, str], str]) -> None:
        """Refuse candidates, named by site, recipe and backend, each for a reason."""
        self._evaluator.refused = refused

    def kernel_tasks(self, watches: Iterable[Watch]) -> list[Callable[[], object]]:
        """Return tasks that judge the kernels of all candidates, and compile what measuring them launches.

        Args:
            watches: the sites that are visited next.
        """
        able = [watch for watch in watches if watch.reservoir.kept]
        jobs = dict.fromkeys((job, watch.device) for watch in able for job in self._timing_jobs(watch))
        return [*self._evaluator.kernel_tasks(able), *(partial(rehearse, *job) for job in jobs)]

    def _timing_jobs(self, watch: Watch) -> list[SiteJob]:
        """Return what is timed at a site on a GPU, in this process."""
        found = []
        for gemm in watch.gemms if watch.device.type == "cuda" else ():
            able = self._evaluator.engines_by_operands(watch, gemm)
            ways = [way.on(engine.name) for way, some in able.items() for engine in some if engine.name in OURS]
            timed = tuple(way for way in ways if way.a.mode == way.b.mode == "dynamic")
            found.append(SiteJob(gemm, watch.largest, watch.k, watch.n, timed, self.settings.weights))
        return found

    def visit(self, watch: Watch, flops_share: float, *, units: int = 1) -> Site:
        """Evaluate one site and return its record. `units` is the number of units that share the margin."""
        gemms = watch.gemms if watch.reservoir.kept else []
        alarms = find_offsets(watch.reservoir.x) if watch.is_raw and watch.reservoir.kept else []
        candidates = [c for gemm in gemms for c in self._measure(watch, gemm)]
        verdicts = self._judge(watch, candidates, units, alarms)
        watch.release()
        return Site(
            name=watch.name,
            type=watch.type,
            m=watch.largest,
            k=watch.k,
            n=watch.n,
            calls=watch.calls,
            flops_share=flops_share,
            gemms=watch.gemms,
            stats=watch.describe(),
            candidates=candidates,
            verdicts=verdicts,
            covariance=watch.covariance_kind,
            groups=watch.groups,
            kept=watch.kept,
            unscored=None if any(c.harm and c.gemm == "fprop" for c in candidates) else why_unscored(watch),
            off=watch.off,
            alarms=alarms,
        )

    def _measure(self, watch: Watch, gemm: Gemm) -> list[Candidate]:
        asked = self.settings
        found = [add_harm(watch, candidate) for candidate in self._evaluator.evaluate(watch, gemm)]
        timed = time_candidates(
            watch, gemm, found, weights=asked.weights, repeats=asked.repeats, seconds=asked.seconds, timed=self._timed
        )
        return timed + chain_candidates(watch, gemm) + own_candidates(watch, gemm)

    def _judge(
        self, watch: Watch, candidates: Sequence[Candidate], units: int, alarms: Sequence[Alarm]
    ) -> list[GemmVerdict]:
        if not watch.gemms:
            reason = watch.off or watch.kept or "never called on a sampled step"
            return [GemmVerdict(gemm="fprop", safety="not measured", speed="not measured", reason=reason)]
        stats = watch.describe()

        def verdict(gemm: Gemm, tried: Sequence[Candidate]) -> GemmVerdict:
            return judge(
                gemm,
                tried,
                stats,
                allowed=Allowed(self.settings.margin, units, self.settings.limit(gemm)),
                unscored=why_unscored(watch),
                alarms=alarms if gemm != "dgrad" else (),
                min_speedup=self.settings.min_speedup,
                outputs=watch.n,
                explain=lambda best: self._explain(watch, best),
                explain_slow=lambda fastest: self._explain_slow(watch, fastest),
            )

        found = []
        for gemm in watch.gemms:
            running = [c for c in candidates if c.gemm == gemm and c.recipe == CHAIN]
            alone = verdict(gemm, [c for c in candidates if c.recipe != CHAIN])
            found.append(_judge_in_chain(watch, verdict(gemm, running), alone) if running else alone)
        return found

    def _explain_slow(self, watch: Watch, fastest: Candidate) -> str | None:
        """Explain where the time of a candidate goes, once for all sites of its shape."""
        shape = (watch.largest, watch.k, watch.n)
        key = (fastest.gemm, shape, fastest.backend, fastest.a, fastest.b, str(fastest.microseconds))
        if key not in self._slow:
            self._slow[key] = explain_slow(watch, fastest, repeats=self.settings.repeats)
        return self._slow[key]

    @torch.no_grad()
    def _explain(self, watch: Watch, best: Candidate) -> list[Cause]:
        # a chain has one scale per tensor, like the tensorwise recipe
        operands = recipe_named("tensorwise" if best.recipe == CHAIN else best.recipe).operands(best.gemm)
        source = next((s for s in SOURCES if s == best.distribution), None)
        if operands is None or source is None:
            return []
        generator = torch.Generator().manual_seed(self._seed)
        problem = operands_from(watch, best.gemm, source, generator)
        engine = self._engines.get(best.backend) or next(iter(self._engines.values()))
        trial = Trial(best.recipe, operands, engine)
        causes = find_causes(problem, trial, self.settings.limit(best.gemm))
        # No layer feeds a raw input, so there is no bias to drop.
        return [replace(c, mod=None) if watch.is_raw and c.mod == MODS["no_bias"] else c for c in causes]


def add_harm(watch: Watch, candidate: Candidate) -> Candidate:
    """Add the harm from the score to a candidate, unless it was refused."""
    found = None if candidate.refusal is not None else watch.tally.harm(candidate.gemm, candidate.recipe)
    return candidate if found is None else replace(candidate, harm=found[0], drift=found[1])


def why_unscored(watch: Watch) -> str | None:
    """Return why an observed site has no harm."""
    if watch.forward_only:
        return "all that was seen ran without gradients"
    return watch.unscored or (UNKNOWN_LOSS if watch.calls else None)


def chain_candidates(watch: Watch, gemm: Gemm) -> list[Candidate]:
    """Return candidates with static and delayed scales, as in a chain. They have a score but no measured error."""
    candidates = []
    for recipe in GIVEN_SCALES:
        operands, found = operands_of(recipe, gemm), watch.tally.harm(gemm, recipe)
        if operands is not None and found is not None:
            a, b = str(operands.a), str(operands.b)
            made = Candidate(gemm=gemm, recipe=recipe, backend="reference", a=a, b=b, speed_note=IN_CHAIN)
            candidates.append(replace(made, harm=found[0], drift=found[1]))
    return candidates


def own_candidates(watch: Watch, gemm: Gemm) -> list[Candidate]:
    """Return the GEMM as it actually runs in the linear's current chain, as a candidate; none if it is in no chain."""
    chain = chain_of(watch.module)
    if chain is None or not watch.own.looks:
        return []
    at = next(number for number, linear in enumerate(chain.linears) if linear is watch.module)
    a, b = (str(spec) for spec in operand_specs(chain, at)[gemm])
    made = Candidate(gemm=gemm, recipe=CHAIN, backend=chain.precision.gemm_backend, a=a, b=b, speed_note=IN_CHAIN)
    errors = watch.own.errors(gemm, watch.reservoir.kept)
    if isinstance(errors, str):
        return [replace(made, refusal=errors, speed_note=None)]
    if errors is None:
        return []
    harm, drift = watch.own.harm(gemm) or (None, None)
    return [replace(copy_errors(made, errors), errors=[errors], harm=harm, drift=drift)]


def _judge_in_chain(watch: Watch, running: GemmVerdict, alone: GemmVerdict) -> GemmVerdict:
    """Return the verdict inside the chain; unless it is safe, the reason adds the verdict outside the chain."""
    chain = chain_of(watch.module)
    assert chain is not None
    extra = "" if running.safety == "safe" else f"; alone: {alone.safety}, {alone.reason}"
    return replace(running, reason=f"in the chain {chain.name}: {running.reason}{extra}")
