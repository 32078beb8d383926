"""Swap units in on held-out batches, alone and together, and drop linears until the metric is within the margin."""

import math
from collections.abc import Mapping

import torch

from loka.dispatch.choosing import Offer, part_of, split_unit
from loka.lowp.chain_handing import AnotherPathError
from loka.nn.wrapping import named_sites
from loka.placing import converted
from loka.probe.paired import Losses, spell_change
from loka.records import Interval
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import compare, evaluate
from loka.tuning.evidence import digest
from loka.tuning.rehearsal import replace_chain_by_linears

WORTH_LEAVING = 0.25  # share of the excess that a linear must cause to be dropped first, so that few are dropped
RETRIES = 4  # linears dropped for the metric that are tried again at the end, the largest first


def swap(call: Call, selection: Selection, offers: list[Offer]) -> Interval:
    """Measure the change of the metric by some units, compared with the same model in high precision.

    Args:
        call: provides the held-out batches and the metric.
        selection: provides the plan of a unit, and the losses in high precision.
        offers: the units that run in low precision.

    Returns:
        The relative change, with its 95 % interval.
    """
    return compare(_run(call, selection, offers), selection.base, call.metric)


def swap_all(call: Call, selection: Selection, offers: list[Offer]) -> Interval:
    """Measure the change of the metric by all that is applied, compared with the model that the user gave.

    Args:
        call: provides the held-out batches and the metric.
        selection: provides the plan of a unit, and the losses of the given model. Its `swapped` is set.
        offers: the units that run in low precision. The rewrites that tune applied count as well.

    Returns:
        The relative change, with its 95 % interval.
    """
    selection.swapped = _run(call, selection, offers)
    return compare(selection.swapped, selection.given, call.metric)


def _run(call: Call, selection: Selection, offers: list[Offer]) -> Losses:
    with converted(call.task.model, selection.to_plan(call, offers)):
        return evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)


def verify_metric(call: Call, selection: Selection) -> None:
    """Swap units in, alone and together, and drop the costliest until all together are within the margin."""
    alone, base, offers = selection.alone, selection.base, list(selection.offers)
    for index, offer in enumerate(offers):  # grows when a chain is taken apart
        call.progress("verify the metric", index + 1, len(offers) + 1)
        key = f"alone {offer.way} {digest(offer.unit)} of {base.digest}"
        try:
            known = call.evidence.get_interval(key)
            alone[offer.name] = known or call.evidence.put_interval(key, swap(call, selection, [offer]))
        except AnotherPathError as error:
            offers += replace_chain_by_linears(call, selection, error)
    for offer in [*selection.offers]:
        if alone[offer.name].value == 0.0 and base.step == 0.0 and not _depends_on(call, selection, offer):
            selection.drop(
                offer,
                (
                    "swapped in, it changes no loss at all, so nothing shows what FP8 would do there: "
                    "its output does not reach what is measured, or is the same in FP8 (zero weights, "
                    "as in an untrained adapter)"
                ),
            )
    hold_margin(call, selection)


def _depends_on(call: Call, selection: Selection, offer: Offer) -> bool:
    """Check whether the user's metric depends on a unit at all, by negating the unit's output.

    Such a metric may count hits or errors and miss small changes. A loss is smooth, so if it does not change with a
    unit, the unit has no effect.
    """
    if call.metric is None:
        return False
    last = dict(named_sites(call.task.model))[offer.unit.linears[-1]]
    hook = last.register_forward_hook(lambda module, args, output: -1.0 - output)
    try:
        negated = evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
    finally:
        hook.remove()
    return not torch.equal(negated.values, selection.base.values)


def hold_margin(call: Call, selection: Selection, coarsest: float = math.inf) -> None:
    """Swap in all offers together, and drop the costliest linear until the change is within the margin.

    Args:
        call: provides the margin.
        selection: its offers, `used`, `change` and `unresolved` are updated.
        coarsest: a margin that an earlier measurement could resolve; no coarser one is used now.
    """
    origins = {name: offer for offer in selection.offers for name in offer.unit.linears}
    left: list[str] = []
    while selection.offers:
        try:
            together = selection.change = _swap_all(call, selection)
        except AnotherPathError as error:
            for part in replace_chain_by_linears(call, selection, error):
                origins[part.name] = part
            continue
        if _judge(call, selection, together, coarsest):
            break
        exceeded = call.margin if together.value > call.margin else selection.used
        excess = max(together.high - selection.used, together.value - call.margin)
        left.append(_drop_costliest(call, selection, excess, exceeded))
    if not selection.offers:
        selection.change = None
    # linears were dropped one by one, on estimates; without the last of them, an earlier one may be affordable
    for name in sorted(left[:-1], key=lambda name: -selection.looked.sites[name].flops)[:RETRIES]:
        _try_again(call, selection, origins, name, coarsest)


def judge_rewrites(call: Call, selection: Selection) -> None:
    """Record how far the mods change the metric where they are all that is applied.

    Losses that are all the same show nothing: the metric may not see them, or they act in compiled code only.
    """
    if torch.equal(selection.base.values, selection.given.values):
        return
    selection.swapped, selection.change = selection.base, compare(selection.base, selection.given, call.metric)
    _judge(call, selection, selection.change, math.inf)


def _judge(call: Call, selection: Selection, change: Interval, coarsest: float) -> bool:
    """Check whether a change is within the margin that its interval can resolve, and set that margin."""
    selection.used = min(call.margin_for(change), coarsest)
    selection.unresolved = change if selection.used > call.margin else None
    return call.is_within(change, selection.used)


def _try_again(call: Call, selection: Selection, origins: Mapping[str, Offer], name: str, coarsest: float) -> None:
    """Put a dropped linear back into its chain, and keep it there if everything together is within the margin."""
    origin, before = origins[name], (selection.change, selection.swapped, selection.used, selection.unresolved)
    mine = [offer for offer in selection.offers if origins[offer.name] is origin]
    out = set(origin.unit.linears) - {name} - {linear for offer in mine for linear in offer.unit.linears}
    parts = [origin]
    if out:
        units = split_unit(origin.unit, out)
        parts = [part_of(origin, unit, selection.looked, training=call.training) for unit in units]
    try:
        together = swap_all(call, selection, [*(offer for offer in selection.offers if offer not in mine), *parts])
    except AnotherPathError:
        together = None
    if together is None or not _judge(call, selection, together, coarsest):
        selection.change, selection.swapped, selection.used, selection.unresolved = before
        return
    selection.change = together
    selection.put_back(name, mine, parts)
    for part in parts:
        selection.alone[part.name] = swap(call, selection, [part])


def _swap_all(call: Call, selection: Selection) -> Interval:
    """Measure the change of all offers together, and first of each new one alone."""
    for offer in selection.offers:
        if offer.name not in selection.alone:
            selection.alone[offer.name] = swap(call, selection, [offer])
    return swap_all(call, selection, selection.offers)


def _drop_costliest(call: Call, selection: Selection, excess: float, exceeded: float) -> str:
    """Drop one linear and return its name. The rest of its chain stays in.

    Of the linears that cause at least `WORTH_LEAVING` of the excess, it is the one that costs most for its FLOPs.
    """
    costs = {name: cost for offer in selection.offers for name, cost in _split_cost(selection, offer).items()}
    sites = selection.looked.sites
    enough = [name for name, cost in costs.items() if cost >= WORTH_LEAVING * excess]
    worst = max(enough or costs, key=lambda name: costs[name] / sites[name].flops if enough else costs[name])
    offer = next(offer for offer in selection.offers if worst in offer.unit.linears)
    what = "it" if len(offer.unit.links) == 1 else f"its chain {offer.name}"
    why = f"{what} alone moved the metric {spell_change(selection.alone[offer.name])}"
    if len(costs) == 1:
        why = f"swapped in, {why}, which is more than {exceeded:.3%}"
    else:
        why = f"all units together moved the metric by more than {exceeded:.3%}, and this linear costs most for its FLOPs; {why}"
    selection.leave_out(worst, why, training=call.training)
    return worst


def _split_cost(selection: Selection, offer: Offer) -> dict[str, float]:
    """Split the measured change of an offer among its linears, in proportion to their predicted forward changes."""
    alone, sites = selection.alone[offer.name], [selection.looked.sites[name] for name in offer.unit.linears]
    harms = [max((h.value for (gemm, _), h in site.harm.items() if gemm == "fprop"), default=0.0) for site in sites]
    total = sum(harms)
    # offers that cost nothing rank after all others, the least certain first
    whole = alone.value if alone.value > 0 else 1e-6 * max(alone.high, 0.0)
    shares = [harm / total if total else 1 / len(sites) for harm in harms]
    return {site.name: whole * share for site, share in zip(sites, shares, strict=True)}


def note_margin(call: Call, selection: Selection) -> None:
    """Add a note if the data cannot resolve the user's margin for the final selection."""
    if (seen := selection.unresolved) is not None:
        call.notes.append(
            f"the held-out data resolve changes of {seen.high - seen.value:.3%}, not the margin of {call.margin:.3%}: "
            f"the upper end of the change is judged at {selection.used:.1%}; "
            f"{_suggest_resolution(call, selection.base)}"
        )


def _suggest_resolution(call: Call, base: Losses) -> str:
    """Say how to resolve smaller changes."""
    if base.step <= call.margin or base.per_example:
        return "more batches resolve more"
    return f"the loss has a dtype with steps of {base.step:.2%}: compute its mean in float32, or return one value per example"


def note_columns(call: Call, selection: Selection) -> None:
    """Add a note for every task whose own loss changes by more than the margin while the mean of all does not."""
    found = {} if selection.swapped is None else selection.swapped.changed_columns(selection.given, selection.used)
    call.notes += [
        (
            f"column {number} of the loss, {share:.1%} of it, changes {spell_change(change)}, more than "
            f"{selection.used:.2%}, while the mean of all columns does not; hint: a metric= that returns the column that "
            "matters"
        )
        for number, (share, change) in found.items()
    ]
