"""Judge the kernels that the selection runs, at the shapes at which it runs them, and drop units that run a wrong one.

How kernels are found and judged is the same for every kind of plan: `loka.placing.judging`. Here the step is the one
that is tuned.
"""

from collections.abc import Collection
from functools import partial

from loka.measure.kernel_calls import KernelCall, find_calls
from loka.placing import converted
from loka.placing.judging import Judge
from loka.tuning.call import Call, Selection
from loka.tuning.gradients import describe
from loka.tuning.rehearsal import run_step
from loka.units.undisturbed import gradients_aside, undisturbed


def verify_kernels(call: Call, selection: Selection, judge: Judge, verified: set[str]) -> None:
    """Drop units that run a wrong kernel.

    Args:
        call: provides the batch.
        selection: units that run a wrong kernel are dropped from it, with what is wrong as the reason.
        judge: has the verdicts so far.
        verified: units that have passed before, by `describe`; those that pass are added.
    """
    if all(describe(offer) in verified for offer in selection.offers):
        return

    def find(names: Collection[str]) -> list[KernelCall]:
        with converted(call.task.model, selection.to_plan(call, [o for o in selection.offers if o.name in names])):
            return find_own(call)

    wrong = judge.blame([offer.name for offer in selection.offers], find)
    for offer in [offer for offer in selection.offers if offer.name in wrong]:
        selection.drop(offer, f"{offer.way}: {wrong[offer.name]}")
    verified.update(describe(offer) for offer in selection.offers)


def find_own(call: Call) -> list[KernelCall]:
    """Return the kernel calls of one step of the model as it is, without any unit in low precision."""
    with undisturbed(call.task.model), gradients_aside(call.task.model):
        return find_calls(partial(run_step, call, call.task.looking[0]), training=call.training)
