"""Time every unit against compiled 16-bit code, or estimate it for another device, and drop those that are not faster.

Which ways are accurate enough to try is decided before, in `loka.dispatch.choosing`. Whether the metric holds is
measured afterwards, in `loka.tuning.metric`.
"""

import hashlib
from functools import partial

import torch
from torch import Tensor, nn

from loka.dispatch.choosing import Looked, Offer, take_apart
from loka.nn.wrapping import named_sites
from loka.placing import convert
from loka.records import Interval, UnitPlan
from loka.records.tuning import Estimate
from loka.tuning import timing
from loka.tuning.attempt import attempt, spell_error
from loka.tuning.call import Call, Selection
from loka.tuning.estimating import Estimator, Unit, combine_speedups, scale_rows
from loka.tuning.fragment import capture_fragment, make_fragment
from loka.units import place

ALONE = "rowwise"  # recipe for the linears of a chain if each runs by itself, as other FP8 libraries do
CLEARLY = 1.03  # a way must be this many times faster to replace another: differences below 3 % are noise


def choose_faster(call: Call, selection: Selection) -> None:
    """Drop units that are not faster than compiled 16-bit code, as measured here or estimated for another device."""
    if timing.can_time(call.task.device) is None:
        _time_units(call, selection)
    elif call.estimator is not None:
        _estimate_units(call, call.estimator, selection)


def _time_units(call: Call, selection: Selection) -> None:
    offers = selection.offers = sorted(selection.offers, key=lambda o: -o.flops_share)
    for index, offer in enumerate(offers):
        call.progress("time units", index + 1, len(offers))
        timed = attempt(partial(time_unit, call, offer, selection.looked))
        if isinstance(timed, Exception):  # for example a kernel that does not compile at this shape
            selection.drop(offer, f"{offer.way}: it fails when it is timed: {spell_error(timed)}")
            continue
        if timed is None:
            continue
        way = max(timed, key=lambda name, timed=timed: timed[name].value)  # type: ignore[misc]
        way = way if timed[way].value > CLEARLY * timed[offer.way].value else offer.way
        found, parts = timed[way], [offer]
        if way != offer.way:
            why = f"{found.value:.2f}x, where the chain {offer.name} is only {timed[offer.way].value:.2f}x"
            parts = take_apart(offer, way, selection.looked, why=why, training=call.training)
            selection.replace(offer, parts)
        selection.speeds.update(dict.fromkeys((o.name for o in parts), found))
        if found.low <= 1.0:
            for part in parts:
                selection.drop(part, f"{way}: {found:.2fx}, not faster than compiled 16-bit code")


def time_unit(call: Call, offer: Offer, looked: Looked) -> dict[str, Interval] | None:
    """Time a unit, cut out of the model, against compiled 16-bit code. Units of the same shape are timed once.

    Args:
        call: provides the budget and the evidence.
        offer: the unit.
        looked: observations of its linears.

    Returns:
        Speed-up by way: the offered one and, for a served chain, its linears each by itself (`ALONE`). None if the
        budget does not allow it.
    """
    rows = looked.sites[offer.unit.linears[0]].rows
    ways = [offer.way, *([ALONE] if offer.way == "chain" and not call.training else [])]
    keys = {way: spell_key(call.task.model, offer.unit, way, rows) for way in ways}
    known = {way: found for way, key in keys.items() if (found := call.evidence.get_interval(key)) is not None}
    late = call.left < call.budget * 0.4
    if len(known) == len(ways) or (late and offer.way in known):
        return known
    if late:
        call.notes.append(
            f"{offer.name} was not timed alone: the rest of the budget of {call.budget:g} s is kept for the whole step"
        )
        return None
    task = call.task
    plain, _ = make_fragment(task.model, offer.unit)
    first = next(plain.parameters())  # of the unit: the model's first may be a table of another dtype or device
    x = torch.randn(rows, offer.unit.links[0].k, device=first.device, dtype=task.autocast or first.dtype)
    parts = {"bf16": plain.train(call.training)} | {way: _lower_fragment(call, offer, way, x) for way in ways}
    runs = {
        name: capture_fragment(part, x, training=call.training, autocast=task.autocast) for name, part in parts.items()
    }
    times = timing.time_in_turns(runs)
    return {way: call.evidence.put_interval(key, timing.compare(times, way, "bf16")) for way, key in keys.items()}


def spell_key(model: nn.Module, unit: UnitPlan, way: str, rows: int) -> str:
    """Return the key under which a unit's time is cached: everything that decides which kernels run, on what sizes."""
    shape = " ".join(
        f"{link.k}x{link.n} {link.norm} {link.activation}{f' dropout {link.dropout:g}' if link.dropout else ''}"
        for link in unit.links
    )
    members = {name for link in unit.links for name in (link.linear, *link.passed)}
    # biases add work, and frozen weights need no gradient
    held = [
        (*p.shape, str(p.dtype), p.requires_grad)
        for name, module in named_sites(model)
        if name in members
        for p in module.parameters()
    ]
    scaled = f"{unit.scales} {unit.gradient}{' bounded' * unit.bounded_input}"
    return f"unit {way} {rows} {shape} {scaled} {hashlib.sha256(repr(held).encode()).hexdigest()[:16]}"


def _lower_fragment(call: Call, offer: Offer, way: str, x: Tensor) -> nn.Module:
    """Return a copy of the unit, cut out of the model and converted."""
    low, unit = make_fragment(call.task.model, offer.unit)
    low.train(call.training)
    if way != "chain":
        convert(low, recipe=way)
        return low
    chain = place(low, unit)
    if call.training:
        _warm_up_scales(call, low, x)
    else:
        low.requires_grad_(False)
        chain.freeze()
    return low


def _warm_up_scales(call: Call, model: nn.Module, x: Tensor) -> None:
    """Train two steps at a learning rate of 0, so that delayed scales are set before anything is compiled."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = x.detach().requires_grad_()  # so that backward works even if every parameter is frozen
    for _ in range(2):
        with call.task.context():
            model(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _estimate_units(call: Call, estimator: Estimator, selection: Selection) -> None:
    for offer in list(selection.offers):
        site = selection.looked.sites[offer.name]
        if offer.way == "chain":
            found: Interval | None = estimator.speedup(_unit_of(call, offer, selection.looked))
        else:
            rows = scale_rows(site.rows, call.row_factor)
            found = estimator.linear_speedup(rows, site.k, site.n, offer.way, training=call.training)
        if found is not None:
            selection.estimates[offer.name] = found
            if found.value <= 1.0:
                selection.drop(offer, f"{offer.way}: estimated {found:.2fx} on {estimator.target}")


def estimate(call: Call, selection: Selection) -> Estimate | None:
    """Estimate all linears together on the target device. Those that stay in 16-bit count on both sides."""
    found, looked, offers = call.estimator, selection.looked, selection.offers
    if found is None:
        return None
    taken, parts = {name for o in offers for name in o.unit.linears}, list[tuple[float, Interval | None]]()
    for name, site in looked.sites.items():
        if name not in taken:
            unit = Unit(scale_rows(site.rows, call.row_factor), ((site.k, site.n),), call.training)
            parts.append((site.calls * found.microseconds(unit)[0], None))
    for offer in offers:
        unit = _unit_of(call, offer, looked)
        speed = selection.estimates.get(offer.name) or found.speedup(unit)
        parts.append((looked.sites[offer.name].calls * found.microseconds(unit)[0], speed))
    total = combine_speedups(parts) if offers else None
    return Estimate(target=found.target, method=str(found), rows=call.row_factor, linears=total)


def _unit_of(call: Call, offer: Offer, looked: Looked) -> Unit:
    """Return the sizes of an offer, with the rows it would have on the target device."""
    rows = scale_rows(looked.sites[offer.name].rows, call.row_factor)
    return Unit(rows, tuple((link.k, link.n) for link in offer.unit.links), call.training)
