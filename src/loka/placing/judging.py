"""Judge the kernels that a plan would run, at the shapes at which it would run them, and name the units that run a wrong one.

    judge = Judge(device)
    refused = judge.blame(names, lambda names: find_with(names))     unit -> kernel, call and fault

Running units on the batches at hand shows little. A kernel that is wrong on equal rows, on rows of very different size,
in memory that was used before or in one call of five may be right there and fail later. So a step is run with the
units, every kernel call in it is noted (`loka.measure.kernel_calls`), and the gate judges each one with its own shape,
formats and options. Every kind of plan does this: `loka.tune`, reports of Probe, `plan_everything`, `loka.quantize`.

References define the correct result, so where only they run, nothing is judged.
"""

import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from loka.kernels.compiling import run_overlapping
from loka.lowp.chain import chains_of
from loka.lowp.linear import refresh
from loka.measure.conformance import Conformance
from loka.measure.device import environment_of
from loka.measure.kernel_calls import KernelCall, find_calls, judge_call
from loka.nn.wrapping import unwrap
from loka.placing.conversion import converted, freeze_model
from loka.records import Plan, SitePlan, UnitPlan
from loka.records.prose import name_some, spell_error
from loka.units.example import call_model, tensors_in
from loka.units.undisturbed import gradients_aside, undisturbed

WRONG = "a kernel fails the conformance gate"  # how reasons begin, but for those of a step that fails
# Ops whose references take neither a loop over rows nor much more memory than their kernels.
BY_REFERENCE = ("quantize", "norm_quantize", "fused_linear", "scaled_mm", "interaction", "dots", "mixed_dots")
Find = Callable[[Collection[str]], list[KernelCall]]  # the calls of a step with these units in low precision only


@dataclass
class Judge:
    """Judges kernel calls, and remembers the verdicts.

    Args:
        device: the device they run on.
        notes: gets what concerns no unit: wrong kernels of the model itself, calls that could not be judged.
        tell: called with (done, total) as calls are judged.
        judged: why each call that was judged is wrong, empty if it is not.
        meanwhile: tasks to run while kernels are compiled, see `run_overlapping`.

    Example:
        >>> judge = Judge("cuda")
        >>> judge.blame(["over.0"], find)
        {'over.0': 'a kernel fails the conformance gate: fused_linear on triton, ...: alike_rows: ...'}
    """

    device: torch.device | str
    notes: list[str] = field(default_factory=list)
    tell: Callable[[int, int], None] | None = None
    judged: dict[KernelCall, str] = field(default_factory=dict)
    meanwhile: list[Callable[[], Any]] | None = None

    def find_wrong(self, calls: Sequence[KernelCall]) -> dict[KernelCall, str]:
        """Judge those of the calls that were not judged before. Return the wrong ones, and why."""
        unchecked = []
        new = [one for one in calls if one not in self.judged and one.backend != "reference"]
        if new and self.tell is not None:
            self.tell(0, len(new))
        running = run_overlapping([partial(self._judge, one) for one in new], meanwhile=self.meanwhile)
        for done, (index, verdict) in enumerate(running, 1):
            if self.tell is not None:
                self.tell(done, len(new))
            if isinstance(verdict, torch.OutOfMemoryError):
                self._note(f"not tested for conformance, for want of memory: {new[index]}")
            elif verdict is None:
                unchecked.append(str(new[index]))
            else:
                self.judged[new[index]] = verdict.reason
        if new and torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()  # exact results in float64 may have taken most of the GPU
        if unchecked:
            self._note(f"there is no conformance check for {name_some(unchecked, 3)}")
        return {one: self.judged[one] for one in calls if self.judged.get(one)}

    def _judge(self, one: KernelCall) -> Conformance | torch.OutOfMemoryError | None:
        try:
            return judge_call(one, self.device)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # frees the tensors its frames hold
            return error

    def blame(self, names: Collection[str], find: Find) -> dict[str, str]:
        """Return the units that run a wrong kernel, each with kernel, call and fault.

        A wrong kernel that the model runs by itself, in 16 bits, is named in a note instead: no unit causes it.

        Args:
            names: the units.
            find: runs a step with some of the units and returns its calls.

        Returns:
            The reason by name; empty if nothing is wrong.
        """
        wrong = self.find_wrong(find(names))
        for one in find(()) if wrong else ():
            if one in wrong:
                self._note(f"the model itself runs a kernel that fails the conformance gate: {one}: {wrong.pop(one)}")
        if not wrong:
            return {}
        runs = {name: [one for one in find([name]) if one in wrong] for name in names}
        alone = {one for mine in runs.values() for one in mine}
        together = [one for one in wrong if one not in alone]  # run with all of them only: each may be what causes it
        return {
            name: f"{WRONG}: {found[0]}: {wrong[found[0]]}"
            for name, mine in runs.items()
            if (found := mine or together)
        }

    def refuse(self, names: Collection[str], find: Find, *, failing: bool = True) -> dict[str, str]:
        """Find every unit that runs a wrong kernel, or fails: like `blame`, until what is left runs none.

        A step that fails without any unit, too, cannot be judged, nor can one for which there is not enough memory: a
        note says so, and no unit is refused for it.

        Args:
            names: the units.
            find: runs a step with some of the units and returns its calls.
            failing: refuse units whose step raises, with the error as the reason. False: let the error through, where
                the caller asked for these units.

        Returns:
            The reason by name.
        """
        refused: dict[str, str] = {}
        try:
            self._refuse(names, find, refused, failing=failing)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # frees the tensors its frames hold
            self._note("not every kernel was judged, for want of memory for a step in low precision")
        return refused

    def _refuse(self, names: Collection[str], find: Find, refused: dict[str, str], *, failing: bool) -> None:
        while left := [name for name in names if name not in refused]:
            try:
                found = self.blame(left, find)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except Exception as error:  # of any type: Triton's errors do not share one with torch's
                if not failing:
                    raise
                traceback.clear_frames(error.__traceback__)  # frees the tensors its frames hold
                found = self._find_failing(left, find, error)
            if not found:
                break
            refused |= found

    def _find_failing(self, names: Collection[str], find: Find, error: Exception) -> dict[str, str]:
        if (own := _try(find, [])) is not None:
            self._note(f"no kernel was judged, since the model fails on the example without low precision: {spell_error(own)}")  # fmt: skip
            return {}
        failing = {name: why for name in names if (why := _try(find, [name])) is not None} or dict.fromkeys(
            names, error
        )
        return {name: f"a step fails with it in low precision: {spell_error(why)}" for name, why in failing.items()}

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _try(find: Find, names: Collection[str]) -> Exception | None:
    """Return the error of a step with some units; None if it runs."""
    try:
        find(names)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        return error
    return None


def plan_unmeasured(model: nn.Module, *, units: Sequence[UnitPlan] = (), sites: Sequence[SitePlan] = ()) -> Plan:
    """Return a plan of units and sites without any measurement, as for a trial.

    Args:
        model: the model they belong to.
        units: the chains.
        sites: the linears.

    Returns:
        A plan for any device.

    Example:
        >>> calls = find_planned(model, plan_unmeasured(model, units=found.units), batch, training=True)
    """
    return Plan(
        model=type(model).__name__,
        recipe="auto",
        target=None,
        max_error=1.0,
        max_gradient_error=1.0,
        min_speedup=None,
        flops_of="sites",
        sites=list(sites),
        units=list(units),
        environment=environment_of(model),
    )


@torch.inference_mode(False)  # under which a step of training has no backward
def find_planned(model: nn.Module, plan: Plan, example: Any, *, training: bool) -> list[KernelCall]:
    """Return the kernel calls of a step of a model converted by a plan. The model is left as it was.

    Args:
        model: not converted; with the plan's mods, which the plan here does not name.
        plan: what to convert.
        example: see `find_step`.
        training: run forward and backward; False runs the forward of the frozen model.

    Returns:
        The calls, each once.

    Example:
        >>> calls = find_planned(model, plan, batch, training=True)
    """

    def find(*, references: Collection[str]) -> list[KernelCall]:
        with converted(model, plan):
            if not training:
                freeze_model(model)
            return _find_in(unwrap(model), example, training, references=references)

    return _find_on(model, find)


@torch.inference_mode(False)
def find_step(model: nn.Module, example: Any, *, training: bool) -> list[KernelCall]:
    """Return the kernel calls of a step of a model as it is now. The model is left as it was.

    Args:
        model: wrapped or not.
        example: an input (a tuple is *args, a dict **kwargs), or a function that runs the model.
        training: run it in training mode, and backward from the outputs that need a gradient; False: eval, forward only.

    Returns:
        The calls, each once. Chains whose scales come from previous steps run a second step, with those of the first.

    Example:
        >>> calls = find_step(model, batch, training=False)
    """
    return _find_on(model, partial(_find_in, unwrap(model), example, training))


def _find_on(model: nn.Module, find: Callable[..., list[KernelCall]]) -> list[KernelCall]:
    """Find calls by running references if the model is on a GPU.

    A step would compile its kernels one after the other. Judging them compiles them side by side.
    """
    if _is_on_gpu(model):
        try:
            return find(references=BY_REFERENCE)
        except Exception as error:  # as want of memory: references compute in float32
            traceback.clear_frames(error.__traceback__)
    return find(references=())


def _is_on_gpu(model: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())


def _find_in(model: nn.Module, example: Any, training: bool, *, references: Collection[str]) -> list[KernelCall]:
    with undisturbed(model), gradients_aside(model):
        unknown = any(not (chain.primed and chain.gradients_primed) for _, chain in chains_of(model))
        step = partial(_run_step, model, example, training)
        find = partial(find_calls, step, training=training, references=references)
        calls = find()
        if training and unknown:
            refresh(model)
            calls += [one for one in find() if one not in calls]
        return calls


def _run_step(model: nn.Module, example: Any, training: bool) -> None:
    model.train(training)
    with torch.set_grad_enabled(training):
        outputs = example() if callable(example) else call_model(model, example)
    ends = [y for y in tensors_in(outputs) if y.requires_grad] if training else []
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(y) for y in ends])
