"""A chain of linears in FP8 from layer to layer, placed in a model that nobody rewrote.

    [linear -> norm -> activation]*  (-> last linear)            one autograd node; what it computes is in `loka.lowp.chain_function`

The modules of a chain stay where they are and what they are to everybody else: the same objects, parameters, names and state_dict. They change their class (`loka.lowp.chain_modules`), as
`loka.lowp.linear` does: the first linear runs the whole chain, every later module hands on what it is given.

So a chain may lie in an nn.Sequential, in an MLP of one's own, or across attributes that a forward calls one after another: wherever one module's output is read by the next one alone, which
is what `loka.units` looks for. One node and not one per layer, because FP8 tensors cannot travel along autograd's edges: a gradient has its tensor's type.

`Chain` is a plain object beside the modules, not a module: nothing of it enters a state_dict. It holds the links, the scales that are remembered between steps, the frozen weights of a serving
model and the counters that Guard reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from loka.kernels.dropout import check_p
from loka.lowp.chain_function import ChainPrecision, Link
from loka.lowp.chain_handing import HandsOn
from loka.lowp.chain_modules import (  # fmt: skip
    CHAIN,
    SEES_CHAINS,
    Head,
    Passed,
    add_call,
    chain_of,
    chains_of,
    drop_call,
    is_watched,
    reclass,
)
from loka.lowp.chain_running import RunningChain
from loka.lowp.passing import draws_dropout
from loka.lowp.scaling import Scaling
from loka.lowp.step import follow, unfollow

__all__ = ["SEES_CHAINS", "TAP", "Chain", "Part", "Tap", "chain_of", "chains_of", "is_watched"]

TAP = "loka_tap"  # on a linear that somebody watches: who is shown what a chain does that begins there

HEADROOM = Scaling(history=16, margin=1)  # one doubling from step to step saturates nothing


@dataclass(frozen=True, eq=False)
class Part:
    """One link and the modules it consists of.

    Args:
        link: what it computes.
        linear: the nn.Linear.
        norm: the module whose weight, bias and eps the norm has; None without a norm. A batch norm is folded into the linear, and the link has none.
        passed: modules that hand on their input from now on: the norm, the activation, the dropout, identities.
        callers: modules whose forward calls the activation, or a dropout, as a function (`loka.lowp.passing`).
        called: whether one of them calls the activation.
        dropout: the nn.Dropout, whose mode and p say at every call what is drawn; or the module whose forward calls one as a function, with the p of the link. None: there is none.
    """

    link: Link
    linear: nn.Linear
    norm: nn.Module | None = None
    passed: tuple[nn.Module, ...] = ()
    callers: tuple[nn.Module, ...] = ()
    called: bool = False
    dropout: nn.Module | None = None

    def stops(self, p: float) -> int:
        """What is called between this linear and the next, and hands on what it is given, where dropout drops a share of p."""
        return len(self.passed) + self.called + (p > 0 and self.drops_in_call)

    @property
    def folds(self) -> bool:
        """Whether a batch norm is folded into the linear, for serving."""
        return isinstance(self.norm, nn.BatchNorm1d)

    @property
    def drops_in_call(self) -> bool:
        """Whether the dropout is a function that a forward calls, or a module in many places."""
        return self.dropout is not None and all(module is not self.dropout for module in self.passed)

    def find_p(self) -> float:
        """The share that is dropped now."""
        for module in self.passed:
            if module is not self.dropout and isinstance(module, nn.Dropout) and module.training and module.p > 0:
                raise ValueError(
                    f"a dropout behind {self.link.linear} has p {module.p:g} and is in training mode, and the chain was found without it, for serving or with p 0; "
                    "hint: loka.revert(model), and a plan made for training"
                )
        if self.dropout is None or not self.dropout.training or not draws_dropout():
            return 0.0
        p = self.dropout.p if isinstance(self.dropout, nn.Dropout) else self.link.dropout
        return check_p(float(p or 0.0), f"the dropout behind {self.link.linear}")


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
        _check(name, parts)
        super().__init__(name, parts, precision or ChainPrecision(), bounded_input=bounded_input, scaling=scaling)
        self.placed = False
        self.callers = list({id(m): m for part in parts for m in part.callers}.values())
        self.pending = None
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
            reclass(module, Head if index == 0 else Passed)
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
                module.__dict__.pop(CHAIN, None)
                reclass(module, None)
        for caller in self.callers:
            drop_call(caller, self)
        self.placed, self.pending = False, None

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
            bounded = (
                self.bounded_input if begin == 0 else self.links[at].bounded and self.parts[at].dropout is None
            )  # its 1 / (1 - p) knows no bound
            parts = (*self.parts[begin : end - 1], _as_last(self.parts[end - 1]))
            half = Chain(names[begin], parts, self.precision, bounded_input=bounded, scaling=self.scaling)
            half.primed, half.gradients_primed = self.primed, self.gradients_primed
            for mine, theirs in ((half.out, self.out), (half.grad, self.grad)):
                for index, state in enumerate(mine):
                    old = theirs[begin + index]
                    if state is not None and old is not None:
                        state.load(old.state())
                        state.saturated.copy_(old.saturated)
            made.append(half.place() if placed else half)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.placed:
            follow(self)

    def __repr__(self) -> str:
        widths = [self.linears[0].in_features, *(linear.out_features for linear in self.linears)]
        primed = self.primed and self.gradients_primed
        state = ", frozen" if self.frozen is not None else "" if primed else ", scales not known yet"
        return f"Chain({self.name}: {' -> '.join(map(str, widths))}, {self.precision}{state})"


def _check(name: str, parts: Sequence[Part]) -> None:
    if not parts:
        raise ValueError(f"{name}: a chain needs at least one linear")
    width: int | None = None
    for index, part in enumerate(parts):
        linear, link = part.linear, part.link
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"{name}: {link.linear} is a {type(linear).__name__}, expected nn.Linear")
        if width is not None and linear.in_features != width:
            raise ValueError(f"{name}: {link.linear} takes {linear.in_features} features, the layer before it gives {width}")  # fmt: skip
        if link.norm in ("layer", "rms") and index == len(parts) - 1:
            raise ValueError(
                f"{name}: {link.linear} is the last linear; its {link.norm} norm stays outside of the chain"
            )
        width = linear.out_features


def _as_last(part: Part) -> Part:
    """A part that ends a chain: a norm over the whole row runs as a module of its own, and what follows it; so does a dropout with nothing in front of it, as the library's GEMM draws none."""
    alone = part.link.plain and part.dropout is not None
    return Part(Link(part.link.linear), part.linear) if alone or part.link.norm in ("layer", "rms") else part
