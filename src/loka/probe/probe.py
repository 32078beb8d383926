"""Probe: look at every linear of a model while it trains, and say which of its GEMMs would survive low precision.

    probe = loka.Probe(model)
    for batch in loader:
        train_step(model, batch)
        probe.step()
    report = probe.evaluate()

Every site is looked at on one step in `every`, 100 by default: statistics, learned distributions and a few real rows of x, W and dy, for all three GEMMs
(`loka.probe.watch`), and what every recipe would do to the loss (`loka.probe.score`). On the other steps a hook is one `if`. Training is bit-identical with the probe attached, and within rounding when
compiled: a sampled step runs a second compiled graph (`loka.probe.seeing`), not eagerly. `evaluate` then runs every candidate on what was learned
(`loka.probe.survey`). Sites are linears; `kinds` adds grouped, mixed and batched products and lookups (`loka.probe.adapter`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from loka.formats import Spec
from loka.measure.device import device_of, environment_of
from loka.probe.chains import find_chains
from loka.probe.drift import Judge, find_drift, survey_judge
from loka.probe.engine import Engine
from loka.probe.observer import Observer
from loka.probe.progress import telling
from loka.probe.report import Report
from loka.probe.survey import DEFAULT_RECIPES, MAX_ERROR, MAX_GRADIENT_ERROR, Settings, Survey
from loka.records import DriftReport, FlopsOf, FormatRange, ProbeReport, Site


class Probe(Observer):
    """Watches the sites of a model while it trains, and judges them. It changes no bit and never raises into the training loop.

    Args:
        model: any nn.Module, wrapped or not.
        every: steps between looks.
        rows: kept and looked at, of each site.
        seed: of what is sampled.
        module_filter_fn: (module, name) -> whether it is a site.
        kinds: of sites.
        memory_budget: bytes for learned distributions.
        window: steps of a window, for drift.
        stagger: groups of sites that are looked at in turn.
        snapshot_every: steps between snapshots of the weights, and between saves.
        recipes: to be scored besides FP8's own: ("mxfp8", "nvfp4", "int8") shows what would be safe on another card.
        save_to: a file that what was seen is saved to, in the background.

    Example:
        >>> probe = Probe(model)
        >>> for batch in loader:
        ...     train_step(model, batch)
        ...     probe.step()
        >>> report = probe.evaluate()
    """

    _flops: int | None = None

    def count_flops(self, step: Callable[[], Any]) -> int:
        """Run one training step (forward and backward) and count the FLOPs of all its matrix products, not only the linears'.

        With this, `flops_share` is a share of the model; without, of the probed sites. Nothing is recorded meanwhile.
        """
        with self.paused(), FlopCounterMode(display=False) as counter:
            step()
        self._flops = int(counter.get_total_flops())
        return self._flops

    def evaluate(
        self,
        recipes: Sequence[str] | None = None,
        *,
        samples: int = 100,
        backends: Sequence[str | Engine] | None = None,
        max_error: float = MAX_ERROR,
        max_gradient_error: float = MAX_GRADIENT_ERROR,
        model_name: str | None = None,
        data_name: str | None = None,
        command: str | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        example: Any = None,
        **settings: Any,
    ) -> Report:
        """Measure every recipe on every GEMM of every site, and judge. `progress(site, done, total)` is called before each; without one a terminal shows a bar.

        `example` is an input of the model (a tuple is *args, a dict **kwargs) on which its chains are found; without one the inputs of some sampled calls are.
        `recipes` are names of `loka.dispatch.RECIPES`; by default tensorwise, rowwise, blockwise and those that the Probe was made with: only they are scored while the model
        trains, others are judged by their errors. `backends` are what a plan can choose from; without them those of the model's device (`choose_backends`).
        `settings` are further fields of `loka.probe.survey.Settings`: margin, sources, judged_on, min_speedup, weights, repeats, seconds, gate.
        """
        self.absorb()
        asked = Settings(
            recipes=(*DEFAULT_RECIPES, *self.recipes) if recipes is None else recipes,
            backends=choose_backends(device_of(self.model)) if backends is None else backends,
            samples=samples,
            max_error=max_error,
            max_gradient_error=max_gradient_error,
            **settings,
        )
        survey = Survey(asked, seed=self._seed)
        flops = self._flops_by_site()
        unseen = [watch.finish(self.sampled_steps) for watch in self._unseen]
        total = self._flops or sum(flops.values()) + sum(part.flops for part in unseen) or 1
        units = sum(bool(watch.gemms) and watch.kept is None for watch in self._watches.values())
        sites = []
        with telling(progress) as tell:
            for number, watch in enumerate(self._watches.values()):
                tell(watch.name, number, len(self._watches))
                sites.append(survey.visit(watch, min(flops[watch.name] / total, 1.0), units=units))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what the products took goes back to the device
        with self.paused():
            chains = find_chains(self.model, self._example, example, self._watches)
        record = ProbeReport(
            model=model_name or type(self.model).__name__,
            steps=self.steps,
            sampled_steps=self.sampled_steps,
            max_mere=max_error,
            max_gradient_error=max_gradient_error,
            flops_of=self._flops_of,
            rows=self.rows,
            formats=_describe_formats(sites),
            sites=sites,
            judged_on=list(asked.judged_on),
            data=data_name,
            margin=asked.margin,
            units=units,
            notes=list(self.notes),
            unseen=unseen,
            chains=chains.units,
            alone=chains.alone,
            no_chains=chains.reason,
            environment=environment_of(self.model, command),
        )
        return Report(record)

    @property
    def _flops_of(self) -> FlopsOf:
        return "sites" if self._flops is None else "model"

    def _flops_by_site(self) -> dict[str, float]:
        return {
            w.name: 2 * w.rows_seen * w.k * w.n * (3 if w.kept else len(w.gemms)) / max(w.steps, 1)
            for w in self._watches.values()
        }

    def drift(self, judge: Judge | None = None, **settings: Any) -> DriftReport:
        """What moved, when, and whether the verdict would change: by a judge of your own, or by an evaluation with these settings.

        Without a judge and without settings nothing is judged, only compared: that is cheap. See `loka.probe.drift`.
        """
        self.absorb()
        if judge is None and settings:
            judge = survey_judge(Settings(**settings), seed=self._seed)
        return find_drift(list(self._watches.values()), model=type(self.model).__name__, steps=self.steps, judge=judge)

    def _extra_counts(self) -> list[int]:
        return [self._flops or 0]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; refuses one of another set of sites."""
        super().load_state_dict(state)
        self._flops = int(state["counts"][2]) or None


def choose_backends(device: torch.device | str) -> tuple[str, ...]:
    """Emulation on a CPU, our own kernels on a GPU. Other people's run in this process only when named: a crash would take it along."""
    return ("torch", "triton") if torch.device(device).type == "cuda" else ("reference",)


def _describe_formats(sites: Sequence[Site]) -> list[FormatRange]:
    used = {Spec.parse(text).format for site in sites for c in site.candidates for text in (c.a, c.b)}
    return [
        FormatRange(name=f.name, max=f.max, smallest_normal=f.smallest_normal, smallest_subnormal=f.smallest_subnormal)
        for f in sorted(used, key=str)
    ]
