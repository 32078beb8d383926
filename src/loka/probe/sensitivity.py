"""Sensitivity: the end metric with some sites in low precision and everything else unchanged.

The error of a product says how much noise a site adds; this measures how much of it reaches the metric. A forward hook
replaces the output of a linear with the product of its quantized operands plus the bias. No module is swapped, no
weight is changed, and the hook is always removed afterwards.

    each site alone        which sites matter
    all safe sites         what a plan would cost: noise adds up, and sometimes cancels

Both runs use the same weights and examples, so the comparison is paired and free of training noise: intervals of a few
hundredths of a percent are common.

    score(model) -> values, groups        one number per example in a fixed order, and the independent unit (user)

For a ranker, use the log loss: its relative change is also that of NE, which divides by a constant of the labels. For a
generative model, use recall. Any callable works; the change is (low precision - high) / high, whichever direction is
better.

Only fprop is replaced; gradients are not measured here. `loka.probe.swapping` does the same for anything that can be
switched on and off.

A measured change overrides the score: a site that alone may move the metric by more than its share of the margin is
unsafe.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from loka.dispatch import recipe_named
from loka.dispatch.choosing import HOPELESS
from loka.dispatch.margin import allow
from loka.kernels.scaled_mm import GemmWay
from loka.nn.wrapping import in_eval, named_sites
from loka.probe.engine import Engine
from loka.probe.paired import compare_losses
from loka.probe.report import Report
from loka.records import GemmVerdict, Interval, ProbeReport, Site

Scored = tuple[Tensor, Tensor | None]
Score = Callable[[nn.Module], Scored]
SiteRecipes = Mapping[str, str]


@contextmanager
def fake_quantized(model: nn.Module, recipes: SiteRecipes) -> Iterator[None]:
    """Run the named linears in low precision (forward) inside this context. `recipes` maps site to recipe name."""
    modules = dict(named_sites(model))
    engine = Engine.named("reference")
    with ExitStack() as stack:
        for site, recipe in recipes.items():
            module = modules.get(site)
            if not isinstance(module, nn.Linear):
                seen = "the model has no such module" if module is None else f"it is a {type(module).__name__}"
                raise ValueError(f"{site}: {seen}; only an nn.Linear can be fake-quantized")
            operands = recipe_named(recipe).fprop
            if operands is not None:
                handle = module.register_forward_hook(_make_hook(engine, operands), with_kwargs=True)
                stack.callback(handle.remove)
        yield


def _make_hook(engine: Engine, operands: GemmWay) -> Callable[..., Tensor]:
    def hook(module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x: Tensor = args[0] if args else kwargs["input"]
        rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
        qa = engine.quantize(rows, operands.a)
        qb = engine.quantize(module.weight.detach().contiguous(), operands.b)
        product = engine.multiply(qa, qb, operands).to(output.dtype)
        if module.bias is not None:
            product = product + module.bias
        return product.reshape(output.shape)

    return hook


def measure_sensitivity(
    model: nn.Module,
    sites: Sequence[str] | SiteRecipes,
    score: Score,
    *,
    recipe: str = "tensorwise",
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Interval]:
    """Measure the relative change of the mean metric with each site alone in low precision. The model is not changed.

    Args:
        model: any nn.Module.
        sites: names of linears, or a mapping from name to recipe.
        score: model -> (one number per example in a fixed order, group ids or None).
        recipe: the recipe if `sites` is not a mapping.
        seed: seed of the bootstrap.
        progress: called with (site, done, total).

    Returns:
        Site -> interval of (low precision - high) / high.

    Example:
        >>> measure_sensitivity(model, probe.sites, score, recipe="rowwise")["top.0"].high
    """
    recipes = dict(sites) if isinstance(sites, Mapping) else dict.fromkeys(sites, recipe)
    baseline = _score(model, score)
    found = {}
    for number, (site, chosen) in enumerate(recipes.items()):
        if progress is not None:
            progress(site, number, len(recipes))
        found[site] = _compare(model, {site: chosen}, score, baseline, seed)
    return found


def measure_together(model: nn.Module, recipes: SiteRecipes, score: Score, *, seed: int = 0) -> Interval:
    """Measure the relative change of the mean metric with all sites in low precision at once, with its 95 % interval.

    `recipes` maps site to recipe name; the other arguments are those of `measure_sensitivity`.
    """
    if not recipes:
        raise ValueError("no site to measure together")
    return _compare(model, recipes, score, _score(model, score), seed)


def recipes_of(report: Report, model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Return (best forward recipe of every linear, the same for safe ones only), by site name. See `Report.best`."""
    modules = dict(named_sites(model))
    best, safe = {}, {}
    for site in report.record.sites:
        candidate = report.best(site.name, "fprop")
        if candidate is None or not isinstance(modules.get(site.name), nn.Linear):
            continue
        best[site.name] = candidate.recipe
        if any(v.gemm == "fprop" and v.safety == "safe" for v in site.verdicts):
            safe[site.name] = candidate.recipe
    return best, safe


def add_sensitivity(
    report: Report,
    found: Mapping[str, Interval],
    *,
    described: str,
    recipes: SiteRecipes | None = None,
    together: Interval | None = None,
    together_sites: Sequence[str] = (),
) -> Report:
    """Add measured changes of the end metric to a report.

    A site whose change may exceed its share of the margin gets an unsafe forward verdict, with the reason.

    Args:
        report: the report of a Probe.
        found: the result of `measure_sensitivity`.
        described: the metric and the data, in words.
        recipes: the recipes that were measured, by site.
        together: the change with all safe sites at once.
        together_sites: the names of those sites.

    Returns:
        A new report.

    Example:
        >>> found = measure_sensitivity(model, probe.sites, score)
        >>> add_sensitivity(report, found, described="log loss of 8,192 examples")
    """
    recipes = recipes or {}
    sites = [
        _veto(
            msgspec.structs.replace(s, metric_change=found.get(s.name), metric_recipe=recipes.get(s.name)),
            report.record,
        )
        for s in report.record.sites
    ]
    return Report(
        msgspec.structs.replace(
            report.record,
            sites=sites,
            sensitivity=described,
            combined_change=together,
            combined_sites=list(together_sites) if together is not None else [],
        )
    )


def _veto(site: Site, record: ProbeReport) -> Site:
    """Correct a site's forward verdict by its measured change of the metric."""
    if site.metric_change is None:
        return site
    judged = allow(site.metric_change, margin=record.margin, units=max(record.units, 1))
    words = f"swapped in alone it changes the metric by {judged.text}"
    tried = [c for c in site.candidates if c.gemm == "fprop" and c.recipe == site.metric_recipe]
    decides = bool(tried) and all(c.harm is None or c.harm.value <= HOPELESS * record.margin for c in tried)

    def correct(verdict: GemmVerdict) -> GemmVerdict:
        if verdict.gemm != "fprop":
            return verdict
        if judged.within:
            rule = ", which decides in a plan" if verdict.safety == "unsafe" and decides else ""
            return msgspec.structs.replace(verdict, reason=f"{verdict.reason}; {words}{rule}")
        return msgspec.structs.replace(
            verdict, safety="unsafe", reason=f"vetoed by the measured change: {words}; {verdict.reason}"
        )

    return msgspec.structs.replace(site, verdicts=[correct(verdict) for verdict in site.verdicts])


def _compare(model: nn.Module, recipes: SiteRecipes, score: Score, baseline: Scored, seed: int) -> Interval:
    with fake_quantized(model, recipes):
        values, _ = _score(model, score)
    return compare_losses(values, *baseline, seed=seed)


@torch.no_grad()
def _score(model: nn.Module, score: Score) -> Scored:
    with in_eval(model):
        return score(model)
