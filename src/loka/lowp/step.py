"""Between two steps: what converted linears do when their weights have just changed.

The first conversion registers one hook that runs after any torch optimizer's step. It

    forgets the quantised weights of Linears that this optimizer owns, and of all others in training mode: master weights belong to no optimizer and are copied back
    after the step, through `.data`, where no version counter shows it; a weight that did not change is quantised once more than needed. `manual` ones are made
    anew where the optimizer owns them
    files the largest magnitudes of the step, for delayed scales, of Linears it owns, and with them of frozen ones in training mode

Code that updates weights without a torch optimizer calls `loka.refresh(model)`, which does the same.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from loka.lowp.scaling import finish_step

if TYPE_CHECKING:
    from loka.lowp.linear import Linear
    from loka.lowp.linear_state import LinearState

__all__ = ["file_magnitudes", "follow", "unfollow"]

_FOLLOWED: "weakref.WeakSet[Linear]" = weakref.WeakSet()
_HOOKS: list[Any] = []
_LOCK = threading.Lock()  # a model may be converted while another one trains


def follow(linear: "Linear") -> None:
    """Have optimizers tell a Linear that its weight changed."""
    with _LOCK:
        _FOLLOWED.add(linear)
    if not _HOOKS:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _HOOKS.append(register_optimizer_step_post_hook(_after_step))


def unfollow(linear: "Linear") -> None:
    """It is no Linear any more."""
    with _LOCK:
        _FOLLOWED.discard(linear)


def file_magnitudes(linears: Iterable["Linear"]) -> None:
    """End the step of all delayed scales of these Linears."""
    _file(linear.state for linear in linears)


def _file(states: "Iterable[LinearState]") -> None:
    magnitudes = [amax for state in states for amax in state.amax_states.values()]
    if magnitudes:
        finish_step(magnitudes)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with _LOCK:
        followed = list(_FOLLOWED)
    ended: list[LinearState] = []
    frozen: list[LinearState] = []
    trained = False
    for linear in followed:
        state: LinearState | None = vars(linear).get("state")
        if state is None:
            continue  # reverted meanwhile
        weight, weights = linear._parameters.get("weight"), state.weights
        mine = weight is not None and id(weight) in owned
        if weights is not None and weights.manual:
            if mine:
                weights.rewrite(linear.weight)
        elif weights is not None and mine:
            weights.invalidate()  # changed in place: a backward that still wants the old weight is an error, as for nn.Linear
        elif weights is not None and linear.training:
            weights.renew()
        if mine:
            ended.append(state)
        elif linear.training and weight is not None:
            trained |= weight.requires_grad
            if not weight.requires_grad:
                frozen.append(state)
    # of several optimizers (dense and sparse) one that owns linears ends the step of the frozen ones too; where all linears are frozen, any
    _file([*ended, *(frozen if ended or not trained else [])])
