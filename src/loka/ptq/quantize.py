"""Quantise a trained model in place: E4M3 weights and activations where the recipe says so and the end metric allows it.

    summary = loka.quantize(model, recipe="onerec")                                   by the recipe alone
    summary = loka.quantize(model, recipe="onerec", score=score, bound=0.002)         under a bound on the end metric
    print(summary);  loka.ptq.save(model, summary, "model.safetensors")

With `score` every candidate site is quantised alone and measured on the end metric, paired on the same examples. Then all of them are quantised
together, and as long as the upper end of the interval of the whole model is beyond `bound`, the sites that hurt most go back to 16 bits. With
`widen` the sites that the recipe keeps out of caution are measured too, and those that are safe join, so that heads and context processor stay in
16 bits unless the measurement says they need not.

    score(model) -> losses, groups      per-example losses (lower is better) in a fixed order, and the unit of independence or None
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from loka.dispatch import Operands
from loka.formats import QTensor, relative_l2
from loka.nn import GroupedLinear
from loka.ptq.modules import QuantizedExperts, QuantizedLinear, Site, quantize_module, sites, swap
from loka.ptq.recipe import BLOCKWISE, ROWWISE, PtqRecipe, ptq_recipe
from loka.ptq.sensitivity import Score, choose, measure_sites
from loka.records import Interval, Quantized, QuantizedSite, capture_environment

ModuleFilter = Callable[[nn.Module, str], bool]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Summary:
    """What was done; `record` is what is written down."""

    record: Quantized

    @property
    def quantized(self) -> list[str]:
        """Names of the sites in low precision."""
        return [site.name for site in self.record.sites if site.weight is not None]

    @property
    def kept(self) -> dict[str, str]:
        """Sites in 16 bits, and why."""
        return {site.name: site.reason for site in self.record.sites if site.weight is None}

    def __str__(self) -> str:
        r = self.record
        lines = [
            f"{len(self.quantized)} of {len(r.sites)} sites quantised by {r.recipe!r}; "
            f"{r.bytes_before / 1e6:,.1f} MB in 16 bits -> {r.bytes_after / 1e6:,.1f} MB ({r.ratio:.2f}x)"
        ]
        if r.change is not None:
            bound = "" if r.bound is None else f", bound {100 * r.bound:+.3g} %"
            c = r.change
            lines.append(f"{r.metric}: {100 * c.value:+.3f} % [{100 * c.low:+.3f}, {100 * c.high:+.3f}]{bound}")
        lines += [f"  kept {name}: {why}" for name, why in self.kept.items()]
        return "\n".join(lines)


@torch.no_grad()
def quantize(
    model: nn.Module,
    recipe: str | PtqRecipe = "onerec",
    *,
    score: Score | None = None,
    bound: float | None = None,
    widen: bool = False,
    keep: Sequence[str] = (),
    module_filter_fn: ModuleFilter | None = None,
    backend: str = "auto",
    metric: str = "loss",
    progress: Progress | None = None,
) -> Summary:
    """Quantise the sites of a model in place and say what was done. `keep` are patterns of names that stay in 16 bits."""
    chosen = ptq_recipe(recipe) if isinstance(recipe, str) else recipe
    _check(model, score, bound, widen)
    found = dict(sites(model))
    before = size_in_bytes(model, 2)
    plans, reasons, cautious = _decide(found, chosen, keep, module_filter_fn)
    changes: dict[str, Interval] = {}
    total = None
    if score is not None:
        tried = plans | (cautious if widen else {})
        modules = {name: quantize_module(found[name], operands, backend=backend) for name, operands in tried.items()}
        changes = measure_sites(model, modules, score, progress=progress)
        picked, total = choose(model, modules, changes, score, cautious=set(cautious), bound=bound, progress=progress)
        for name in tried:
            reasons[name] = _say(changes[name], bound, name in picked)
        plans = {name: tried[name] for name in picked}
        swap(model, {name: modules[name] for name in picked})
    else:
        swap(model, {name: quantize_module(found[name], o, backend=backend) for name, o in plans.items()})
    after = dict(model.named_modules())
    record = Quantized(
        model=type(model).__name__,
        recipe=chosen.name,
        sites=[_describe(name, m, after[name], reasons[name], changes.get(name)) for name, m in found.items()],
        bytes_before=before,
        bytes_after=size_in_bytes(model, 2),
        environment=capture_environment(),
        metric=None if score is None else metric,
        bound=bound,
        change=total,
    )
    return Summary(record)


def _check(model: nn.Module, score: Score | None, bound: float | None, widen: bool) -> None:
    if isinstance(model, Site):
        raise ValueError("the model is itself a linear and cannot be swapped in place; wrap it in nn.Sequential")
    done = [n for n, m in model.named_modules() if isinstance(m, QuantizedLinear | QuantizedExperts)]
    if done:
        raise ValueError(f"already quantised: {', '.join(done[:5])}; quantise the original, or load it again")
    if not any(True for _ in sites(model)):
        raise ValueError(f"{type(model).__name__} has no nn.Linear and no GroupedLinear: nothing to quantise")
    if (bound is not None or widen) and score is None:
        raise ValueError("a bound, or widening beyond the recipe, needs a score to measure: give score=")
    if bound is not None and not bound > 0:
        raise ValueError(f"bound={bound}: expected the largest accepted relative change, above 0, e.g. 0.002")


def _decide(
    found: dict[str, Site], recipe: PtqRecipe, keep: Sequence[str], allowed: ModuleFilter | None
) -> tuple[dict[str, Operands], dict[str, str], dict[str, Operands]]:
    """What is quantised how, every site's reason, and how those that the recipe keeps would be."""
    plans: dict[str, Operands] = {}
    reasons: dict[str, str] = {}
    cautious: dict[str, Operands] = {}
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in found):
            raise ValueError(f"keep={pattern!r} matches no site; sites are {', '.join(list(found)[:8])}, ...")
    for name, module in found.items():
        rule = recipe.decide(name, module)
        asked = next((pattern for pattern in keep if fnmatchcase(name, pattern)), None)
        if asked is not None:
            reasons[name] = f"asked for by keep={asked!r}"
        elif allowed is not None and not allowed(module, name):
            reasons[name] = "module_filter_fn"
        elif rule.operands is None:
            reasons[name] = rule.reason
            cautious[name] = BLOCKWISE if isinstance(module, GroupedLinear) else ROWWISE
        else:
            plans[name], reasons[name] = rule.operands, rule.reason
    return plans, reasons, cautious


def _say(change: Interval, bound: float | None, picked: bool) -> str:
    ends = f"{100 * change.value:+.3f} % [{100 * change.low:+.3f}, {100 * change.high:+.3f}] alone"
    if picked:
        return f"measured: {ends}"
    return f"kept: {ends}" + ("" if bound is None else f", and the whole model must stay within {100 * bound:.3g} %")


def _describe(name: str, old: Site, new: nn.Module, reason: str, change: Interval | None) -> QuantizedSite:
    low = new if isinstance(new, QuantizedLinear | QuantizedExperts) else None
    return QuantizedSite(
        name=name,
        type=type(old).__name__,
        shape=list(old.weight.shape),
        activation=None if low is None else str(low.activation),
        weight=None if low is None else str(low.weight_spec),
        reason=reason,
        weight_error=None
        if low is None or old.weight.device.type == "meta"
        else _weight_error(old.weight, low.qweight),
        metric_change=change,
    )


def _weight_error(weight: torch.Tensor, q: QTensor) -> float:
    """Relative L2 of the rounding; of the first expert where there are many."""
    one = q if q.data.dim() == 2 else QTensor(q.data[0], q.scale[0], q.spec)
    return relative_l2(one.dequantize(), weight.detach() if weight.dim() == 2 else weight[0].detach())


def size_in_bytes(model: nn.Module, wide: int | None = None) -> int:
    """Bytes of the checkpoint; with `wide`, every floating tensor above one byte counts that many bytes an element.

    Scales are float32 and stay so.
    """
    total = 0
    for name, tensor in model.state_dict().items():
        size = tensor.element_size()
        narrow = tensor.is_floating_point() and size > 1 and not name.endswith("weight_scale")
        total += tensor.numel() * (wide if wide is not None and narrow else size)
    return total
