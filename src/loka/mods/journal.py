"""Journal: every single change a mod makes, as a value that can be undone and that knows what it does to a checkpoint.

    Swap      another module under the same name
    Reclass   the same module with another forward: a class is put in front of its own, children and parameters stay
    Exchange  two modules under each other's names
    Hook      what goes into a module or comes out of it is changed, its forward runs as it was written
    Drop      a parameter that is no more
    Fold      the values of one parameter moved into another: a gain into the weight of the next linear, a shift into its bias
    Mark      a note on a module that other tools read
    Add       a child that a module had not, over parameters that it has
    PlacedUnit   linears that run in a chain

The journal lives on the model, outside of its state_dict. `undo` restores in the opposite order. A fold is undone by bits while nobody has trained the
target; afterwards the trained target keeps what it absorbed, and the source comes back neutral (gain 1, shift 0): the same function, no training lost.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from loka.lowp.chain import chain_of
from loka.lowp.interaction import release_interaction
from loka.nn.mixing import unmix
from loka.nn.wrapping import named_sites

ATTRIBUTE = "_loka_mods"


class _SameState:
    """A step that leaves every entry of a state_dict as it is."""

    def adapt(self, state: MutableMapping[str, Tensor]) -> None:
        """Nothing is to be changed in a checkpoint."""


@dataclass
class Swap:
    """`old`, registered under all of `names`, was replaced."""

    names: tuple[str, ...]
    old: nn.Module
    lost: tuple[str, ...] = ()  # entries of its state_dict that the new one has not

    def undo(self, model: nn.Module) -> None:
        """Put the old module back, where the model is now."""
        new = model.get_submodule(self.names[0])
        _follow(self.old, model)
        self.old.train(new.training)
        # a module with parameters of its own hands its values back
        if (restore := getattr(new, "restore", None)) is not None:
            restore(self.old)
        for name in self.names:
            put_module(model, name, self.old)

    def adapt(self, state: MutableMapping[str, Tensor]) -> None:
        """What the new module has not is forgotten; values that live on elsewhere have been moved by a Fold before."""
        for name in self.names:
            for key in self.lost:
                state.pop(f"{name}.{key}", None)


@dataclass
class Reclass(_SameState):
    """`mixin` was put in front of the class of the module `name`."""

    name: str
    mixin: type[nn.Module]
    added: tuple[str, ...] = ()  # attributes it brought

    def undo(self, model: nn.Module) -> None:
        """The old forward again."""
        module = model.get_submodule(self.name)
        module.__class__ = unmix(type(module), self.mixin)
        for attribute in self.added:
            module.__dict__.pop(attribute, None)


@dataclass
class Exchange(_SameState):
    """The modules of two names changed places; neither has anything in the state_dict."""

    first: str
    second: str

    def apply_to(self, model: nn.Module) -> None:
        """Change places."""
        first, second = model.get_submodule(self.first), model.get_submodule(self.second)
        put_module(model, self.first, second)
        put_module(model, self.second, first)

    undo = apply_to


@dataclass
class Hook(_SameState):
    """A hook was registered on the module `name`: before its forward, with keyword arguments, or behind it."""

    name: str
    hook: Callable[..., Any]
    before: bool

    def apply_to(self, model: nn.Module) -> None:
        """Register it."""
        module = model.get_submodule(self.name)
        if self.before:
            module.register_forward_pre_hook(self.hook, with_kwargs=True)
        else:
            module.register_forward_hook(self.hook, with_kwargs=getattr(self.hook, "with_kwargs", False))

    def undo(self, model: nn.Module) -> None:
        """Remove it; found by identity, because a copy of the model has the hook and not the handle."""
        module = model.get_submodule(self.name)
        hooks = module._forward_pre_hooks if self.before else module._forward_hooks
        for number in [number for number, hook in hooks.items() if hook is self.hook]:
            del hooks[number]
            module._forward_pre_hooks_with_kwargs.pop(number, None)
            module._forward_hooks_with_kwargs.pop(number, None)


@dataclass
class Drop:
    """The parameter `attribute` of a module, registered under all of `names`, was set to None."""

    names: tuple[str, ...]
    attribute: str
    old: nn.Parameter

    def undo(self, model: nn.Module) -> None:
        """Register it again."""
        module = model.get_submodule(self.names[0])
        like = next(module.parameters(), None)
        if like is not None and self.old.device != like.device:
            self.old.data = self.old.data.to(like.device)
        module.register_parameter(self.attribute, self.old)

    def adapt(self, state: MutableMapping[str, Tensor]) -> None:
        """Forget it."""
        for name in self.names:
            state.pop(f"{name}.{self.attribute}", None)


@dataclass
class Fold:
    """What `source` did to its channels is done by the linear `target`, which reads `repeat` copies of them.

    gain: W <- W diag(g);    shift: b <- b + W s, with the W of before any gain.
    """

    source: str  # entry of the state_dict
    target: str  # name of the linear
    kind: Literal["gain", "shift"]
    repeat: int = 1
    saved: Tensor | None = field(default=None, repr=False)

    def apply(self, state: MutableMapping[str, Tensor]) -> None:
        """Do it to a mapping of names to tensors."""
        key = self._key
        if self.source in state and key in state:
            state[key] = self._compute(state[key], state[f"{self.target}.weight"], state[self.source])

    adapt = apply

    def apply_to(self, model: nn.Module) -> None:
        """Do it to a model, and remember the target's values."""
        state = _tensors(model)
        self.saved = state[self._key].clone()
        _write(model, self._key, self._compute(self.saved, state[f"{self.target}.weight"], state[self.source]))

    def undo(self, model: nn.Module) -> None:
        """The saved values, or a neutral source where the target has been trained since."""
        state = _tensors(model)
        assert self.saved is not None
        saved = self.saved.to(state[self._key].device)
        weight = saved if self.kind == "gain" else state[f"{self.target}.weight"]
        folded = self._compute(saved, weight, state[self.source])
        if torch.equal(folded.to(saved.dtype), state[self._key]):
            _write(model, self._key, saved)
        else:
            neutral = torch.ones_like if self.kind == "gain" else torch.zeros_like
            _write(model, self.source, neutral(state[self.source]))

    @property
    def _key(self) -> str:
        return f"{self.target}.{'weight' if self.kind == 'gain' else 'bias'}"

    def _compute(self, value: Tensor, weight: Tensor, source: Tensor) -> Tensor:
        channels = source.detach().to(weight.device, torch.float64).repeat(self.repeat)
        if self.kind == "gain":
            return (value.double() * channels).to(value.dtype)
        # A sum of products and not a matrix product: BLAS rounds by how its operands lie in memory, and undo compares bits.
        return (value.double() + (weight.double() * channels).sum(-1)).to(value.dtype)


@dataclass
class Mark(_SameState):
    """The attribute of a module was set; `old` is what it was, None where there was none."""

    name: str
    attribute: str
    old: Any = None

    def undo(self, model: nn.Module) -> None:
        """Put the old value back."""
        module = model.get_submodule(self.name)
        if self.old is None:
            module.__dict__.pop(self.attribute, None)
        else:
            setattr(module, self.attribute, self.old)


@dataclass
class Add(_SameState):
    """A module was registered as `child` of the module `name`; it brought no parameter of its own."""

    name: str
    child: str

    def undo(self, model: nn.Module) -> None:
        """Take it away."""
        del model.get_submodule(self.name)._modules[self.child]


@dataclass
class PlacedUnit(_SameState):
    """These linears run in chains, perhaps with the interactions of a layer around them; Guard may have split what was placed."""

    linears: tuple[str, ...]
    around: str | None = None

    def undo(self, model: nn.Module) -> None:
        """High precision again."""
        modules = dict(named_sites(model))  # units are spelled in plain names
        if self.around is not None:
            release_interaction(modules[self.around])
        for name in self.linears:
            chain = chain_of(modules[name])
            if chain is not None:
                chain.release()


Step = Swap | Reclass | Exchange | Hook | Drop | Fold | Mark | Add | PlacedUnit


def journal_of(model: nn.Module) -> list[Step]:
    """The steps taken on a model, oldest first; empty for a model without mods."""
    steps: list[Step] = model.__dict__.setdefault(ATTRIBUTE, [])
    return steps


def names_of(model: nn.Module, module: nn.Module) -> tuple[str, ...]:
    """Every name a module is registered under."""
    return tuple(name for name, found in model.named_modules(remove_duplicate=False) if found is module)


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module under a dotted name that exists."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def share_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hooks on a module that is replaced go on seeing what it is given and returns; a handle removes them from both.

    Args:
        old: the module that goes.
        new: the one that comes, without hooks of its own.
    """
    for name in _HOOKS:
        new.__dict__[name] = old.__dict__[name]
    new.__dict__["_is_full_backward_hook"] = old.__dict__["_is_full_backward_hook"]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def _write(model: nn.Module, key: str, value: Tensor) -> None:
    with torch.no_grad():
        model.get_parameter(key).copy_(value)


def _follow(old: nn.Module, model: nn.Module) -> None:
    """Move a module that was set aside to where the model has gone meanwhile."""
    like = next(model.parameters(), None)
    own = next(old.parameters(), None)
    if like is not None and own is not None and own.device != like.device:
        old.to(like.device)


def undo_to(model: nn.Module, length: int = 0) -> int:
    """Undo every step beyond the first `length`, newest first; returns how many those were."""
    steps = journal_of(model)
    count = 0
    while len(steps) > length:
        steps.pop().undo(model)
        count += 1
    if not steps:
        model.__dict__.pop(ATTRIBUTE, None)
    return count
