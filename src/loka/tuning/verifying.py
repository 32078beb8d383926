"""Whether what was chosen holds: the metric with the units swapped in, alone and together; after a little training; the time of the whole step. Units are dropped until all of it holds."""

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from loka.dispatch.choosing import Offer, part_of, split_unit, take_apart
from loka.lowp.chain_handing import AnotherPathError
from loka.nn.wrapping import named_sites
from loka.placing import freeze_model
from loka.probe.paired import Losses, spell_change
from loka.records import CollectivePlan, Interval, TablePlan
from loka.tuning import choosing, timing
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import compare, converted, evaluate, train_paired
from loka.tuning.evidence import digest
from loka.tuning.tables import choose_collectives, choose_tables, rounded_weights, unrounded
from loka.units.undisturbed import gradients_aside, put_back, undisturbed

WORTH_LEAVING = 0.25  # of what is too much: below it many would leave for one that matters
RETRIES = 4  # linears that left for the sake of the metric and are tried again, the largest first
CLEAR = 1.1  # times as fast as 16 bits by itself: below it a unit may cost its neighbours more than it gains
SLOWER = "FP8 was not faster than compiled 16 bits as a whole step"
NOISE = 1.01  # ratios of one run that differ by less do not differ
LAYOUT = "bf16 layout"  # runs of the model in 16 bits with its mods
_TWICE = "differentiate twice"  # what autograd says of a function that has one derivative


@dataclass(frozen=True)
class StepTimes:
    """The whole step, as it was timed.

    Args:
        medians: microseconds by run.
        host: what the host takes to launch each.
        speedup: of what is converted over the original.
        note: why there is none.
        compile_note: how to compile for it, where that is not the default.
        host_note: what becomes of it where steps are launched kernel by kernel, if that is much.
    """

    medians: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    speedup: Interval | None = None
    note: str | None = None
    compile_note: str | None = None
    host_note: str | None = None


def swap(call: Call, selection: Selection, offers: list[Offer]) -> Interval:
    """The change of the metric with some units in low precision."""
    with converted(call.task.model, selection.to_plan(call, offers)):
        selection.swapped = evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
    return compare(selection.swapped, selection.base, call.metric)


def rehearse(call: Call, selection: Selection) -> None:
    """Train a step with everything in, and keep nothing of it. A chain that is called from its middle in backward, where a checkpoint computes a part of it again, is taken apart; a unit that fails is left out, with what it said."""
    while selection.offers:
        error = _fail(call, selection, selection.offers)
        if error is None:
            return
        if isinstance(error, AnotherPathError):
            _leave_chain(call, selection, error)
            continue
        alone = [(offer, _fail(call, selection, [offer])) for offer in selection.offers]
        failing = [(offer, why) for offer, why in alone if why is not None and not isinstance(why, AnotherPathError)]
        if not failing or _fail(call, selection, []) is not None:  # it is the step's own
            raise error
        for offer, why in failing:
            selection.drop(offer, _say_failure(why))


def _fail(call: Call, selection: Selection, offers: list[Offer]) -> Exception | None:
    """What a step of training raises with some offers in, of whatever type: Triton's errors share none with torch's. None where it raises nothing.

    Raised on are those that say nothing about an offer: memory that is full, and a GPU that has failed, on which nothing runs any more in this process.
    """
    try:
        _train_once(call, selection, offers)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the step
        return error
    return None


def _train_once(call: Call, selection: Selection, offers: list[Offer]) -> None:
    model = call.task.model
    with converted(model, selection.to_plan(call, offers)), undisturbed(model), gradients_aside(model):
        model.train()
        for batch in call.task.looking[:2]:
            with torch.enable_grad():
                loss = call.task.losses(model, batch).float().mean()
            if loss.requires_grad:  # not where every parameter is frozen
                loss.backward()  # type: ignore[no-untyped-call]


def _say_failure(error: Exception) -> str:
    """Why an offer is left out, of what a step of training raised."""
    if _TWICE in str(error):
        return "the step differentiates it twice, as a penalty on gradients does, which low precision does not do"
    return f"a step of training fails with it in low precision: {type(error).__name__}: {error}"


def _leave_chain(call: Call, selection: Selection, error: AnotherPathError) -> list[Offer]:
    """The linears of a chain that the model does not run as it was found, each by itself."""
    offer = next(o for o in selection.offers if o.name == error.chain)
    why = "no chain, which the model calls in another order than it was found in: in a checkpoint, or on another path"
    parts = take_apart(offer, choosing.ALONE, selection.looked, why=why, training=call.training)
    selection.replace(offer, parts)
    return parts


def verify_metric(call: Call, selection: Selection) -> None:
    """Swap units in, alone and together; drop what costs most until the whole is within the margin."""
    alone, base, offers = selection.alone, selection.base, list(selection.offers)
    for index, offer in enumerate(offers):  # which may grow
        call.progress("verify the metric", index + 1, len(offers) + 1)
        key = f"alone {offer.way} {digest(offer.unit)} of {base.digest}"
        try:
            alone[offer.name] = call.evidence.get_interval(key) or call.evidence.put_interval(key, swap(call, selection, [offer]))  # fmt: skip
        except AnotherPathError as error:
            offers += _leave_chain(call, selection, error)
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
            for part in _leave_chain(call, selection, error):
                origins[part.name] = part
            continue
        if _judge(call, selection, together, coarsest):
            break
        exceeded = call.margin if together.low > call.margin else selection.used
        left.append(_drop_dearest(call, selection, together.high - selection.used, exceeded))
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
    selection.put_back(name, mine, parts)
    for part in parts:
        selection.alone[part.name] = swap(call, selection, [part])
    selection.change = swap(call, selection, selection.offers)  # last, so that what was swapped in is all of it


def _swap_all(call: Call, selection: Selection) -> Interval:
    """The change with all that is in together; before that, of each alone that is new."""
    for offer in selection.offers:
        if offer.name not in selection.alone:
            selection.alone[offer.name] = swap(call, selection, [offer])
    return swap(call, selection, selection.offers)


def note_margin(call: Call, selection: Selection) -> None:
    """Say so where the data resolve a coarser margin only, of the units that are in at the end."""
    if (seen := selection.unresolved) is not None:
        call.notes.append(f"the held-out data resolve {seen.high - seen.value:.3%}, not the margin of {call.margin:.3%}: judged at {selection.used:.1%}; {_say_finer(call, selection.base)}")  # fmt: skip


def _drop_dearest(call: Call, selection: Selection, excess: float, exceeded: float) -> str:
    """Drop the linear that costs most for the FLOPs it saves, of those that make a good part of what is too much, and name it; what is left of its chain stays in."""
    costs = {name: cost for offer in selection.offers for name, cost in _share_cost(selection, offer).items()}
    sites = selection.looked.sites
    enough = [name for name, cost in costs.items() if cost >= WORTH_LEAVING * excess]
    worst = max(enough or costs, key=lambda name: costs[name] / sites[name].flops if enough else costs[name])
    offer = next(offer for offer in selection.offers if worst in offer.unit.linears)
    what = "it" if len(offer.unit.links) == 1 else f"the chain {offer.name}, of which this costs most for its FLOPs,"
    why = f"swapped in, {what} moved the metric {spell_change(selection.alone[offer.name])}, and with all units together it changed by more than {exceeded:.3%}"  # fmt: skip
    if len(offer.unit.links) == 1:
        selection.drop(offer, why)
        return worst
    selection.chosen.kept[worst] = why
    parts = [part_of(offer, unit, selection.looked, training=call.training) for unit in split_unit(offer.unit, {worst})]  # fmt: skip
    selection.replace(offer, parts)
    return worst


def _share_cost(selection: Selection, offer: Offer) -> dict[str, float]:
    """What an offer cost when it was swapped in alone, shared among its linears as their forward products are predicted to cost."""
    alone, sites = selection.alone[offer.name], [selection.looked.sites[name] for name in offer.unit.linears]
    harms = [max((h.value for (gemm, _), h in site.harm.items() if gemm == "fprop"), default=0.0) for site in sites]
    total = sum(harms)
    # one that cost nothing comes after all that did, the least certain first
    whole = alone.value if alone.value > 0 else 1e-6 * max(alone.high, 0.0)
    return {site.name: whole * (harm / total if total else 1 / len(sites)) for site, harm in zip(sites, harms, strict=True)}  # fmt: skip


def _say_finer(call: Call, base: Losses) -> str:
    """What would resolve more."""
    if base.step <= call.margin or base.per_example:
        return "more batches resolve more"
    return f"the loss comes in a type whose steps are {base.step:.2%}: compute its mean in float32, or return one number per example"


def verify_training(call: Call, selection: Selection) -> Interval | None:
    """Train two copies a little, one by the plan; the unit whose gradients are predicted to cost most leaves until they end alike.

    Returns:
        The change of the metric that the runs ended with; None where no unit is left.
    """
    while selection.offers:
        try:
            change = train_paired(call.task, selection.to_plan(call), call.train, call.optimizer, call.metric, lambda done: call.progress("train a little", done, 2 * call.train))  # fmt: skip
        except AnotherPathError as error:
            _leave_chain(call, selection, error)
            continue
        if call.is_within(change, selection.used):
            return change
        worst = max(selection.offers, key=lambda o: 0.0 if o.harm is None else o.harm.value)
        selection.drop(worst, f"trained {call.train} steps with it, the metric moved {spell_change(change)}, more than {selection.used:.3%}")  # fmt: skip
    return None


def verify_speed(call: Call, selection: Selection, original: Mapping[str, timing.Captured]) -> StepTimes:
    """Time the whole step, compiled, beside compiled 16 bits; drop units until it is not slower.

    Args:
        call: whose step it is.
        selection: what is in.
        original: the step of the model as it was, captured, by compile mode.

    Returns:
        What was measured.
    """
    if call.untimed is not None:
        return StepTimes(note=call.untimed)
    base, offered, failed = dict(original), bool(selection.offers), ""
    try:
        base |= capture_steps(call, LAYOUT) if selection.mods else {}
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # what is converted is converted on top of it
        traceback.clear_frames(error.__traceback__)
        failed = f"rewritten by {', '.join(selection.mods)} the whole step fails where it is timed: {type(error).__name__}: {error}"
    tried: list[_Timed] = []
    while selection.offers and not failed:
        try:
            runs, times = _time_converted(call, selection, base)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # of a compiler, or what no CUDA graph can hold: 16 bits went through both
            traceback.clear_frames(error.__traceback__)  # they hold its tensors
            failed = f"with FP8 in it the whole step fails where it is timed: {type(error).__name__}: {error}"
            break
        best, mine = (_fastest(times, kind) for kind in ("bf16", "loka"))
        ratio = timing.compare(times, mine, best).value
        tried.append(_Timed(ratio, selection.offers, _report(runs, times, mine, original)))
        fewer = _leave_slower(call, selection, tried)
        if not fewer:
            break
        selection.offers = fewer
    if tried and (found := _take_fastest(selection, tried)) is not None:
        return found
    note = failed or (SLOWER if offered else "no unit is both safe and fast")
    for offer in selection.offers:
        selection.drop(offer, note)
    return _settle_layout(call, selection, base, original, note)


class _Timed(NamedTuple):
    """A whole step that was timed."""

    ratio: float  # speed-up over the fastest in 16 bits
    offers: list[Offer]
    report: StepTimes


def _leave_slower(call: Call, selection: Selection, tried: list[_Timed]) -> list[Offer]:
    """What to time next: the faster half of the units where the step was slower than 16 bits; once, those that gain clearly by themselves, where it was faster. Nothing where that is all, or time is short."""
    offers, ratio = tried[-1].offers, tried[-1].ratio
    speed = {o.name: selection.speeds[o.name].value if o.name in selection.speeds else 1.0 for o in offers}
    if ratio < 1.0:
        return sorted(offers, key=lambda o: -speed[o.name])[: len(offers) // 2] if call.left >= 0.2 * call.budget else []  # fmt: skip
    clear = [o for o in offers if speed[o.name] >= CLEAR or o.name not in selection.speeds]
    return clear if len(tried) == 1 and len(clear) < len(offers) and call.left >= 0.5 * call.budget else []


def _take_fastest(selection: Selection, tried: list[_Timed]) -> StepTimes | None:
    """Of the steps that were timed the fastest, the one with more units where they differ by noise; None where 16 bits are faster than each."""
    best = tried[0]
    for other in tried[1:]:
        best = other if other.ratio > NOISE * best.ratio else best
    every = [name for offer in tried[0].offers for name in offer.unit.linears]
    if best.ratio < 1.0:
        selection.offers = []
        selection.chosen.kept.update(dict.fromkeys(every, SLOWER))
        return None
    taken = {name for offer in best.offers for name in offer.unit.linears}
    why = f"the whole step was {tried[0].ratio:.2f}x of 16 bits with it, and {best.ratio:.2f}x without"
    selection.chosen.kept.update({name: why for name in every if name not in taken})
    selection.offers = best.offers
    return best.report


def _settle_layout(call: Call, selection: Selection, base: Mapping[str, timing.Captured], original: Mapping[str, timing.Captured], note: str) -> StepTimes:  # fmt: skip
    """Without FP8: the step in 16 bits as it is rewritten. Rewrites that nobody asked for leave where they make it slower, or fail."""
    if len(base) > len(original):
        with put_back(call.task.model):
            times = timing.time_in_turns(base)
        found = _report(base, times, _fastest(times, LAYOUT), original)
        if found.speedup is None or found.speedup.value >= 1.0 or not selection.may_leave_mods:
            return found
        note = f"{note}, and in 16 bits {', '.join(selection.mods)} makes the step {found.speedup.value:.2f}x"
    if selection.may_leave_mods:
        selection.mods = []
    return StepTimes(note=note if selection.mods else f"{note}: nothing is converted")


def _time_converted(call: Call, selection: Selection, base: Mapping[str, timing.Captured]) -> tuple[dict[str, timing.Captured], dict[str, list[float]]]:  # fmt: skip
    """The whole step with what is in, in every way to compile, in turns with the steps it is compared with. A chain that it takes another path through is taken apart."""
    model = call.task.model
    while True:
        try:
            with converted(model, selection.to_plan(call)):
                if not call.training:
                    freeze_model(model)
                runs = {**base, **capture_steps(call, "loka")}
                with put_back(model):  # a replay runs what writes to buffers
                    return runs, timing.time_in_turns(runs)
        except AnotherPathError as error:
            _leave_chain(call, selection, error)


def capture_steps(call: Call, kind: str) -> dict[str, timing.Captured]:
    """The whole step, compiled in every way and captured, by name. A way that is not the default and fails is left out, and a note says so.

    Args:
        call: whose step it is.
        kind: what runs are called ("bf16", `LAYOUT`, "loka").

    Returns:
        What replays each.
    """
    found = {}
    for compiler in call.compilers:
        try:
            found[name_run(kind, compiler)] = timing.whole_step(call.task, training=call.training, compiler=compiler)
        except (torch.OutOfMemoryError, torch.AcceleratorError, timing.NotCapturedError, AnotherPathError):
            raise
        except Exception as error:
            if not compiler:
                raise
            traceback.clear_frames(error.__traceback__)
            note = f"{name_run(kind, compiler)} is not among what was timed: {type(error).__name__}: {error}"
            if note not in call.notes:
                call.notes.append(note)
    return found


def name_run(kind: str, compiler: str) -> str:
    """What a run is called in the record: its precision, and how it was compiled where that is not the default."""
    return f"{kind} {compiler}".rstrip()


def say_compiler(name: str) -> str | None:
    """How to compile what was fastest, where that is not the default.

    Args:
        name: of the run (`name_run`).

    Returns:
        A sentence, or None.

    Example:
        >>> say_compiler("loka max-autotune")
        'this speed-up is of torch.compile(model, mode="max-autotune-no-cudagraphs"): compile so'
    """
    found = next((given for compiler, given in timing.COMPILERS.items() if compiler and name.endswith(f" {compiler}")), None)  # fmt: skip
    given = ", ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in (found or {}).items())  # fmt: skip
    return f"this speed-up is of torch.compile(model, {given}): compile so" if given else None


def _report(runs: Mapping[str, timing.Captured], times: dict[str, list[float]], mine: str, original: Mapping[str, timing.Captured]) -> StepTimes:  # fmt: skip
    """What was measured of a step, beside the faster original."""
    medians, host = _medians(times), {name: run.host_microseconds for name, run in runs.items()}
    before = min(original, key=medians.__getitem__)
    said = timing.say_host(medians, host, mine, before)
    return StepTimes(
        medians, host, timing.compare(times, mine, before), compile_note=say_compiler(mine), host_note=said
    )


def _fastest(times: Mapping[str, list[float]], kind: str) -> str:
    """The run of a kind with the smallest median."""
    medians = _medians(times)
    return min((name for name in medians if name.startswith(kind)), key=medians.__getitem__)


def _medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def choose_parts(call: Call, selection: Selection) -> list[TablePlan | CollectivePlan]:
    """Tables and collectives that are within the margin alone, and with everything else; what costs most leaves until they are.

    Returns:
        All that were looked at; those that are in are in the selection.
    """
    task, used = call.task, selection.used

    def measure() -> Interval:
        return compare(
            evaluate(task, task.held_out, call.metric, as_trained=call.training), selection.base, call.metric
        )

    tables = choose_tables(task, measure, used, training=call.training) if call.choose_tables else []
    sent = choose_collectives(task, measure, used) if call.choose_collectives else []
    found: list[TablePlan | CollectivePlan] = [*tables, *sent]
    taken = [part for part in found if part.evidence is not None]
    without = selection.change
    while taken:
        selection.tables = [part for part in taken if isinstance(part, TablePlan)]
        selection.collectives = [part for part in taken if isinstance(part, CollectivePlan)]
        weights = next((part.codec for part in selection.collectives if part.name == "weights"), "fp32")
        with unrounded(task.model, selection.tables), rounded_weights(task.model, weights):
            change = selection.change = swap(call, selection, selection.offers)
        judged = [p for p in taken if p.evidence is not None and p.evidence.metric_change is not None]
        if call.is_within(change, used) or not judged:
            break
        worst = max(judged, key=lambda p: p.evidence.metric_change.high)  # type: ignore[union-attr]
        taken.remove(worst)
        call.notes.append(f"{worst.name} stays as it is: with everything together the metric moved {spell_change(change)}")  # fmt: skip
        selection.tables, selection.collectives, selection.change, selection.swapped = [], [], without, None
    return found


def note_columns(call: Call, selection: Selection) -> None:
    """Name tasks whose own loss changes by more than the margin while the loss as a whole does not: a rare label is a small part of it."""
    found = {} if selection.swapped is None else selection.swapped.changed_columns(selection.base, selection.used)
    call.notes += [f"column {number} of the loss, {share:.1%} of it, changes {spell_change(change)}: more than {selection.used:.2%}, which holds for their mean; hint: metric= that returns the column that matters" for number, (share, change) in found.items()]  # fmt: skip
