"""Whether the metric holds: units are swapped in on held-out batches, alone and together, and leave until all that is in is within the margin."""

import math
from collections.abc import Mapping

import torch

from loka.dispatch.choosing import Offer, part_of, split_unit
from loka.lowp.chain_handing import AnotherPathError
from loka.nn.wrapping import named_sites
from loka.probe.paired import Losses, spell_change
from loka.records import Interval
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import compare, converted, evaluate
from loka.tuning.evidence import digest
from loka.tuning.rehearsal import leave_chain

WORTH_LEAVING = 0.25  # of what is too much: below it many would leave for one that matters
RETRIES = 4  # linears that left for the sake of the metric and are tried again, the largest first


def swap(call: Call, selection: Selection, offers: list[Offer]) -> Interval:
    """The change of the metric with some units in low precision."""
    with converted(call.task.model, selection.to_plan(call, offers)):
        selection.swapped = evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
    return compare(selection.swapped, selection.base, call.metric)


def verify_metric(call: Call, selection: Selection) -> None:
    """Swap units in, alone and together; drop what costs most until the whole is within the margin."""
    alone, base, offers = selection.alone, selection.base, list(selection.offers)
    for index, offer in enumerate(offers):  # which may grow
        call.progress("verify the metric", index + 1, len(offers) + 1)
        key = f"alone {offer.way} {digest(offer.unit)} of {base.digest}"
        try:
            alone[offer.name] = call.evidence.get_interval(key) or call.evidence.put_interval(key, swap(call, selection, [offer]))  # fmt: skip
        except AnotherPathError as error:
            offers += leave_chain(call, selection, error)
    for offer in [*selection.offers]:
        if alone[offer.name].value == 0.0 and base.step == 0.0 and not _counts(call, selection, offer):
            selection.drop(offer, "swapped in, it changes no loss at all: its output does not reach what is measured, or is the same in FP8 (weights of zero, as those of an adapter before it has learned), so nothing shows what FP8 would do there")  # fmt: skip
    hold_margin(call, selection)


def _counts(call: Call, selection: Selection, offer: Offer) -> bool:
    """Whether a metric of the user's, which may count hits or errors and miss small changes, depends on a unit at all: turned around, its output changes it. A loss is smooth: what does not change it has no effect."""
    if call.metric is None:
        return False
    last = dict(named_sites(call.task.model))[offer.unit.linears[-1]]
    hook = last.register_forward_hook(lambda module, args, output: -1.0 - output)
    try:
        turned = evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
    finally:
        hook.remove()
    return not torch.equal(turned.values, selection.base.values)


def hold_margin(call: Call, selection: Selection, coarsest: float = math.inf) -> None:
    """Swap in what is left, together, and drop what costs most until it is within the margin.

    Args:
        call: whose margin it is.
        selection: what is in; `used`, `change` and `unresolved` are of what stays in.
        coarsest: a margin that an earlier measurement resolved; none coarser is used now.
    """
    origins = {name: offer for offer in selection.offers for name in offer.unit.linears}
    left: list[str] = []
    while selection.offers:
        try:
            together = selection.change = _swap_all(call, selection)
        except AnotherPathError as error:
            for part in leave_chain(call, selection, error):
                origins[part.name] = part
            continue
        if _judge(call, selection, together, coarsest):
            break
        exceeded = call.margin if together.value > call.margin else selection.used
        left.append(_drop_dearest(call, selection, max(together.high - selection.used, together.value - call.margin), exceeded))  # fmt: skip
    if not selection.offers:
        selection.change = None
    # they went one by one, by what was thought of each: with the last of them gone an earlier one may be affordable
    for name in sorted(left[:-1], key=lambda name: -selection.looked.sites[name].flops)[:RETRIES]:
        _try_again(call, selection, origins, name, coarsest)


def _judge(call: Call, selection: Selection, change: Interval, coarsest: float) -> bool:
    """Whether a change is within the margin that its interval resolves, which is noted with it."""
    selection.used = min(call.margin_for(change), coarsest)
    selection.unresolved = change if selection.used > call.margin else None
    return call.is_within(change, selection.used)


def _try_again(call: Call, selection: Selection, origins: Mapping[str, Offer], name: str, coarsest: float) -> None:
    """Put a linear that left back into its chain, beside all that is in, and keep it there if that is within the margin."""
    origin, before = origins[name], (selection.change, selection.swapped, selection.used, selection.unresolved)
    mine = [offer for offer in selection.offers if origins[offer.name] is origin]
    out = set(origin.unit.linears) - {name} - {linear for offer in mine for linear in offer.unit.linears}
    parts = [part_of(origin, unit, selection.looked, training=call.training) for unit in split_unit(origin.unit, out)] if out else [origin]  # fmt: skip
    try:
        together = swap(call, selection, [*(offer for offer in selection.offers if offer not in mine), *parts])
    except AnotherPathError:
        together = None
    if together is None or not _judge(call, selection, together, coarsest):
        selection.change, selection.swapped, selection.used, selection.unresolved = before
        return
    selection.change, swapped = together, selection.swapped
    selection.put_back(name, mine, parts)
    for part in parts:
        selection.alone[part.name] = swap(call, selection, [part])
    selection.swapped = swapped  # of all together


def _swap_all(call: Call, selection: Selection) -> Interval:
    """The change with all that is in together; before that, of each alone that is new."""
    for offer in selection.offers:
        if offer.name not in selection.alone:
            selection.alone[offer.name] = swap(call, selection, [offer])
    return swap(call, selection, selection.offers)


def _drop_dearest(call: Call, selection: Selection, excess: float, exceeded: float) -> str:
    """Drop the linear that costs most for the FLOPs it saves, of those that make a good part of what is too much, and name it; what is left of its chain stays in."""
    costs = {name: cost for offer in selection.offers for name, cost in _share_cost(selection, offer).items()}
    sites = selection.looked.sites
    enough = [name for name, cost in costs.items() if cost >= WORTH_LEAVING * excess]
    worst = max(enough or costs, key=lambda name: costs[name] / sites[name].flops if enough else costs[name])
    offer = next(offer for offer in selection.offers if worst in offer.unit.linears)
    what = "it" if len(offer.unit.links) == 1 else f"the chain {offer.name}, of which this costs most for its FLOPs,"
    why = f"swapped in, {what} moved the metric {spell_change(selection.alone[offer.name])}, and with all units together it changed by more than {exceeded:.3%}"  # fmt: skip
    selection.leave_out(worst, why, training=call.training)
    return worst


def _share_cost(selection: Selection, offer: Offer) -> dict[str, float]:
    """What an offer cost when it was swapped in alone, shared among its linears as their forward products are predicted to cost."""
    alone, sites = selection.alone[offer.name], [selection.looked.sites[name] for name in offer.unit.linears]
    harms = [max((h.value for (gemm, _), h in site.harm.items() if gemm == "fprop"), default=0.0) for site in sites]
    total = sum(harms)
    # one that cost nothing comes after all that did, the least certain first
    whole = alone.value if alone.value > 0 else 1e-6 * max(alone.high, 0.0)
    return {site.name: whole * (harm / total if total else 1 / len(sites)) for site, harm in zip(sites, harms, strict=True)}  # fmt: skip


def note_margin(call: Call, selection: Selection) -> None:
    """Say so where the data resolve a coarser margin only, of the units that are in at the end."""
    if (seen := selection.unresolved) is not None:
        call.notes.append(f"the held-out data resolve {seen.high - seen.value:.3%}, not the margin of {call.margin:.3%}: the upper end is judged at {selection.used:.1%}; {_say_finer(call, selection.base)}")  # fmt: skip


def _say_finer(call: Call, base: Losses) -> str:
    """What would resolve more."""
    if base.step <= call.margin or base.per_example:
        return "more batches resolve more"
    return f"the loss comes in a type whose steps are {base.step:.2%}: compute its mean in float32, or return one number per example"


def note_columns(call: Call, selection: Selection) -> None:
    """Name tasks whose own loss changes by more than the margin while the loss as a whole does not: a rare label is a small part of it."""
    found = {} if selection.swapped is None else selection.swapped.changed_columns(selection.base, selection.used)
    call.notes += [f"column {number} of the loss, {share:.1%} of it, changes {spell_change(change)}: more than {selection.used:.2%}, which holds for their mean; hint: metric= that returns the column that matters" for number, (share, change) in found.items()]  # fmt: skip
