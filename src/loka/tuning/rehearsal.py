"""Check that the selection runs: one step before anything is judged or timed and, on request, a paired training run.

Units that fail, or whose run ends with a different metric, are dropped.
"""

from functools import partial
from typing import Any

import torch

from loka.dispatch.choosing import Offer, take_apart
from loka.lowp.chain_handing import AnotherPathError
from loka.lowp.leaving import TWICE
from loka.placing import converted
from loka.probe.paired import spell_change
from loka.records import Interval
from loka.tuning import choosing
from loka.tuning.attempt import attempt, spell_error
from loka.tuning.call import Call, Selection
from loka.tuning.comparing import train_paired
from loka.units.undisturbed import gradients_aside, undisturbed


def rehearse(call: Call, selection: Selection) -> None:
    """Run a step with all offers, in training forward and backward, and discard its effects.

    A chain that is called from its middle in backward, where activation checkpointing recomputes a part of it, is
    taken apart. A unit that fails is dropped, with its error as the reason.
    """
    while selection.offers:
        error = _try_step(call, selection, selection.offers)
        if error is None:
            return
        if isinstance(error, AnotherPathError):
            replace_chain_by_linears(call, selection, error)
            continue
        alone = [(offer, _try_step(call, selection, [offer])) for offer in selection.offers]
        failing = [(offer, why) for offer, why in alone if why is not None and not isinstance(why, AnotherPathError)]
        if not failing or _try_step(call, selection, []) is not None:  # the step itself fails
            raise error
        for offer, why in failing:
            selection.drop(offer, _say_failure(call, why))


def _try_step(call: Call, selection: Selection, offers: list[Offer]) -> Exception | None:
    """Return the exception that a step raises with some offers converted, or None."""
    return attempt(partial(_run_once, call, selection, offers))


def _run_once(call: Call, selection: Selection, offers: list[Offer]) -> None:
    model = call.task.model
    with converted(model, selection.to_plan(call, offers)), undisturbed(model), gradients_aside(model):
        for batch in call.task.looking[:2]:
            run_step(call, batch)


def run_step(call: Call, batch: Any) -> None:
    """Run the model on a batch as it will run: forward and backward in training, else forward in eval mode.

    Modes, gradients and buffers are changed: to be called under `undisturbed` and `gradients_aside`.
    """
    call.task.model.train(call.training)
    with torch.set_grad_enabled(call.training):
        loss = call.task.losses(call.task.model, batch).float().mean()
    if loss.requires_grad:  # False in serving, or if every parameter is frozen
        loss.backward()  # type: ignore[no-untyped-call]


def _say_failure(call: Call, error: Exception) -> str:
    """Return the reason to drop an offer whose training step raised an error."""
    if TWICE in str(error):
        return "the step differentiates it twice, as a gradient penalty does, which is not supported in low precision"
    step = "a training step" if call.training else "the model"
    return f"{step} fails with it in low precision: {spell_error(error)}"


def verify_training(call: Call, selection: Selection) -> Interval | None:
    """Train two copies, one converted, and drop the unit with the largest predicted change until they end alike.

    Returns:
        The change of the metric between the last two runs; None if no unit is left.
    """
    while selection.offers:
        try:
            change = train_paired(
                call.task,
                selection.to_plan(call),
                call.train,
                call.optimizer,
                call.metric,
                lambda done: call.progress("paired training", done, 2 * call.train),
            )
        except AnotherPathError as error:
            replace_chain_by_linears(call, selection, error)
            continue
        # Two training runs also differ by chance, which the interval over examples does not cover. So the user's margin
        # is compared with the lower end of the change here, and not with its value as in `Call.is_within`.
        if change.high <= selection.used and change.low <= call.margin:
            return change
        worst = max(selection.offers, key=lambda o: 0.0 if o.harm is None else o.harm.value)
        selection.drop(
            worst,
            (
                f"after {call.train} training steps with it, the metric moved {spell_change(change)}, "
                f"more than {selection.used:.3%}"
            ),
        )
    return None


def replace_chain_by_linears(call: Call, selection: Selection, error: AnotherPathError) -> list[Offer]:
    """Take apart a chain that the model does not run in the order it was found. Its linears stay in, each by itself.

    Returns their offers. The error names the chain.
    """
    offer = next(o for o in selection.offers if o.name == error.chain)
    why = "not as a chain, since the model calls its linears in another order: in a checkpoint, or on another path"
    parts = take_apart(offer, choosing.ALONE, selection.looked, why=why, training=call.training)
    selection.replace(offer, parts)
    return parts
