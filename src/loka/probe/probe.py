"""Probe: look at every linear of a model while it trains, and say which of its GEMMs would survive low precision.

    probe = loka.Probe(model)
    for batch in loader:
        train_step(model, batch)
        probe.step()
    report = probe.evaluate()

Every `every`-th step is sampled: hooks take statistics and a few real rows of each linear's x, W and dy (`loka.probe.watch`). On the
other steps a hook is one `if`. Training is bit-identical with the probe attached. `evaluate` then runs every candidate on the kept
rows (`loka.probe.evaluate`). With torch.compile, run sampled steps eagerly (`probe.sampling` says which; torch.compiler.set_stance("force_eager")
does it): the graph compiled for the other steps has no statistics in it, and is not compiled again.

What it does not do: watch embeddings or bare matmuls (only `nn.Linear`), or measure time (see `loka.measure`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from loka.formats import Spec
from loka.probe.engine import Engine
from loka.probe.report import Report
from loka.probe.survey import DEFAULT_RECIPES, MAX_ERROR, MAX_GRADIENT_ERROR, Settings, Survey
from loka.probe.watch import Watch
from loka.records import FlopsOf, FormatRange, ProbeReport, Site, capture_environment

ModuleFilter = Callable[[nn.Module, str], bool]


class Probe:
    """Watches the linears of a model. `module_filter_fn(module, name)` chooses which."""

    def __init__(
        self,
        model: nn.Module,
        module_filter_fn: ModuleFilter | None = None,
        *,
        every: int = 100,
        rows: int = 1024,
        seed: int = 0,
    ) -> None:
        if every < 1 or rows < 2:
            raise ValueError(f"every={every}, rows={rows}: expected at least 1 and 2")
        self.model, self.every, self.rows = model, every, rows
        self.steps = self.sampled_steps = 0
        self._seed = seed
        self._flops: int | None = None
        generator = torch.Generator().manual_seed(seed)
        self._watches = {
            name: Watch(name, module, rows, generator)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and (module_filter_fn is None or module_filter_fn(module, name))
        }
        if not self._watches:
            raise ValueError("nothing to probe: the model has no nn.Linear that module_filter_fn lets through")
        self._weights_seen: set[str] = set()
        # A plain bool, not a condition on the step's number: torch.compile guards on what a hook reads, and would compile every step anew.
        self._active = True
        self._handles = [
            watch.module.register_forward_hook(self._hook_for(watch), with_kwargs=True)
            for watch in self._watches.values()
        ]

    @property
    def sampling(self) -> bool:
        """Whether the step now running is sampled."""
        return self._active

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the watched modules."""
        return tuple(self._watches)

    def _hook_for(self, watch: Watch) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if not self._active or not torch.is_grad_enabled():
                return
            x = args[0] if args else kwargs["input"]
            watch.see_forward(x, output, record_weight=watch.name not in self._weights_seen)
            self._weights_seen.add(watch.name)

        return hook

    def step(self) -> None:
        """Say that a training step is over."""
        if self._weights_seen:
            self.sampled_steps += 1
            self._weights_seen.clear()
        self.steps += 1
        self._active = bool(self._handles) and self.steps % self.every == 0

    def detach(self) -> None:
        """Remove every hook; what was seen stays."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._active = [], False

    def count_flops(self, step: Callable[[], Any]) -> int:
        """Run one training step (forward and backward) and count the FLOPs of all its matrix products, not only the linears'.

        With this, `flops_share` is a share of the model; without, of the probed sites. Nothing is recorded meanwhile.
        """
        active, self._active = self._active, False
        try:
            with FlopCounterMode(display=False) as counter:
                step()
        finally:
            self._active = active
        self._flops = int(counter.get_total_flops())
        return self._flops

    def evaluate(
        self,
        recipes: Sequence[str] = DEFAULT_RECIPES,
        *,
        samples: int = 100,
        backends: Sequence[str | Engine] = ("reference",),
        max_error: float = MAX_ERROR,
        max_gradient_error: float = MAX_GRADIENT_ERROR,
        model_name: str | None = None,
        data_name: str | None = None,
        command: str | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **settings: Any,
    ) -> Report:
        """Measure every recipe on every GEMM of every site, and judge. `progress(site, done, total)` is called before each.

        `settings` are further fields of `loka.probe.survey.Settings`: sources, judged_on, min_speedup, weights, repeats, seconds, gate.
        """
        asked = Settings(
            recipes=recipes,
            backends=backends,
            samples=samples,
            max_error=max_error,
            max_gradient_error=max_gradient_error,
            **settings,
        )
        survey = Survey(asked, seed=self._seed)
        flops = self._flops_by_site()
        total = self._flops or sum(flops.values()) or 1
        sites = []
        for number, watch in enumerate(self._watches.values()):
            if progress is not None:
                progress(watch.name, number, len(self._watches))
            sites.append(survey.visit(watch, min(flops[watch.name] / total, 1.0)))
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
            environment=capture_environment(
                command=command, device=_name_device(self.model), threads=torch.get_num_threads()
            ),
        )
        return Report(record)

    @property
    def _flops_of(self) -> FlopsOf:
        return "sites" if self._flops is None else "model"

    def _flops_by_site(self) -> dict[str, float]:
        steps = max(self.sampled_steps, 1)
        return {w.name: 2 * w.rows_seen * w.k * w.n * len(w.gemms) / steps for w in self._watches.values()}

    def state_dict(self) -> dict[str, Tensor]:
        """What was seen, as flat named tensors (safetensors can write them)."""
        counts = torch.tensor([self.steps, self.sampled_steps, self._flops or 0])
        state = {f"{name}:{key}": value for name, w in self._watches.items() for key, value in w.state_dict().items()}
        return {**state, "counts": counts}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a saved state; refuses one of another set of sites."""
        names = {key.rpartition(":")[0] for key in state if key != "counts"}
        if names != set(self._watches):
            raise ValueError(
                f"the state holds other sites: only there {sorted(names - set(self._watches))[:5]}, "
                f"only here {sorted(set(self._watches) - names)[:5]}"
            )
        self.steps, self.sampled_steps, flops = state["counts"].tolist()
        self._flops = flops or None
        self._active = bool(self._handles) and self.steps % self.every == 0
        for name, watch in self._watches.items():
            watch.load_state_dict({k.rpartition(":")[2]: v for k, v in state.items() if k.rpartition(":")[0] == name})


def _describe_formats(sites: Sequence[Site]) -> list[FormatRange]:
    used = {Spec.parse(text).format for site in sites for c in site.candidates for text in (c.a, c.b)}
    return [
        FormatRange(name=f.name, max=f.max, smallest_normal=f.smallest_normal, smallest_subnormal=f.smallest_subnormal)
        for f in sorted(used, key=str)
    ]


def _name_device(model: nn.Module) -> str:
    device = next(model.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
