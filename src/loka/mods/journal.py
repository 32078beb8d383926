"""Journal: every single change a mod makes, as a step that can be undone and repeated on a checkpoint.

    Swap         replace a module
    Reclass      add a mixin with another forward to a module; children and parameters stay
    Exchange     exchange the places of two modules
    Hook         register a hook that changes a module's inputs or outputs
    Drop         set a parameter to None
    Fold         move one parameter's values into another: a gain into the next linear's weight, a shift into its bias
    Mark         set an attribute that other tools read
    Add          add a child that uses parameters of its parent
    PlacedUnit   run linears as a chain

The journal is stored on the model, outside of its state_dict, and undone in reverse order. Undoing a fold restores the
original bits if the target was not trained since. Otherwise the target keeps what it absorbed, and the source is
restored as neutral (gain 1, shift 0): the same function, and no training is lost.
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
        """Do nothing."""


@dataclass
class Swap:
    """`old`, registered under all of `names`, was replaced."""

    names: tuple[str, ...]
    old: nn.Module
    lost: tuple[str, ...] = ()  # entries of its state_dict that the new module does not have

    def undo(self, model: nn.Module) -> None:
        """Put the old module back, on the model's current device."""
        new = model.get_submodule(self.names[0])
        _move_to_device_of(model, self.old)
        self.old.train(new.training)
        # a replacement with its own parameters copies their values back
        if (restore := getattr(new, "restore", None)) is not None:
            restore(self.old)
        for name in self.names:
            put_module(model, name, self.old)

    def adapt(self, state: MutableMapping[str, Tensor]) -> None:
        """Remove the lost entries. Values that moved elsewhere were moved by an earlier Fold."""
        for name in self.names:
            for key in self.lost:
                state.pop(f"{name}.{key}", None)


@dataclass
class Reclass(_SameState):
    """`mixin` was added in front of the class of the module `name`."""

    name: str
    mixin: type[nn.Module]
    added: tuple[str, ...] = ()  # attributes that were set with it

    def undo(self, model: nn.Module) -> None:
        """Restore the original class."""
        module = model.get_submodule(self.name)
        module.__class__ = unmix(type(module), self.mixin)
        for attribute in self.added:
            module.__dict__.pop(attribute, None)


@dataclass
class Exchange(_SameState):
    """Two modules exchanged places; neither has entries in the state_dict."""

    first: str
    second: str

    def apply_to(self, model: nn.Module) -> None:
        """Exchange the modules."""
        first, second = model.get_submodule(self.first), model.get_submodule(self.second)
        put_module(model, self.first, second)
        put_module(model, self.second, first)

    undo = apply_to


@dataclass
class Hook(_SameState):
    """A hook was registered on the module `name`: a forward-pre hook with kwargs (`before`) or a forward hook."""

    name: str
    hook: Callable[..., Any]
    before: bool

    def apply_to(self, model: nn.Module) -> None:
        """Register the hook."""
        module = model.get_submodule(self.name)
        if self.before:
            module.register_forward_pre_hook(self.hook, with_kwargs=True)
        else:
            module.register_forward_hook(self.hook, with_kwargs=getattr(self.hook, "with_kwargs", False))

    def undo(self, model: nn.Module) -> None:
        """Remove the hook, found by identity: a copy of the model has the hook but not its handle."""
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
        """Register the parameter again, on the module's current device."""
        module = model.get_submodule(self.names[0])
        like = next(module.parameters(), None)
        if like is not None and self.old.device != like.device:
            self.old.data = self.old.data.to(like.device)
        module.register_parameter(self.attribute, self.old)

    def adapt(self, state: MutableMapping[str, Tensor]) -> None:
        """Remove the parameter's entries."""
        for name in self.names:
            state.pop(f"{name}.{self.attribute}", None)


@dataclass
class Fold:
    """A gain or shift `source` was folded into the linear `target`, which reads `repeat` copies of its channels.

    gain: W <- W diag(g);    shift: b <- b + W s, with W before any gain was folded.
    """

    source: str  # key in the state_dict
    target: str  # name of the linear
    kind: Literal["gain", "shift"]
    repeat: int = 1
    saved: Tensor | None = field(default=None, repr=False)

    def apply(self, state: MutableMapping[str, Tensor]) -> None:
        """Fold within a state_dict."""
        key = self._key
        if self.source in state and key in state:
            state[key] = self._compute(state[key], state[f"{self.target}.weight"], state[self.source])

    adapt = apply

    def apply_to(self, model: nn.Module) -> None:
        """Fold within a model, and save the target's values."""
        state = _tensors(model)
        self.saved = state[self._key].clone()
        _write(model, self._key, self._compute(self.saved, state[f"{self.target}.weight"], state[self.source]))

    def undo(self, model: nn.Module) -> None:
        """Restore the saved values, or make the source neutral if the target was trained since."""
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
        # Not a matrix product: its rounding in BLAS depends on the operands' memory layout, and undo compares bits.
        return (value.double() + (weight.double() * channels).sum(-1)).to(value.dtype)


@dataclass
class Mark(_SameState):
    """An attribute of a module was set; `old` is its previous value, None if there was none."""

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
    """A module without parameters of its own was registered as `child` of the module `name`."""

    name: str
    child: str

    def undo(self, model: nn.Module) -> None:
        """Remove the child."""
        del model.get_submodule(self.name)._modules[self.child]


@dataclass
class PlacedUnit(_SameState):
    """These linears run as a chain, or as several if Guard has split it; `around` is a layer fused with the chain."""

    linears: tuple[str, ...]
    around: str | None = None

    def undo(self, model: nn.Module) -> None:
        """Release the linears to high precision."""
        modules = dict(named_sites(model))  # units use plain names
        if self.around is not None:
            release_interaction(modules[self.around])
        for name in self.linears:
            chain = chain_of(modules[name])
            if chain is not None:
                chain.release()


Step = Swap | Reclass | Exchange | Hook | Drop | Fold | Mark | Add | PlacedUnit


def journal_of(model: nn.Module) -> list[Step]:
    """Return the steps taken on a model, oldest first; empty for a model without mods."""
    steps: list[Step] = model.__dict__.setdefault(ATTRIBUTE, [])
    return steps


def names_of(model: nn.Module, module: nn.Module) -> tuple[str, ...]:
    """Return every name that a module is registered under."""
    return tuple(name for name, found in model.named_modules(remove_duplicate=False) if found is module)


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module under an existing dotted name."""
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
    """Let a new module without hooks share those of the module it replaces. A handle then removes a hook from both."""
    for name in _HOOKS:
        new.__dict__[name] = old.__dict__[name]
    new.__dict__["_is_full_backward_hook"] = old.__dict__["_is_full_backward_hook"]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def _write(model: nn.Module, key: str, value: Tensor) -> None:
    with torch.no_grad():
        model.get_parameter(key).copy_(value)


def _move_to_device_of(model: nn.Module, module: nn.Module) -> None:
    like = next(model.parameters(), None)
    own = next(module.parameters(), None)
    if like is not None and own is not None and own.device != like.device:
        module.to(like.device)


def undo_to(model: nn.Module, length: int = 0) -> int:
    """Undo every step after the first `length`, newest first, and return how many were undone."""
    steps = journal_of(model)
    count = 0
    while len(steps) > length:
        steps.pop().undo(model)
        count += 1
    if not steps:
        model.__dict__.pop(ATTRIBUTE, None)
    return count
