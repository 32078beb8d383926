"""What converted linears do between two steps, when their weights have changed.

The first conversion registers one hook that runs after the step of any torch optimizer. It does two things:

    weights       drops the cached quantized weights of Linears that the optimizer owns, and of all others in training
                  mode: weights updated through master copies belong to no optimizer and are written through `.data`,
                  which no version counter shows. So an unchanged weight may be quantized once more than needed.
                  `manual` caches are rebuilt at once if the optimizer owns their weights
    magnitudes    files those of the step (amax), for delayed scales: of Linears that the optimizer owns, and of frozen
                  ones in training mode

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
    """Notify a Linear or a chain after every optimizer step."""
    with _LOCK:
        _FOLLOWED.add(linear)
    if not _HOOKS:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _HOOKS.append(register_optimizer_step_post_hook(_after_step))


def unfollow(linear: "Linear | Chain") -> None:
    """Stop notifying a Linear or a chain."""
    with _LOCK:
        _FOLLOWED.discard(linear)


def file_magnitudes(placed: "Iterable[Linear | Chain]") -> None:
    """File the magnitudes of the step, which updates delayed scales."""
    _file(list(placed))


def end_step(placed: "Iterable[Linear | Chain]") -> None:
    """Do what an optimizer's step causes, without one, for steps that are timed and train nothing.

    Weights are quantized again in the next forward, and magnitudes are filed.
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
    # Of several optimizers (dense and sparse), one that owns linears also ends the step of the frozen ones. If all
    # linears are frozen, any optimizer does.
    _file([*ended, *(frozen if ended or not trained else [])])
