"""Hooks that change a module's inputs or outputs, while its own forward runs as written.

    WidenInputs      cast some arguments to float32
    WidenOutputs     cast the output to float32
    Normalize        apply a norm that belongs elsewhere to some arguments or to the output

A traced forward would freeze the path taken during tracing: a dropout that checks `self.training`, an optional
argument, a flag. With hooks the user's Python runs on every call. The hooks are plain objects, so the model can be
pickled and copied.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Key = int | str  # an argument by position or by name


def widen(value: Any) -> Any:
    """Cast floating-point tensors in any nested containers to at least float32."""
    return tree_map(_widen, value)


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.promote_types(value.dtype, torch.float32))
    return value


class WidenInputs:
    """A forward-pre hook that casts the arguments `keys` to float32."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with those in `keys` cast."""
        return _change(args, kwargs, self.keys, widen)


class WidenOutputs:
    """A forward hook that casts the output to float32."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output, cast."""
        return widen(output)


class Normalize:
    """Base of hooks that run a norm whose own call is now a no-op (`Elsewhere`)."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm

    def normalize(self, value: Any) -> Any:
        """Apply the norm's original forward."""
        return self.norm.normalize(value)  # type: ignore[operator]


class NormalizeInputs(Normalize):
    """A forward-pre hook that normalizes the arguments `keys`, which are all the same tensor."""

    def __init__(self, norm: nn.Module, keys: tuple[Key, ...]) -> None:
        super().__init__(norm)
        self.keys = keys

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Normalize the tensor once, and return the arguments with it in every place."""
        first = self.keys[0]
        done = self.normalize(args[first] if isinstance(first, int) else kwargs[first])
        return _change(args, kwargs, self.keys, lambda _: done)


class NormalizeOutput(Normalize):
    """A forward hook that normalizes the output."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output, normalized."""
        return self.normalize(output)


class Elsewhere(nn.Module):
    """Mixin for a norm that a hook runs in another place: its own call returns the input unchanged."""

    def forward(self, x: Any) -> Any:
        """Return the input."""
        return x

    def normalize(self, x: Any) -> Any:
        """Apply the norm's original forward."""
        return super().forward(x)

    def extra_repr(self) -> str:
        """Show that the norm has moved."""
        return f"{super().extra_repr()}, moved".lstrip(", ")


class Reordered(nn.Module):
    """Mixin for an nn.Sequential that runs its children in another order. Names and state_dict do not change."""

    def forward(self, x: Any) -> Any:
        """Run the children in the new order."""
        for name in self.__dict__.get("loka_order", tuple(self._modules)):
            x = self._modules[name](x)  # type: ignore[misc]
        return x

    def extra_repr(self) -> str:
        """Show the order."""
        return f"order: {', '.join(self.__dict__.get('loka_order', ()))}"


def _change(args: tuple[Any, ...], kwargs: dict[str, Any], keys: tuple[Key, ...], function: Any) -> Any:
    """Apply a function to the arguments in `keys`. Keys that this call does not have are ignored."""
    new_args = tuple(function(value) if index in keys else value for index, value in enumerate(args))
    return new_args, {name: function(value) if name in keys else value for name, value in kwargs.items()}
