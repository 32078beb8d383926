"""Between two steps: what a converted model does when its weights have just changed.

    loka.refresh(model)     quantise every weight again, file the magnitudes of the step for delayed scales

torch's optimizers do the same by themselves: the first conversion registers one hook that runs after any optimizer's step, and looks only at Linears whose weights
that optimizer owns. Code that updates weights in another way calls `refresh`.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from loka.nn.linear import Linear
from loka.nn.scaling import finish_step

__all__ = ["follow", "linears_of", "refresh"]

_FOLLOWED: "weakref.WeakSet[Linear]" = weakref.WeakSet()
_HOOKED: list[Any] = []


def linears_of(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The converted linears of a model by name."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield name, module


def follow(linears: Iterable[Linear]) -> None:
    """Have optimizers tell these Linears that their weights changed."""
    _FOLLOWED.update(linears)
    if not _HOOKED:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _HOOKED.append(register_optimizer_step_post_hook(_after_step))


def refresh(model: nn.Module) -> int:
    """End a step by hand: quantise all weights now, in place, and file what delayed scales have seen; returns how many Linears there are."""
    linears = [linear for _, linear in linears_of(model)]
    for linear in linears:
        linear.refresh()
    _file(linears)
    return len(linears)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    linears = [linear for linear in _FOLLOWED if id(linear._parameters.get("weight")) in owned]
    for linear in linears:
        weights = linear.state.weights
        if weights is None:
            continue
        if weights.manual:
            weights.rewrite(linear.weight)
        else:
            weights.invalidate()  # the version counter knows, unless the optimizer writes through .data
    _file(linears)


def _file(linears: list[Linear]) -> None:
    states = [state for linear in linears for state in linear.state.amax_states.values()]
    if states:
        finish_step(states)
