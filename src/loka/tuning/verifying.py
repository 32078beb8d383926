"""Whether what was chosen holds: the metric with the units swapped in, alone and together; after a little training; the time of the whole step. Units are dropped until all of it holds."""

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from loka.dispatch.choosing import Offer, part_of, predicted_harm, split_unit, take_apart
from loka.lowp.chain_handing import AnotherPathError
from loka.placing import freeze_model
from loka.probe.paired import Losses, spell_change
from loka.records import CollectivePlan, Interval, TablePlan
from loka.tuning import choosing, timing
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import converted, evaluate, train_paired
from loka.tuning.tables import choose_collectives, choose_tables, rounded_weights, unrounded
from loka.units.undisturbed import gradients_aside, put_back, undisturbed

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
    return selection.swapped.change_from(selection.base)


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
        key = f"alone {offer.way} {offer.name} {len(offer.unit.links)} of {base.digest}"
        try:
            alone[offer.name] = call.evidence.get_interval(key) or call.evidence.put_interval(key, swap(call, selection, [offer]))  # fmt: skip
        except AnotherPathError as error:
            offers += _leave_chain(call, selection, error)
    for offer in [*selection.offers]:
        if alone[offer.name].low == alone[offer.name].high == 0.0:
            selection.drop(offer, "swapped in, it changes no loss at all: its output does not reach what is measured, so nothing shows what FP8 would do there")  # fmt: skip
    hold_margin(call, selection)


def hold_margin(call: Call, selection: Selection, coarsest: float = math.inf) -> None:
    """Swap in what is left, together, and drop what costs most until it is within the margin.

    Args:
        call: whose margin it is.
        selection: what is in; `used`, `change` and `unresolved` are of what stays in.
        coarsest: a margin that an earlier measurement resolved; none coarser is used now.
    """
    while selection.offers:
        try:
            together = selection.change = _swap_all(call, selection)
        except AnotherPathError as error:
            _leave_chain(call, selection, error)
            continue
        selection.used = min(call.margin_for(together), coarsest)
        selection.unresolved = together if selection.used > call.margin else None
        if call.is_within(together, selection.used):
            return
        worst = max(selection.offers, key=lambda o: selection.alone[o.name].high)
        exceeded = call.margin if together.low > call.margin else selection.used
        _drop_worst(call, selection, worst, exceeded)
    selection.change = None


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


def _drop_worst(call: Call, selection: Selection, offer: Offer, exceeded: float) -> None:
    """Drop the linear of an offer that is predicted to cost most; what is left of its chain stays in."""
    sites, whole = selection.looked.sites, len(offer.unit.links) == 1
    what = "it" if whole else f"the chain {offer.name}, of which this is predicted to cost most,"
    change = spell_change(selection.alone[offer.name])
    worst = max(offer.unit.linears, key=lambda name: predicted_harm(sites[name], training=call.training))
    why = f"swapped in, {what} moved the metric {change}, and with all units together it changed by more than {exceeded:.3%}"
    if whole:
        selection.drop(offer, why)
        return
    selection.chosen.kept[worst] = why
    parts = [part_of(offer, unit, selection.looked, training=call.training) for unit in split_unit(offer.unit, {worst})]  # fmt: skip
    selection.replace(offer, parts)


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
    if selection.mods:
        base["bf16 layout"] = timing.whole_step(call.task, training=call.training)
    for attempt in range(3):
        if not selection.offers:
            break
        try:
            runs, times = _time_converted(call, selection, base)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # of a compiler, or what no CUDA graph can hold: 16 bits went through both
            traceback.clear_frames(error.__traceback__)  # they hold its tensors
            failed = f"with FP8 in it the whole step fails where it is timed: {type(error).__name__}: {error}"
            break
        medians = _medians(times)
        best, mine = (min((n for n in medians if n.startswith(kind)), key=medians.__getitem__) for kind in ("bf16", "loka"))  # fmt: skip
        ratio = timing.compare(times, mine, best).value
        if ratio >= 1.0:
            return _report(runs, times, mine, original)
        if call.left < 0.2 * call.budget or len(selection.offers) == 1 or attempt == 2:
            break
        slowest = min(selection.offers, key=lambda o: selection.speeds[o.name].value if o.name in selection.speeds else 1.0)  # fmt: skip
        selection.drop(slowest, f"the whole step was {ratio:.2f}x of 16 bits with it")
    slow = "FP8 was not faster than compiled 16 bits as a whole step" if offered else "no unit is both safe and fast"
    note = failed or slow
    for offer in selection.offers:
        selection.drop(offer, note)
    if not selection.mods:
        return StepTimes(note=f"{note}: nothing is converted")
    with put_back(call.task.model):
        return _report(base, timing.time_in_turns(base), "bf16 layout", original)


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
        kind: what runs are called ("bf16", "loka").

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
    found = timing.COMPILERS.get(name.partition(" ")[2])
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


def _medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def choose_parts(call: Call, selection: Selection) -> list[TablePlan | CollectivePlan]:
    """Tables and collectives that are within the margin alone, and with everything else; what costs most leaves until they are.

    Returns:
        All that were looked at; those that are in are in the selection.
    """
    task, used = call.task, selection.used

    def measure() -> Interval:
        return evaluate(task, task.held_out, call.metric, as_trained=call.training).change_from(selection.base)

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
