"""A chain of linears that passes FP8 from layer to layer, placed in an existing model without rewriting it.

    [linear -> norm -> activation]*  (-> last linear)    one autograd node; `loka.lowp.chain_function` has the maths

The modules of a chain keep their identity, parameters, names and state_dict, and only change their class
(`loka.lowp.chain_modules`): the first linear runs the whole chain, the later modules compute nothing. So a chain may
lie in an nn.Sequential, in a custom MLP, or across attributes that a forward calls in order: wherever each output is
read only by the next module, which is what `loka.units` looks for. It is one autograd node and not one per layer,
because FP8 tensors cannot travel along autograd's edges: a gradient has the dtype of its tensor.

`Chain` is a plain object, not a module, so nothing of it enters a state_dict. It holds the links, the scales remembered
between steps, the frozen weights of a serving model and the counters that Guard reads.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from loka.lowp.chain_function import ChainPrecision
from loka.lowp.chain_handing import HandsOn, Position
from loka.lowp.chain_modules import (
    CHAIN,
    Head,
    Passed,
    add_call,
    chain_of,
    chains_of,
    drop_call,
)
from loka.lowp.chain_parts import ChainConfig, Part
from loka.lowp.chain_running import RunningChain
from loka.lowp.scaling import Scaling
from loka.lowp.step import follow, unfollow
from loka.nn.mixing import mix, unmix
from loka.nn.replacing import is_watched

__all__ = ["TAP", "Chain", "Part", "Tap", "chain_of", "chains_of"]

TAP = "loka_tap"  # attribute of a linear: the Tap that observes a chain starting at it

HEADROOM = Scaling(history=16, margin=1)  # one doubling from step to step saturates nothing


class Tap(Protocol):
    """An observer of a chain. It is called only in steps where `on` is True and must not change any value."""

    @property
    def on(self) -> bool:
        """Whether the current step is observed."""

    def see(self, chain: "Chain", x: Tensor, y: Tensor, seed: Tensor | None) -> Tensor:
        """Observe one call: its input, output and dropout seed.

        Return y, or its values in a tensor to observe its gradient.
        """


class Chain(RunningChain, HandsOn):
    """Linears that run in FP8 and pass FP8 to each other.

    Args:
        name: the unit's name, for records and messages.
        parts: first to last.
        precision: how gradients are scaled, and which kernels run.
        bounded_input: the input comes from a BlockNorm and has a static scale.
        scaling: how scales are remembered between steps.

    Example:
        >>> first = Part(Link("top.0", activation="relu"), model.top[0], passed=(model.top[1],))
        >>> chain = Chain("top", [first, Part(Link("top.2"), model.top[2])])
        >>> chain.place()
        >>> model(x)  # runs in FP8
        >>> chain.release()
    """

    @torch.inference_mode(False)  # its scales outlive this call, so they must not be inference tensors
    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        precision: ChainPrecision | None = None,
        *,
        bounded_input: bool = False,
        scaling: Scaling = HEADROOM,
    ) -> None:
        super().__init__(ChainConfig(name, tuple(parts), precision or ChainPrecision(), bounded_input, scaling))
        self.placed = False
        self.callers = list({id(m): m for part in parts for m in part.callers}.values())
        inside = {id(m) for part in parts for m in (part.linear, *part.passed, *part.callers)}
        self.around_all = [m for m in self.callers if inside <= {id(inner) for inner in m.modules()}]
        self.position = Position()
        self.around: nn.Module | None = None  # the layer whose interactions are fused around this chain

    @property
    def tap(self) -> Tap | None:
        """The observer of this chain, if there is one."""
        tap: Tap | None = self.linears[0].__dict__.get(TAP)
        return tap

    def run(self, x: Tensor) -> Tensor:
        """Run the chain: [..., K] -> [..., N] in the input's dtype, or autocast's if it is enabled."""
        with self.read_once():
            y, seed = self.compute(x)
        tap = self.tap
        return y if tap is None or not tap.on else tap.see(self, x, y, seed)

    def place(self) -> "Chain":
        """Change the classes of the modules. Raise a ValueError if one of them has hooks or is in a chain already."""
        modules = [m for part in self.parts for m in (part.linear, *part.passed)]
        watched = [part.link.linear for part in self.parts if is_watched(part.linear)]
        watched += [
            f"{type(m).__name__} after {part.link.linear}" for part in self.parts for m in part.passed if is_watched(m)
        ]
        if watched:
            raise ValueError(
                f"{self.name}: {', '.join(watched)} has forward or backward hooks that would see other tensors; hint: "
                "remove them first"
            )
        if len({id(m) for m in modules}) < len(modules):
            raise ValueError(f"{self.name}: a module is in it twice; a module of a chain may be called only once")
        if taken := [type(m).__name__ for m in modules if CHAIN in m.__dict__]:
            raise ValueError(f"{self.name}: {', '.join(taken)} is in a chain already; hint: loka.revert(model) first")
        for index, module in enumerate(modules):
            module.__class__ = mix(type(module), Head if index == 0 else Passed)
            module.__dict__[CHAIN] = self
        for caller in self.callers:
            add_call(caller, self)
        self.placed = True
        follow(self)
        return self

    def release(self) -> None:
        """Restore the original modules. Parameters keep their trained values."""
        self.thaw()
        unfollow(self)
        for part in self.parts:
            for module in (part.linear, *part.passed):
                if module.__dict__.pop(CHAIN, None) is not None:
                    module.__class__ = unmix(type(module), Head if isinstance(module, Head) else Passed)
        for caller in self.callers:
            drop_call(caller, self)
        self.placed = False
        self.forget()

    def split(self, site: str) -> list["Chain"]:
        """Return one linear to high precision; the linears before and after it stay in FP8.

        Args:
            site: the linear's name.

        Returns:
            The chains that remain: none, one or two. They keep their scales.
        """
        names = [link.linear for link in self.links]
        if site not in names:
            raise ValueError(f"{self.name} has no linear {site!r}; it has {', '.join(names)}")
        at, placed = names.index(site), self.placed
        if placed:
            self.release()
        made: list[Chain] = []
        for begin, end in ((0, at), (at + 1, len(names))):
            if begin == end:
                continue
            # dropout scales by 1 / (1 - p), which voids the bound
            bounded = self.bounded_input if begin == 0 else self.links[at].bounded and self.parts[at].dropout is None
            parts = (*self.parts[begin : end - 1], self.parts[end - 1].as_last())
            half = Chain(names[begin], parts, self.precision, bounded_input=bounded, scaling=self.scaling)
            half.primed, half.gradients_primed = self.primed, self.gradients_primed
            half.load_steps(self.steps())
            half.input = self.input if begin == 0 else None
            for mine, theirs in ((half.out, self.out), (half.grad, self.grad)):
                for index, state in enumerate(mine):
                    old = theirs[begin + index]
                    if state is not None and old is not None:
                        state.load(old.state())
                        state.saturated.copy_(old.saturated)
            made.append(half.place() if placed else half)
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.placed:
            follow(self)

    def __repr__(self) -> str:
        widths = [self.linears[0].in_features, *(linear.out_features for linear in self.linears)]
        primed = self.primed and self.gradients_primed
        state = ", frozen" if self.frozen is not None else "" if primed else ", scales not known yet"
        return f"Chain({self.name}: {' -> '.join(map(str, widths))}, {self.precision}{state})"
