"""Whether what was chosen trains: one step of it before anything is timed, and, where asked for, a paired run of copies. Units that fail, or end apart, leave."""

import traceback

import torch

from loka.dispatch.choosing import Offer, take_apart
from loka.lowp.chain_handing import AnotherPathError
from loka.probe.paired import spell_change
from loka.records import Interval
from loka.tuning import choosing
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import converted, train_paired
from loka.units.undisturbed import gradients_aside, undisturbed

_TWICE = "differentiate twice"  # what autograd says of a function that has one derivative


def rehearse(call: Call, selection: Selection) -> None:
    """Train a step with everything in, and keep nothing of it. A chain that is called from its middle in backward, where a checkpoint computes a part of it again, is taken apart; a unit that fails is left out, with what it said."""
    while selection.offers:
        error = _fail(call, selection, selection.offers)
        if error is None:
            return
        if isinstance(error, AnotherPathError):
            leave_chain(call, selection, error)
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


def verify_training(call: Call, selection: Selection) -> Interval | None:
    """Train two copies a little, one by the plan; the unit whose gradients are predicted to cost most leaves until they end alike.

    Returns:
        The change of the metric that the runs ended with; None where no unit is left.
    """
    while selection.offers:
        try:
            change = train_paired(call.task, selection.to_plan(call), call.train, call.optimizer, call.metric, lambda done: call.progress("train a little", done, 2 * call.train))  # fmt: skip
        except AnotherPathError as error:
            leave_chain(call, selection, error)
            continue
        # two runs of training differ by chance too, which their interval over examples does not hold: only what is seen beyond doubt counts against a plan
        if change.high <= selection.used and change.low <= call.margin:
            return change
        worst = max(selection.offers, key=lambda o: 0.0 if o.harm is None else o.harm.value)
        selection.drop(worst, f"trained {call.train} steps with it, the metric moved {spell_change(change)}, more than {selection.used:.3%}")  # fmt: skip
    return None


def leave_chain(call: Call, selection: Selection, error: AnotherPathError) -> list[Offer]:
    """Take a chain apart that the model does not run as it was found: its linears stay in, each by itself.

    Args:
        call: whose model it is.
        selection: what is in; the chain is replaced in it.
        error: names the chain.

    Returns:
        The offers of its linears.
    """
    offer = next(o for o in selection.offers if o.name == error.chain)
    why = "no chain, which the model calls in another order than it was found in: in a checkpoint, or on another path"
    parts = take_apart(offer, choosing.ALONE, selection.looked, why=why, training=call.training)
    selection.replace(offer, parts)
    return parts
