"""Mixing: another forward for one module, by putting a class in front of its own.

    mix(Block, Reordered)     a class called Block, whose methods are Reordered's first and Block's second

The module stays the object it was, with its children, parameters and attributes, so a state_dict does not change and undoing is taking the class in front away.
A class made here has no name that can be imported, so it is pickled as what it was made of; modified models can be pickled, deep-copied and saved with
torch.save like any other.
"""

import copyreg
from typing import Any

from torch import nn

_PARTS = "_loka_mixed"  # on a class made here: (mixin, kind)


class _Made(type):
    """The type of the classes made here, by which pickle knows them."""


_METAS: dict[type, type] = {type: _Made}
_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def mix(kind: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """A subclass of both, the same one for every call.

    Args:
        kind: the class of a module.
        mixin: what goes in front of it; its forward may call `super().forward`.

    Returns:
        A class with the name of `kind`, which can be pickled where `kind` can.

    Example:
        >>> block.__class__ = mix(type(block), WideEntrance)
    """
    key = (kind, mixin)
    if key not in _CLASSES:
        body = {"__module__": kind.__module__, "__doc__": kind.__doc__, _PARTS: (mixin, kind)}
        _CLASSES[key] = _meta_for(type(kind))(kind.__name__, (mixin, kind), body)
    return _CLASSES[key]


def declare_mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> None:
    """Say that a mixin which is itself derived from `kind` is what the two mixed are.

    Args:
        mixin: a subclass of `kind`.
        kind: what it is put in front of.
    """
    setattr(mixin, _PARTS, (mixin, kind))
    _CLASSES[kind, mixin] = mixin


def _meta_for(meta: type) -> type:
    """A metaclass that pickle knows and that gets on with the user's own (abc.ABCMeta)."""
    if isinstance(meta, type) and issubclass(meta, _Made):
        return meta
    if meta not in _METAS:
        _METAS[meta] = type("_Made", (_Made, meta), {})
        copyreg.pickle(_METAS[meta], _reduce)
    return _METAS[meta]


def _reduce(made: type) -> Any:
    """A class made here is pickled by its parts, one that somebody derived from it by its name."""
    parts = vars(made).get(_PARTS)
    return made.__qualname__ if parts is None else (mix, (parts[1], parts[0]))


copyreg.pickle(_Made, _reduce)


def unmixed(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that somebody wrote, behind all that were put in front of it: its forward has the arguments' names.

    Args:
        kind: the class of a module.
    """
    while (parts := vars(kind).get(_PARTS)) is not None:
        kind = parts[1]
    return kind


def unmix(kind: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """The class without a mixin, whatever was put in front of it since: another mixin, a converted linear's class, FSDP2's.

    Args:
        kind: the class of a module now.
        mixin: what `mix` put in front of it.

    Returns:
        The class it would have without.

    Raises:
        ValueError: the mixin is not there.
    """
    parts = vars(kind).get(_PARTS)
    if parts is not None:
        own, rest = parts
        return rest if own is mixin else mix(unmix(rest, mixin), own)
    bases = tuple(unmix(base, mixin) if issubclass(base, mixin) else base for base in kind.__bases__)
    if bases == kind.__bases__:
        raise ValueError(f"{kind.__name__} is no {mixin.__name__} any more, so this change cannot be taken back")
    body = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    meta: Any = type(kind)
    made: type[nn.Module] = meta(kind.__name__, bases, body)
    return made
