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

from loka.kernels.amax_history import file_amax

if TYPE_CHECKING:
    from loka.lowp.chain import Chain
    from loka.lowp.linear import Linear
    from loka.lowp.scaling import AmaxState

_FOLLOWED: "weakref.WeakSet[Linear | Chain]" = weakref.WeakSet()
_HOOKS: list[Any] = []
_LOCK = threading.Lock()  # a model may be converted while another one trains


def follow(linear: "Linear | Chain") -> None:
    """Have optimizers tell a Linear, or a chain of them, that weights changed."""
    with _LOCK:
        _FOLLOWED.add(linear)
    if not _HOOKS:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _HOOKS.append(register_optimizer_step_post_hook(_after_step))


def unfollow(linear: "Linear | Chain") -> None:
    """It is none any more."""
    with _LOCK:
        _FOLLOWED.discard(linear)


def file_magnitudes(placed: "Iterable[Linear | Chain]") -> None:
    """End the step of all remembered scales of these."""
    _file(list(placed))


def end_step(placed: "Iterable[Linear | Chain]") -> None:
    """Do what an optimizer's step brings about, without one: weights are quantised anew in the next forward, magnitudes are filed. For steps that are timed and train nothing.

    Args:
        placed: the linears and chains of a model.
    """
    placed = list(placed)
    for one in placed:
        one.weights_changed(owned=True)
    _file(placed)


def _file(placed: "list[Linear | Chain]") -> None:
    magnitudes: list[AmaxState] = []
    for one in placed:
        magnitudes += one.remembered
    if magnitudes:
        file_amax(magnitudes)
    for one in placed:
        one.after_step()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    with _LOCK:
        followed = list(_FOLLOWED)
    ended: list[Linear | Chain] = []
    frozen: list[Linear | Chain] = []
    trained = False
    for one in followed:
        weights = one.followed_weights()
        mine = any(id(weight) in owned for weight in weights)
        one.weights_changed(owned=mine)
        if mine:
            ended.append(one)
        elif one.training and weights:
            learns = any(weight.requires_grad for weight in weights)
            trained |= learns
            if not learns:
                frozen.append(one)
    # of several optimizers (dense and sparse) one that owns linears ends the step of the frozen ones too; where all linears are frozen, any
    _file([*ended, *(frozen if ended or not trained else [])])
