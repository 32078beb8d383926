"""Quantize a trained model for serving: `loka.convert`, freeze, then drop the 16-bit weights.

    summary = loka.quantize(model)                                                rowwise; `onerec` for a OneRec model
    summary = loka.quantize(model, loka.Plan.load("plan.json"), batches=batches)  by a plan, including chains
    summary = loka.quantize(model, "rowwise", score=score, bound=0.002)           with a bound on the end metric
    print(summary);  loka.ptq.save(model, summary, "model.safetensors")

Recipes are those of `loka.dispatch.recipe`, of which serving runs only the forward GEMM. If a linear cannot run one,
`convert` reports why. Layers of experts have no low-precision backward and are therefore not part of a training plan;
they are quantized here in addition. Afterwards linears and experts hold only FP8 weights (`QuantizedLinear`,
`QuantizedExperts`); chains keep their 16-bit weights on the host.

With `score`, every candidate site is swapped in alone and measured on the end metric, paired on the same examples
(`loka.probe.swapping`). With a `bound`, a search selects the sites that save the most weight while their combined
effect, which is measured, stays within it (`loka.dispatch.budget`). With `widen`, sites that the mixture keeps out of
caution (heads, the context processor) are measured too, and quantized if that is safe.

    score(model) -> losses, groups      losses per example (lower is better) in a fixed order; independent groups or None
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from loka import mods
from loka.dispatch import Mixture, mixture_named
from loka.dispatch.recipe import choice_of
from loka.formats import QTensor, relative_l2
from loka.kernels.scaled_mm import GemmWay
from loka.lowp.auto import ROWS
from loka.lowp.binding import LinearBinding
from loka.measure.device import device_of
from loka.measure.kernel_calls import KernelCall
from loka.models.onerec import OneRec
from loka.nn import GroupedLinear
from loka.nn.wrapping import named_sites, plain_name, unwrap
from loka.placing.judging import Judge
from loka.placing.linears import ModuleFilter, candidates
from loka.ptq.chains import describe_chains, is_wide, tensors_of
from loka.ptq.deciding import Decided, Progress, Score, Trial, decide, measure
from loka.ptq.modules import QuantizedExperts, QuantizedLinear, Site
from loka.ptq.packing import Parts, find_packed, pack
from loka.records import Conversion, Interval, Plan, Quantized, QuantizedSite, SitePlan, capture_environment
from loka.records.prose import fold, name_some
from loka.units import Unknown
from loka.units import record as record_flow


@dataclass(frozen=True)
class Summary:
    """The result of `quantize`. Prints as a summary.

    Args:
        record: the record of what was quantized and how.

    Example:
        >>> loka.quantize(model, "rowwise").kept
    """

    record: Quantized

    @property
    def quantized(self) -> list[str]:
        """Names of the sites in low precision."""
        return [site.name for site in self.record.sites if site.weight is not None]

    @property
    def kept(self) -> dict[str, str]:
        """Sites that stay in 16-bit precision, with the reason."""
        return {site.name: site.reason for site in self.record.sites if site.weight is None}

    def __str__(self) -> str:
        r = self.record
        lines = [
            f"{len(self.quantized)} of {len(r.sites)} sites quantized by {'a plan' if r.plan else f'the recipe {r.recipe}'}; "
            f"{_spell_bytes(r.bytes_before)} in 16-bit -> {_spell_bytes(r.bytes_after)} ({r.ratio:.2f}x)"
        ]
        if r.change is not None:
            bound = "" if r.bound is None else f", bound {100 * r.bound:+.3g}%"
            lines.append(f"{r.metric}: {r.change:+.3%}{bound}")
        more = [f"kept {name}: {why}" for name, why in self.kept.items()] + [f"note: {note}" for note in r.notes]
        return "\n".join([*lines, *(line for text in more for line in fold(text, "  "))])


@torch.no_grad()
def quantize(
    model: nn.Module,
    recipe: str | Mixture | Plan = "auto",
    *,
    batches: Iterable[Any] = (),
    score: Score | None = None,
    bound: float | None = None,
    widen: bool = False,
    keep: str | Sequence[str] = (),
    module_filter_fn: ModuleFilter | None = None,
    backend: str | None = None,
    scales: Literal["dynamic", "static"] = "dynamic",
    metric: str = "loss",
    progress: Progress | None = None,
) -> Summary:
    """Quantize a trained model in place, for serving.

    Args:
        model: any nn.Module, wrapped or not. Afterwards it is in eval mode and has no gradients.
        recipe: a recipe's name (tensorwise, rowwise, blockwise, onerec, onerec_rows, onerec_mixed), a Mixture of your
            own, or a Plan. `auto` is onerec for a OneRec model, otherwise rowwise.
        batches: inputs of the model to calibrate static scales: those of chains without evidence, and those of
            `scales="static"`. The first one is also the example for a plan's mods, shows which weights the model reads
            without calling their linears (those stay in 16-bit precision; without batches such a read gets the values
            that 8 bits keep, computed at every reading), and on how many rows kernels are judged.
        score: (model) -> losses per example, and their groups or None. If given, every site is measured. Without
            batches, its inputs are those that kernels are judged on.
        bound: the largest accepted relative change of the mean loss; needs `score`.
        widen: also quantize sites that the mixture keeps out of caution, if that is safe; needs `score`.
        keep: name patterns of sites that stay in 16-bit precision; one may be given as it is.
        module_filter_fn: (module, name) -> whether the module may be quantized.
        backend: the backend of the GEMMs; None is `auto`, or what a plan names.
        scales: how inputs of linears are scaled: computed from every tensor ("dynamic"), or calibrated on `batches`
            ("static", one per tensor: the recipe tensorwise). A plan contains this itself.
        metric: the name of the score in the record.
        progress: called with (site, done, total).

    Returns:
        The summary, which prints as text. `.record` is the record to save.

    Raises:
        ValueError: the request is not supported, or a plan runs a kernel that fails the conformance gate; the model is
            left unchanged. By a recipe, a site with such a kernel stays in 16-bit precision, with the reason.

    Example:
        >>> print(loka.quantize(model, "rowwise", keep=("head.*",)))
        11 of 12 sites quantized by the recipe rowwise; 8.4 MB in 16-bit -> 4.4 MB (0.52x)
    """
    inner, held = unwrap(model), list(batches)
    keep = (keep,) if isinstance(keep, str) else keep
    _check(inner, recipe, score, bound, widen, keep, module_filter_fn)
    _check_scales(recipe, scales, held)
    found, before = dict(candidates(inner)), size_in_bytes(inner, 2)
    read = _find_read(inner, held)
    shown: Any = held[0] if held else None if score is None else partial(score, inner)
    judge, find = Judge(device_of(inner)), partial(find_packed, inner, shown, held[:1], backend, read)
    if isinstance(recipe, Plan):
        decided, parts = Decided(recipe.recipe, reasons=dict(read)), Parts(recipe, {})
        if shown is not None:
            _refuse_wrong(recipe, judge, find)
    else:
        decided = decide(inner, found, _find_mixture(inner, recipe), keep, module_filter_fn, read)
        split = partial(_split, inner, found, decided.recipe, scales)
        if shown is not None:
            tried = decided.operands | (decided.cautious if widen else {})
            decided.leave_out(judge.refuse(tried, lambda some: find(split({n: tried[n] for n in some})), failing=False))
        if score is not None:
            measure(inner, found, decided, Trial(score, bound, widen, backend or "auto", progress))
        parts = split(decided.operands)
    with ExitStack() as undo:
        made = pack(inner, parts, held, backend, read, undo)
        undo.pop_all()
    done, running, found = made.done, made.running, made.found
    if shown is None and device_of(inner).type == "cuda":  # elsewhere references run
        judge.notes.append("kernels were not judged: how many rows they run on is not known; hint: batches=[...]")
    _explain(decided.reasons, found, done)
    now = dict(named_sites(inner))
    record = Quantized(
        model=type(inner).__name__,
        recipe=decided.recipe,
        sites=[
            _describe(n, m, now[n], running.get(n), decided.reasons.get(n, "not in the plan"), decided.alone.get(n))
            for n, m in found.items()
        ],
        bytes_before=before,
        bytes_after=size_in_bytes(inner, 2),
        environment=capture_environment(),
        metric=None if score is None else metric,
        bound=bound,
        change=decided.together,
        notes=list(dict.fromkeys([*judge.notes, *decided.notes, *([] if done is None else done.notes)])),
        plan=done.plan if isinstance(recipe, Plan) and done is not None else None,
        mods=list(mods.applied_to(inner)),
        units=describe_chains(inner),
    )
    return Summary(record)


def _check(
    model: nn.Module,
    recipe: Any,
    score: Score | None,
    bound: float | None,
    widen: bool,
    keep: Sequence[str],
    allowed: ModuleFilter | None,
) -> None:
    if isinstance(model, Site):
        raise ValueError("the model is itself a linear and cannot be swapped in place; wrap it in nn.Sequential")
    done = [n for n, m in model.named_modules() if isinstance(m, QuantizedLinear | QuantizedExperts)]
    if done:
        raise ValueError(f"already quantized: {name_some(done)}; quantize the original, or load it again")
    if not any(True for _ in candidates(model)):
        raise ValueError(f"{type(model).__name__} has no nn.Linear and no GroupedLinear: nothing to quantize")
    if isinstance(recipe, Plan) and (score is not None or widen or keep or allowed is not None):
        raise ValueError(
            "a plan already says which sites run how; hint: leave score, widen, keep and module_filter_fn out"
        )
    if (bound is not None or widen) and score is None:
        raise ValueError("a bound, or widening beyond the recipe, needs a score to measure: give score=")
    if bound is not None and not bound > 0:
        raise ValueError(f"bound={bound}: expected the largest accepted relative change, above 0, e.g. 0.002")


def _spell_bytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB"


def _find_mixture(model: nn.Module, recipe: str | Mixture | Plan) -> Mixture:
    if recipe == "auto":
        recipe = "onerec" if isinstance(model, OneRec) else "rowwise"
    if not isinstance(recipe, str | Mixture):
        raise ValueError(f"recipe: expected a name, a Mixture or a Plan, got {type(recipe).__name__}")
    return mixture_named(recipe) if isinstance(recipe, str) else recipe


def _check_scales(recipe: Any, scales: str, held: Sequence[Any]) -> None:
    if isinstance(recipe, Plan) and scales != "dynamic":
        raise ValueError("a plan already says where scales come from; hint: leave scales= out")
    if scales == "static" and not held:
        raise ValueError(
            'scales="static" are fixed by batches, and none were given; hint: batches=[...], inputs of the model'
        )


def _refuse_wrong(plan: Plan, judge: Judge, find: Callable[[Parts], list[KernelCall]]) -> None:
    """Raise ValueError if units or sites of a plan run kernels that fail the conformance gate."""
    names = {unit.name for unit in plan.units} | {site.site for site in plan.sites if site.quantized}
    if wrong := judge.refuse(names, lambda some: find(Parts(_restrict(plan, some), {})), failing=False):
        told = "\n  ".join(f"{unit}: {why}" for unit, why in wrong.items())
        raise ValueError(f"the plan runs kernels that are wrong here; nothing was changed:\n  {told}")


def _restrict(plan: Plan, names: Collection[str]) -> Plan:
    """Return a plan with only the named units and sites in low precision."""
    sites = [site for site in plan.sites if site.site in names or not site.quantized]
    return msgspec.structs.replace(plan, sites=sites, units=[unit for unit in plan.units if unit.name in names])


def _split(model: nn.Module, found: Mapping[str, Site], recipe: str, scales: str, ways: Mapping[str, GemmWay]) -> Parts:
    """Return how sites are placed: a plan for `convert` with the linears among them, and the experts."""
    experts = {name: way for name, way in ways.items() if isinstance(found[name], GroupedLinear)}
    return Parts(_plan_of(model, found, ways, recipe, scales), experts)


def _plan_of(
    model: nn.Module, found: Mapping[str, Site], ways: Mapping[str, GemmWay], recipe: str, scales: str
) -> Plan | None:
    """Return a plan for `convert` with the linears among the choices; None if there are none."""
    linears = {}
    for name, way in ways.items():
        gemm = LinearBinding(way).with_scales(scales).fprop
        if gemm is not None and isinstance(found[name], nn.Linear):
            linears[name] = gemm
    # not through `weight` for a linear: reading a parametrized weight may change it
    total = sum(
        m.in_features * m.out_features if isinstance(m, nn.Linear) else m.weight.numel() for m in found.values()
    )
    return None if not linears else Plan(
        model=type(model).__name__,
        recipe=recipe,
        target=None,
        max_error=1.0,
        max_gradient_error=1.0,
        min_speedup=None,
        flops_of="model",
        sites=[
            SitePlan(
                site=name, m=ROWS, k=found[name].weight.shape[1], n=found[name].weight.shape[0],
                flops_share=found[name].weight.numel() / total,
                choices=[choice_of("fprop", way, recipe)],
            )
            for name, way in linears.items()
        ],
        environment=capture_environment(),
    )  # fmt: skip


def _find_read(model: nn.Module, held: Sequence[Any]) -> dict[str, str]:
    """Return the linears whose weight the model reads besides calling them, with the reason to keep it."""
    flow = record_flow(model, held[0], training=False) if held else Unknown("no batch")
    if isinstance(flow, Unknown):
        return {}
    names = [
        plain_name(name).removesuffix(".weight") for name in sorted(flow.outside_reads) if name.endswith(".weight")
    ]
    sites = dict(candidates(model))
    return {
        name: "its weight is read elsewhere too, where 8-bit values would be wrong" for name in names if name in sites
    }


def _explain(reasons: dict[str, str], found: dict[str, Site], done: Conversion | None) -> None:
    """Add the reasons that `convert` gives for sites that no recipe decided on."""
    if done is None:
        return
    for name in found:
        why = done.kept.get(name) or done.converted.get(name)
        if why is not None:
            reasons.setdefault(name, why)


def _describe(
    name: str, old: Site, new: nn.Module, running: GemmWay | None, reason: str, change: Interval | None
) -> QuantizedSite:
    packed = new if isinstance(new, QuantizedLinear | QuantizedExperts) else None
    operands = running if packed is None else packed.bound
    if operands is None and reason.startswith("in chain "):
        operands = GemmWay.parse("e4m3:tensor@e4m3:tensor")
    error = None
    if packed is not None and old.weight.device.type != "meta":
        error = _weight_error(old.weight, packed.qweight)
    return QuantizedSite(
        name=name,
        type=type(old).__name__,
        shape=list(old.weight.shape),
        activation=None if operands is None else str(operands.a),
        weight=None if operands is None else str(operands.b),
        fast_accum=operands is not None and operands.fast_accum,
        reason=reason,
        weight_error=error,
        metric_change=change,
    )


def _weight_error(weight: torch.Tensor, q: QTensor) -> float:
    """Return the relative L2 error of the quantized weight; for experts, of the first one."""
    one = q if q.data.dim() == 2 else QTensor(q.data[0], q.scale[0], q.spec)
    return relative_l2(one.dequantize(), weight.detach() if weight.dim() == 2 else weight[0].detach())


def size_in_bytes(model: nn.Module, wide: int | None = None) -> int:
    """Return the size of the checkpoint that `save` would write.

    Args:
        model: quantized or not.
        wide: bytes to count per element of floats wider than one byte, except scales; None counts their actual size.

    Returns:
        The number of bytes of all tensors.

    Example:
        >>> size_in_bytes(model, wide=2)  # as a 16-bit checkpoint
        8388608
    """
    return sum(
        tensor.numel() * (wide if wide is not None and is_wide(name, tensor) else tensor.element_size())
        for name, tensor in tensors_of(model).items()
    )
