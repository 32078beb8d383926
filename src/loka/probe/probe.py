"""Probe: observe every linear of a model while it trains, and report which of its GEMMs tolerate low precision.

    probe = loka.Probe(model)
    for batch in loader:
        train_step(model, batch)
        probe.step()
    report = probe.evaluate()

Each site is observed on one step in `every` (100 by default). Such a look collects statistics, learned distributions
and a few real rows of x, W and dy for all three GEMMs (`loka.probe.watch`), and scores what every recipe would do to
the loss (`loka.probe.score`). On the other steps a hook costs one `if`. Training is bit-identical with the probe
attached. Under torch.compile it is identical up to rounding, because a sampled step runs a second compiled graph
(`loka.probe.seeing`). `evaluate` then runs every candidate on the collected data (`loka.probe.survey`). Sites are
linears by default; `kinds` adds grouped, mixed and batched products and lookups (`loka.probe.adapter`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from loka.formats import Spec
from loka.kernels.compiling import run_overlapping
from loka.measure.device import device_of, environment_of
from loka.probe.chains import find_chains
from loka.probe.drift import Judge, find_drift, survey_judge
from loka.probe.engine import Engine
from loka.probe.judging import StepJudge
from loka.probe.observer import Observer
from loka.probe.progress import telling
from loka.probe.report import Report
from loka.probe.survey import DEFAULT_RECIPES, MAX_ERROR, MAX_GRADIENT_ERROR, Settings, Survey
from loka.records import DriftReport, FormatRange, ProbeReport, Site


class Probe(Observer):
    """Observes the sites of a model while it trains, and judges them. It changes no value and never raises in the loop.

    Args:
        model: any nn.Module, also one wrapped by DDP, torch.compile or TorchRec.
        every: observe each site once in this many steps.
        rows: rows sampled per look and kept per site.
        seed: seed for all sampling.
        module_filter_fn: (module, name) -> True if the module is to be observed.
        kinds: kinds of sites to observe, see `loka.probe.adapter`.
        memory_budget: bytes for the learned distributions of all sites.
        window: length in steps of a window of `drift`.
        stagger: number of groups of sites that are observed on different steps.
        snapshot_every: steps between snapshots of the weights, and between saves.
        recipes: recipes to score besides the FP8 ones: ("mxfp8", "nvfp4", "int8") shows what would be safe on other
            GPUs.
        save_to: file to which the state is saved in the background.

    Example:
        >>> probe = Probe(model)
        >>> for batch in loader:
        ...     train_step(model, batch)
        ...     probe.step()
        >>> report = probe.evaluate()
    """

    _flops: int | None = None

    def count_flops(self, step: Callable[[], Any]) -> int:
        """Run one training step (forward and backward) and count the FLOPs of all its matrix products.

        After this call, `flops_share` in a report is a share of the whole model; otherwise it is a share of the probed
        sites. The step itself is not recorded.
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
        """Measure every recipe on every GEMM of every site, and judge it.

        Args:
            recipes: names in `loka.dispatch.RECIPES`; by default tensorwise, rowwise, blockwise and the recipes passed
                to the Probe. Only these are scored during training; others are judged by the error of their products
                alone.
            samples: resamples or draws per interval.
            backends: the backends a plan may choose from; by default those for the model's device (`choose_backends`).
            max_error: largest error allowed in fprop (MERE).
            max_gradient_error: largest error allowed in dgrad and wgrad (relative L2).
            model_name, data_name, command: written to the report.
            progress: called as progress("kernels", done, total) while kernels are tested, then as progress(site, done,
                total) before each site; by default a terminal shows a progress bar.
            example: a model input (a tuple is *args, a dict **kwargs) used to find chains; by default the inputs of
                some sampled calls are used.
            settings: further fields of `loka.probe.survey.Settings`: margin, sources, judged_on, min_speedup, weights,
                repeats, seconds, gate.
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
        tasks = survey.kernel_tasks(self._watches.values())
        judge = StepJudge(self.model, self._example, example, meanwhile=tasks)
        with self.paused():
            chains = find_chains(self.model, self._example, example, self._watches)
            wrong_chains = judge.refuse_chains(chains.units) if asked.gate else {}
            wrong = judge.refuse_linears(self._watches, asked.recipes, asked.backends) if asked.gate else {}
        survey.refuse(wrong)
        flops = self._flops_by_site()
        unseen = [watch.finish(self.sampled_steps) for watch in self._unseen]
        total = self._flops or sum(flops.values()) + sum(part.flops for part in unseen) or 1
        units = sum(bool(watch.gemms) and watch.kept is None for watch in self._watches.values())
        sites = []
        with telling(progress) as tell:
            if tasks:
                tell("kernels", 0, len(tasks))
            for done, _ in enumerate(run_overlapping(tasks), 1):
                tell("kernels", done, len(tasks))
            for number, watch in enumerate(self._watches.values()):
                tell(watch.name, number, len(self._watches))
                sites.append(survey.visit(watch, min(flops[watch.name] / total, 1.0), units=units))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # release the memory used by the trial products
        record = ProbeReport(
            model=model_name or type(self.model).__name__,
            steps=self.steps,
            sampled_steps=self.sampled_steps,
            max_mere=max_error,
            max_gradient_error=max_gradient_error,
            flops_of="sites" if self._flops is None else "model",
            rows=self.rows,
            formats=_describe_formats(sites),
            sites=sites,
            judged_on=list(asked.judged_on),
            data=data_name,
            margin=asked.margin,
            units=units,
            notes=[*self.notes, *judge.notes],
            unseen=unseen,
            chains=chains.units,
            alone=chains.alone,
            no_chains=chains.reason,
            wrong_chains=wrong_chains,
            environment=environment_of(self.model, command),
        )
        return Report(record)

    def _flops_by_site(self) -> dict[str, float]:
        return {
            w.name: 2 * w.rows_seen * w.k * w.n * (3 if w.kept else len(w.gemms)) / max(w.steps, 1)
            for w in self._watches.values()
        }

    def drift(self, judge: Judge | None = None, **settings: Any) -> DriftReport:
        """Report which statistics moved, when, and whether the verdict would change. See `loka.probe.drift`.

        Verdicts come from `judge`, or from an evaluation with `settings`. With neither, windows are only compared,
        which is cheap.
        """
        self.absorb()
        if judge is None and settings:
            judge = survey_judge(Settings(**settings), seed=self._seed)
        return find_drift(list(self._watches.values()), model=type(self.model).__name__, steps=self.steps, judge=judge)

    def _extra_counts(self) -> list[int]:
        return [self._flops or 0]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved state. Raises ValueError if it belongs to a different set of sites."""
        super().load_state_dict(state)
        self._flops = int(state["counts"][2]) or None


def choose_backends(device: torch.device | str) -> tuple[str, ...]:
    """Return the default backends: emulation on a CPU, torch and Triton on a GPU.

    Third-party kernels run only when named explicitly, because a crash in one would take this process down.
    """
    return ("torch", "triton") if torch.device(device).type == "cuda" else ("reference",)


def _describe_formats(sites: Sequence[Site]) -> list[FormatRange]:
    used = {Spec.parse(text).format for site in sites for c in site.candidates for text in (c.a, c.b)}
    return [
        FormatRange(name=f.name, max=f.max, smallest_normal=f.smallest_normal, smallest_subnormal=f.smallest_subnormal)
        for f in sorted(used, key=str)
    ]
