"""Interception: change what goes into a module or comes out of it, while its own forward runs as it was written.

    WidenInputs      some arguments in float32
    WidenOutputs     what it returns in float32
    Normalize        some arguments, or what it returns, normalised by a norm that stands elsewhere

A forward that is traced and compiled anew keeps the path it took while it was traced: a dropout that looks at `self.training`, an optional argument, a flag. Hooks
keep nothing: the user's Python runs on every call. They are plain objects, so a model that carries them can be pickled and copied.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Key = int | str  # an argument by position or by name


def widen(value: Any) -> Any:
    """Floating-point tensors in at least float32, in any nest of containers; everything else as it is."""
    return tree_map(_widen, value)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.promote_types(value.dtype, torch.float32))
    return value


class WidenInputs:
    """A forward-pre hook: the arguments `keys` in float32."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments, some of them raised."""
        return _change(args, kwargs, self.keys, widen)


class WidenOutputs:
    """A forward hook: the result in float32."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The result, raised."""
        return widen(output)


class Normalize:
    """A hook that runs a norm whose own call now does nothing (`Elsewhere`)."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def normalize(self, value: Any) -> Any:
        """What the norm computed when it stood where it was."""
        return self.norm.normalize(value)  # type: ignore[operator]


class NormalizeInputs(Normalize):
    """A forward-pre hook: the arguments `keys`, which are all the same tensor, normalised."""

    def __init__(self, norm: nn.Module, keys: tuple[Key, ...]) -> None:
        super().__init__(norm)
        self.keys = keys

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments, some of them normalised, once for all."""
        first = self.keys[0]
        done = self.normalize(args[first] if isinstance(first, int) else kwargs[first])
        return _change(args, kwargs, self.keys, lambda _: done)


class NormalizeOutput(Normalize):
    """A forward hook: the result normalised."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """The result, normalised."""
        return self.normalize(output)


class Elsewhere(nn.Module):
    """Mixed in front of a norm that a hook runs at another place: called where it stood, it hands on what it is given."""

    def forward(self, x: Any) -> Any:
        """Nothing."""
        return x

    def normalize(self, x: Any) -> Any:
        """What the norm computes."""
        return super().forward(x)

    def extra_repr(self) -> str:
        """That it has moved."""
        return f"{super().extra_repr()}, moved".lstrip(", ")


class Reordered(nn.Module):
    """Mixed in front of an nn.Sequential: its parts, in another order. Their names stay, so the state_dict does."""

    def forward(self, x: Any) -> Any:
        """One part after another."""
        for name in self.__dict__.get("loka_order", tuple(self._modules)):
            x = self._modules[name](x)  # type: ignore[misc]
        return x

    def extra_repr(self) -> str:
        """The order."""
        return f"order: {', '.join(self.__dict__.get('loka_order', ()))}"


def _change(args: tuple[Any, ...], kwargs: dict[str, Any], keys: tuple[Key, ...], function: Any) -> Any:
    """Arguments with some of them changed; one that this call does not have is nobody's."""
    new_args = tuple(function(value) if index in keys else value for index, value in enumerate(args))
    return new_args, {name: function(value) if name in keys else value for name, value in kwargs.items()}
