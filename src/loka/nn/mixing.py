"""Change the forward of a module by mixing a class into its own.

    mix(Block, Reordered)     a class called Block that derives from Reordered and Block, in this order

The module keeps its identity, children, parameters and attributes, so its state_dict does not change, and removing the
mixin undoes the change. Mixed classes cannot be imported by name, so they are pickled by their parts; modified models
can be pickled, deep-copied and saved with torch.save like any other.
"""

import copyreg
import inspect
from functools import update_wrapper
from types import FunctionType
from typing import Any

from torch import nn

_PARTS = "_loka_mixed"  # attribute of a mixed class: (mixin, kind)


class _Made(type):
    """The metaclass of mixed classes, by which pickle recognizes them."""


_METAS: dict[type, type] = {type: _Made}
_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def mix(kind: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of both, the same one for every call, with the name of `kind`; pickled if `kind` can be.

    `mixin` takes precedence; its forward may call `super().forward`.
    """
    key = (kind, mixin)
    if key not in _CLASSES:
        body = {"__module__": kind.__module__, "__doc__": kind.__doc__, _PARTS: (mixin, kind), **_make_forward(mixin, kind)}  # fmt: skip
        _CLASSES[key] = _meta_for(type(kind))(kind.__name__, (mixin, kind), body)
    return _CLASSES[key]


def _make_forward(mixin: type[nn.Module], kind: type[nn.Module]) -> dict[str, Any]:
    """Return a forward that runs the mixin's or, once the mixin was removed, the module's own; {} if it has none.

    A forward outlives its mixin where it was kept: `model.forward = torch.compile(model.forward)`, then a revert. If the
    mixin's takes `(*args, **kwargs)`, it has the argument names of the module's own, which
    `torch.export(dynamic_shapes={"x": ...})` and `torch.fx` read.
    """
    own: Any = mixin.forward
    if own is nn.Module.forward:
        return {}

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, mixin):
            return type(self).forward(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    # code of its own: torch.compile limits how often one code object is compiled
    made = update_wrapper(
        FunctionType(forward.__code__.replace(), globals(), "forward", None, forward.__closure__), own
    )
    kinds = [parameter.kind for parameter in inspect.signature(own).parameters.values()][1:]
    if kinds == [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        made.__wrapped__ = kind.forward
    return {"forward": made}


def declare_mixed(mixin: type[nn.Module], kind: type[nn.Module]) -> None:
    """Declare that `mix(kind, mixin)` is the mixin itself, which must be a subclass of `kind`."""
    setattr(mixin, _PARTS, (mixin, kind))
    _CLASSES[kind, mixin] = mixin


def _meta_for(meta: type) -> type:
    """Return a metaclass that pickle recognizes and that is compatible with the user's own (abc.ABCMeta)."""
    if isinstance(meta, type) and issubclass(meta, _Made):
        return meta
    if meta not in _METAS:
        _METAS[meta] = type("_Made", (_Made, meta), {})
        copyreg.pickle(_METAS[meta], _reduce)
    return _METAS[meta]


def _reduce(made: type) -> Any:
    """Pickle a mixed class by its parts, and a class derived from one by its name."""
    parts = vars(made).get(_PARTS)
    return made.__qualname__ if parts is None else (mix, (parts[1], parts[0]))


copyreg.pickle(_Made, _reduce)


def unmixed(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the original class without any mixins; the signature of its forward has the argument names."""
    while (parts := vars(kind).get(_PARTS)) is not None:
        kind = parts[1]
    return kind


def unmix(kind: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """Return a class without a mixin, even if others were added since: a mixin, a converted linear's class, FSDP2's."""
    parts = vars(kind).get(_PARTS)
    if parts is not None:
        own, rest = parts
        return rest if own is mixin else mix(unmix(rest, mixin), own)
    bases = tuple(unmix(base, mixin) if issubclass(base, mixin) else base for base in kind.__bases__)
    if bases == kind.__bases__:
        raise ValueError(f"{kind.__name__} no longer has the mixin {mixin.__name__}, so this change cannot be undone")
    body = {key: value for key, value in vars(kind).items() if key not in ("__dict__", "__weakref__")}
    meta: Any = type(kind)
    made: type[nn.Module] = meta(kind.__name__, bases, body)
    return made
