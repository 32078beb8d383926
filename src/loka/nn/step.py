"""Between two steps: what converted linears do when their weights have just changed.

The first conversion registers one hook that runs after any torch optimizer's step. It looks only at Linears whose weights that optimizer owns, and

    forgets their quantised weights (the version counter knows already, unless the optimizer writes through `.data`), or makes them anew where they are `manual`
    files the largest magnitudes of the step, for delayed scales

Code that updates weights without a torch optimizer calls `loka.refresh(model)`, which does the same.
"""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from loka.nn.scaling import finish_step

if TYPE_CHECKING:
    from loka.nn.linear import Linear

__all__ = ["file_magnitudes", "follow", "unfollow"]

_FOLLOWED: "weakref.WeakSet[Linear]" = weakref.WeakSet()
_HOOKS: list[Any] = []


def follow(linear: "Linear") -> None:
    """Have optimizers tell a Linear that its weight changed."""
    _FOLLOWED.add(linear)
    if not _HOOKS:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _HOOKS.append(register_optimizer_step_post_hook(_after_step))


def unfollow(linear: "Linear") -> None:
    """It is no Linear any more."""
    _FOLLOWED.discard(linear)


def file_magnitudes(linears: Iterable["Linear"]) -> None:
    """End the step of all delayed scales of these Linears."""
    states = [state for linear in linears for state in linear.state.amax_states.values()]
    if states:
        finish_step(states)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    linears = [linear for linear in _FOLLOWED if id(linear._parameters.get("weight")) in owned]
    for linear in linears:
        weights = linear.state.weights
        if weights is not None and weights.manual:
            weights.rewrite(linear.weight)
        elif weights is not None:
            weights.invalidate()
    file_magnitudes(linears)
