"""A chain of linears in FP8 from layer to layer, placed in a model that nobody rewrote.

    [linear -> norm -> activation]*  (-> last linear)            one autograd node; what it computes is in `loka.lowp.chain_function`

The modules of a chain stay where they are and what they are to everybody else: the same objects, parameters, names and state_dict. They change their class (`loka.lowp.chain_modules`), as
`loka.lowp.linear` does: the first linear runs the whole chain, every later module computes nothing.

So a chain may lie in an nn.Sequential, in an MLP of one's own, or across attributes that a forward calls one after another: wherever one module's output is read by the next one alone, which
is what `loka.units` looks for. One node and not one per layer, because FP8 tensors cannot travel along autograd's edges: a gradient has its tensor's type.

`Chain` is a plain object beside the modules, not a module: nothing of it enters a state_dict. It holds the links, the scales that are remembered between steps, the frozen weights of a serving
model and the counters that Guard reads.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from loka.lowp.chain_function import ChainPrecision
from loka.lowp.chain_handing import HandsOn
from loka.lowp.chain_modules import (
    CHAIN,
    SEES_CHAINS,
    Head,
    Passed,
    add_call,
    chain_of,
    chains_of,
    drop_call,
    is_watched,
)
from loka.lowp.chain_parts import ChainConfig, Part
from loka.lowp.chain_running import RunningChain
from loka.lowp.scaling import Scaling
from loka.lowp.step import follow, unfollow
from loka.nn.mixing import mix, unmix

__all__ = ["SEES_CHAINS", "TAP", "Chain", "Part", "Tap", "chain_of", "chains_of", "is_watched"]

TAP = "loka_tap"  # on a linear that somebody watches: who is shown what a chain does that begins there

HEADROOM = Scaling(history=16, margin=1)  # one doubling from step to step saturates nothing


class Tap(Protocol):
    """Who watches a chain. It is asked in the steps in which it is on, and changes no number."""

    @property
    def on(self) -> bool:
        """Whether the step now running has a look."""

    def see(self, chain: "Chain", x: Tensor, y: Tensor, seed: Tensor | None) -> Tensor:
        """One call: what came in, what went out, what dropout was drawn from. Returns y, or the same numbers in a tensor whose gradient passes by."""


class Chain(RunningChain, HandsOn):
    """Linears that run in FP8 from one to the next.

    Args:
        name: of the unit, for records and messages.
        parts: first to last.
        precision: how it computes.
        bounded_input: x comes out of a BlockNorm: it has a static scale.
        scaling: how scales are remembered between steps.

    Example:
        >>> chain = Chain("top", [Part(Link("top.0", activation="relu"), model.top[0], passed=(model.top[1],)), Part(Link("top.2"), model.top[2])])
        >>> chain.place()
        >>> model(x)  # runs in FP8
        >>> chain.release()
    """

    @torch.inference_mode(False)  # its scales outlive the block they are made in
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
        self.forget()
        self._at = self._met = 0
        self._dropping = (0.0,) * len(parts)
        self.around: nn.Module | None = None  # the layer whose interactions are fused around it

    @property
    def tap(self) -> Tap | None:
        """Who watches its head."""
        tap: Tap | None = self.linears[0].__dict__.get(TAP)
        return tap

    def run(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the input's type, or autocast's where it is on."""
        y, seed = self.compute(x)
        tap = self.tap
        return y if tap is None or not tap.on else tap.see(self, x, y, seed)

    def place(self) -> "Chain":
        """Change the classes of its modules. Refuses modules that somebody watches, naming them."""
        modules = [m for part in self.parts for m in (part.linear, *part.passed)]
        watched = [part.link.linear for part in self.parts if is_watched(part.linear)]
        watched += [
            f"{type(m).__name__} behind {part.link.linear}" for part in self.parts for m in part.passed if is_watched(m)
        ]
        if watched:
            raise ValueError(f"{self.name}: {', '.join(watched)} has forward or backward hooks that would see other tensors; hint: remove them first")  # fmt: skip
        if len({id(m) for m in modules}) < len(modules):
            raise ValueError(f"{self.name}: one module stands in it twice; a module of a chain is called once")
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
        """The modules are what they were; parameters keep what was trained."""
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
        """Put one linear back to high precision; what stands before and behind it stays in FP8.

        Args:
            site: the linear's name.

        Returns:
            The chains that are placed now: none, one or two. Scales go on from where they were.
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
            # its 1 / (1 - p) knows no bound
            bounded = self.bounded_input if begin == 0 else self.links[at].bounded and self.parts[at].dropout is None
            parts = (*self.parts[begin : end - 1], self.parts[end - 1].as_last())
            half = Chain(names[begin], parts, self.precision, bounded_input=bounded, scaling=self.scaling)
            half.primed, half.gradients_primed = self.primed, self.gradients_primed
            half.input = self.input if begin == 0 else None
            for mine, theirs in ((half.out, self.out), (half.grad, self.grad)):
                for index, state in enumerate(mine):
                    old = theirs[begin + index]
                    if state is not None and old is not None:
                        state.load(old.state())
                        state.saturated.copy_(old.saturated)
            made.append(half.place() if placed else half)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pending": None, "_result": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.placed:
            follow(self)

    def __repr__(self) -> str:
        widths = [self.linears[0].in_features, *(linear.out_features for linear in self.linears)]
        primed = self.primed and self.gradients_primed
        state = ", frozen" if self.frozen is not None else "" if primed else ", scales not known yet"
        return f"Chain({self.name}: {' -> '.join(map(str, widths))}, {self.precision}{state})"
