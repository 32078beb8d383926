"""Judge the kernels that the selection runs, at the shapes at which it runs them, and drop units that run a wrong one.

Swapping units in runs their kernels on the batches at hand only. A kernel that is wrong on equal rows, on rows of very
different size, in memory that was used before or in one call of five may pass there and fail later. So one step is run
with the selection, every kernel call in it is noted (`loka.measure.kernel_calls`), and the gate that judges GEMMs for
Probe judges each of them, with its own shape, formats and options.

A wrong kernel that the model runs by itself, in 16 bits, cannot be dropped with a unit: a note names it.
"""

import traceback
from contextlib import nullcontext
from functools import partial

import torch

from loka.dispatch.choosing import Offer
from loka.measure.kernel_calls import KernelCall, find_calls, judge_call
from loka.placing import converted
from loka.tuning.call import Call, Selection
from loka.tuning.gradients import describe
from loka.tuning.rehearsal import run_step
from loka.units.undisturbed import gradients_aside, undisturbed


def verify_kernels(call: Call, selection: Selection, judged: dict[KernelCall, str], verified: set[str]) -> None:
    """Drop units that run a wrong kernel.

    Args:
        call: provides the batch; a wrong kernel outside of the units is named in its notes.
        selection: units that run a wrong kernel are dropped from it, with what is wrong as the reason.
        judged: why each call that was judged is wrong, empty if it is not; new ones are added.
        verified: units that have passed before, by `describe`; those that pass are added.
    """
    if all(describe(offer) in verified for offer in selection.offers):
        return
    calls = _find(call, selection, selection.offers)
    _judge(call, [one for one in calls if one not in judged and one.backend != "reference"], judged)
    if any(judged.get(one) for one in calls):
        own = set(_find(call, selection, []))
        for one in own:
            if why := judged.get(one):
                note = f"the model itself runs a kernel that fails the conformance gate: {one}: {why}"
                call.notes += [note] if note not in call.notes else []
        for offer in list(selection.offers):
            wrong = [one for one in _find(call, selection, [offer]) if judged.get(one) and one not in own]
            if wrong:
                why = f"{wrong[0]}: {judged[wrong[0]]}"
                selection.drop(offer, f"{offer.way}: a kernel fails the conformance gate: {why}")
    verified.update(describe(offer) for offer in selection.offers)


def _find(call: Call, selection: Selection, offers: list[Offer]) -> list[KernelCall]:
    """Return the kernel calls of one step with some offers."""
    model = call.task.model
    plan = converted(model, selection.to_plan(call, offers)) if offers else nullcontext()
    with plan, undisturbed(model), gradients_aside(model):
        return find_calls(partial(run_step, call, call.task.looking[0]))


def _judge(call: Call, calls: list[KernelCall], judged: dict[KernelCall, str]) -> None:
    """Judge calls one by one, showing how far it is. A call that needs too much memory to judge is named in a note."""
    for index, one in enumerate(calls):
        call.progress("verify the kernels", index + 1, len(calls))
        try:
            verdict = judge_call(one, call.task.device)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # frees the tensors its frames hold
            call.notes.append(f"not tested for conformance, for want of memory: {one}")
            continue
        if verdict is not None:
            judged[one] = verdict.reason
