"""Apply the mods before anything is chosen: those that the user asked for, and rewrites that keep the function.

A rewrite that keeps the function still rounds differently, and it may bring kernels of its own. So all rewrites are left
out if one of their kernels fails the conformance gate, or if they make the metric worse by more than the margin. Some
models amplify the rounding of 16 bits so much that two correct computations differ by more than the margin. So rewrites
stay if the rewritten model is not worse than the same model in float32.
"""

import copy
import traceback
from collections.abc import Callable

import torch

from loka import mods as mods_room
from loka.placing.judging import Judge
from loka.probe.paired import SHORT, Losses, spell_change
from loka.records import Interval
from loka.tuning.call import Call
from loka.tuning.comparing import compare, evaluate
from loka.tuning.kernels import find_own

Apply = Callable[[list[str]], list[str]]  # applies mods by name, and returns those that changed something


def apply_mods(call: Call, asked: list[str], judge: Judge) -> tuple[list[str], Losses | None]:
    """Apply layout rewrites that keep the function, and the `asked` mods.

    Args:
        call: provides the model and the batches. It gets a note about every rewrite that is left out.
        asked: mods that the user asked for. They stay, whatever the metric says.
        judge: has the verdicts of kernel calls so far.

    Returns:
        The mods that changed something, and the held-out losses of the model with only the `asked` ones, which changes
        are measured against. None instead of losses means those of the model with all mods.
    """
    task, names = call.task, [*asked, *mods_room.FREE]
    example = task.example()
    if example is None:
        if asked:
            raise ValueError(
                f"architecture=True: the step calls parts of {type(task.model).__name__} but never the model "
                "itself, and mods need a call of the model; hint: give it a forward that does what the step does"
            )
        call.notes.append(
            f"the step calls parts of {type(task.model).__name__} but never the model itself: layout rewrites, "
            "which need a call of the model, are skipped"
        )
        return [], None

    def apply(names: list[str]) -> list[str]:  # those that changed something
        if not names:
            return []
        done = mods_room.apply(task.model, [mods_room.parse(name) for name in names], example=example)
        changed = {change.mod for change in done.summary.changed}
        return [name for name in names if name in changed]

    given = _evaluate_given(call, asked, apply)
    taken = apply(names)
    if taken != names:
        mods_room.revert(task.model)
        apply(taken)
    own = [name for name in taken if name not in asked]
    if not own or given is None:
        return taken, None
    note = _find_wrong_kernel(call, asked, judge, apply, taken)
    if note is None:
        note, given = _compare_with_given(call, given)
        if note is None:
            return taken, given
        mods_room.revert(task.model)
        apply(asked)
    call.notes.append(f"{', '.join(own)} left out: {note}")
    return asked, None


def _evaluate_given(call: Call, asked: list[str], apply: Apply) -> Losses | None:
    """Evaluate the model with the `asked` mods only; None if its step is broken, which `look` reports as an error."""
    apply(asked)
    try:
        return evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # frees the tensors its frames hold
        return None
    finally:
        mods_room.revert(call.task.model)


def _find_wrong_kernel(call: Call, asked: list[str], judge: Judge, apply: Apply, taken: list[str]) -> str | None:
    """Say which kernel of a rewrite fails the conformance gate, and leave the model with the `asked` mods only.

    None if there is none, or if the model runs it by itself. The model then still has all of `taken`.
    """
    model = call.task.model
    wrong = judge.find_wrong(find_own(call))
    if not wrong:
        return None
    mods_room.revert(model)
    apply(asked)
    without = set(find_own(call))
    brought = [one for one in wrong if one not in without]
    if brought:
        return f"a kernel that it brings fails the conformance gate: {brought[0]}: {wrong[brought[0]]}"
    mods_room.revert(model)
    apply(taken)
    return None


def _compare_with_given(call: Call, given: Losses) -> tuple[str | None, Losses | None]:
    """Compare the rewritten model with the given one.

    Returns:
        Why the rewrites are left out, or None; and the losses that changes are measured against, None for those of the
        rewritten model.
    """
    rewritten = evaluate(call.task, call.task.held_out, call.metric, as_trained=call.training)
    change = compare(rewritten, given, call.metric)
    if not _harms(call, change) or not given.values.isfinite().all():
        return None, given
    exact = _evaluate_in_float32(call)
    if exact is not None and not _harms(call, compare(rewritten, exact, call.metric)):
        before, after = (spell_change(compare(losses, exact, call.metric)) for losses in (given, rewritten))
        call.notes.append(
            f"rounding to 16 bits alone moves the metric here: compared with float32, {before} as the model was given, "
            f"and {after} with tune's layout rewrites; changes by FP8 are measured against the latter"
        )
        return None, None
    return f"they move the metric {spell_change(change)}, more than the margin", None


def _harms(call: Call, change: Interval) -> bool:
    """Check whether a change is worse than the margin, and no noise: on the example, the function was the same."""
    return change.value > call.margin and change.low > 0.0


def _evaluate_in_float32(call: Call) -> Losses | None:
    """Evaluate the model without autocast; None if it has 16-bit parameters, or fails in float32."""
    task = copy.copy(call.task)
    if task.autocast is None or any(p.dtype in SHORT for p in task.model.parameters()):
        return None
    task.autocast = None
    try:
        return evaluate(task, task.held_out, call.metric, as_trained=call.training)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # its loss or its inputs may be for 16 bits only, or memory for half as much
        traceback.clear_frames(error.__traceback__)
        return None
