"""Judge the kernels that the selection runs, at the shapes at which it runs them, and drop units that run a wrong one.

Swapping units in runs their kernels on the batches at hand only. A kernel that is wrong on equal rows, on rows of very
different size, in memory that was used before or in one call of five may pass there and fail later. So one step is run
with the selection, every kernel call in it is noted (`loka.measure.kernel_calls`), and the gate that judges GEMMs for
Probe judges each of them, with its own shape, formats and options.

A wrong kernel that the model runs by itself, in 16 bits, cannot be dropped with a unit: a note names it.
"""

import traceback
from functools import partial

import torch

from loka.dispatch.choosing import Offer
from loka.measure.kernel_calls import KernelCall, find_calls, judge_call
from loka.placing import converted
from loka.records.prose import name_some
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
    wrong = judge_calls(call, _find_with(call, selection, selection.offers), judged)
    if wrong:
        own = set(find_own(call))
        for one in [one for one in wrong if one in own]:
            note = f"the model itself runs a kernel that fails the conformance gate: {one}: {wrong.pop(one)}"
            call.notes += [note] if note not in call.notes else []
    if wrong:
        blamed = {offer.name: [one for one in _find_with(call, selection, [offer]) if one in wrong] for offer in selection.offers}  # fmt: skip
        alone = {one for mine in blamed.values() for one in mine}
        together = [one for one in wrong if one not in alone]  # run with all of them only: each may be what causes it
        for offer in list(selection.offers):
            if mine := blamed[offer.name] or together:
                why = f"{mine[0]}: {wrong[mine[0]]}"
                selection.drop(offer, f"{offer.way}: a kernel fails the conformance gate: {why}")
    verified.update(describe(offer) for offer in selection.offers)


def find_own(call: Call) -> list[KernelCall]:
    """Return the kernel calls of one step of the model as it is, without any unit in low precision."""
    with undisturbed(call.task.model), gradients_aside(call.task.model):
        return find_calls(partial(run_step, call, call.task.looking[0]))


def _find_with(call: Call, selection: Selection, offers: list[Offer]) -> list[KernelCall]:
    with converted(call.task.model, selection.to_plan(call, offers)):
        return find_own(call)


def judge_calls(call: Call, calls: list[KernelCall], judged: dict[KernelCall, str]) -> dict[KernelCall, str]:
    """Judge those calls that were not judged before, showing how far it is.

    A note names calls for which there is no check, or not enough memory.

    Args:
        call: the call of tune.
        calls: what runs.
        judged: as in `verify_kernels`.

    Returns:
        Those of the calls that are wrong, and why.
    """
    unchecked = []
    for index, one in enumerate(new := [one for one in calls if one not in judged and one.backend != "reference"]):
        call.progress("verify the kernels", index + 1, len(new))
        try:
            verdict = judge_call(one, call.task.device)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # frees the tensors its frames hold
            call.notes.append(f"not tested for conformance, for want of memory: {one}")
            continue
        if verdict is None:
            unchecked.append(str(one))
        else:
            judged[one] = verdict.reason
    if unchecked:
        note = f"there is no conformance check for {name_some(unchecked, 3)}"
        call.notes += [note] if note not in call.notes else []
    return {one: judged[one] for one in calls if judged.get(one)}
