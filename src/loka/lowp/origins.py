"""Tell a module how its input was made, while the forward around it is compiled: joined from parts, or normalized.

What a linear or a chain reads was often made for it alone: a concatenation, or a norm and an activation. If it knows the
parts, or the norm's input, it can compute its result from these, and the compiler drops the tensor that nobody reads any
more. The user's forward still makes that tensor, so nothing depends on its being dropped. Eager calls tell nothing.

The mods `narrow_outputs` and `normed_inputs` find out on an example who may ask (`loka.mods.origins`).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.kernels.activation import LEAK
from loka.lowp.passing import spell_call
from loka.nn.sharing import Shared, is_valid, run_sharing, take_stamp

ORIGINS = "loka_input_origins"  # attribute of a module that may ask for the origin of its input: the Origins
SEEN = "loka_origins"  # attribute of the module that contains it and what makes the input: (the same Origins,)
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_LAYER, _RMS = (F.layer_norm, torch.layer_norm), (F.rms_norm, torch.rms_norm)  # compiled code shows either
WIDE = 1024  # a compiler keeps narrower rows in registers, and needs no help with a norm over them
_RECENT = 8  # tensors whose origin is remembered: what a linear reads was made shortly before


class Joined(NamedTuple):
    """Tensors that were concatenated along the last dimension."""

    parts: tuple[Tensor, ...]


class Normed(NamedTuple):
    """activation(norm(x) * weight + bias), where the norm is over the last dimension."""

    x: Tensor
    norm: str  # "layer" or "rms"
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    activation: str = "none"


Origin = Joined | Normed


class Origins(Shared):
    """How the latest concatenations, norms and activations behind norms were made."""

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, Origin, str]] = []  # with the stamp of a graph (`loka.nn.writing`)

    def forget(self) -> None:
        """Discard all tensors, which may have changed."""
        self.made = []

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember a tensor that was joined or normalized."""
        origin = self.read(func, args, kwargs, out)
        if origin is not None:
            self.made = [*self.made[1 - _RECENT :], (out, origin, take_stamp())]

    def find(self, x: Tensor) -> Origin | None:
        """Return how exactly this tensor was made; None if that is not known, or gradients are enabled."""
        if not self.open or not torch.compiler.is_compiling() or torch.is_grad_enabled():
            return None
        return self._find(x)

    def _find(self, x: Any) -> Origin | None:
        for tensor, origin, stamp in self.made:
            if tensor is x:
                return origin if is_valid(stamp) else None
        return None

    def read(self, func: Any, args: Any, kwargs: Any, out: Any) -> Origin | None:
        """Return how a function made `out`, if that is worth remembering."""
        if func in _JOINS:
            return _read_join(args, kwargs, out)
        if func in _LAYER:
            return _read_norm("layer", args, kwargs)
        if func in _RMS:
            return _read_norm("rms", args, kwargs)
        called = spell_call(func, args, kwargs)
        before = None if called is None else self._find(args[0] if args else kwargs.get("input"))
        if before is None or called is None:
            return None
        name, number = called
        if name == "dropout":
            return before if number == 0 else None
        plain = isinstance(before, Normed) and before.activation == "none" and number == LEAK
        return before._replace(activation=name) if plain and isinstance(before, Normed) else None


def _read_join(args: Any, kwargs: Any, out: Tensor) -> Joined | None:
    parts = args[0] if args else kwargs.get("tensors")
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    if not isinstance(parts, (tuple, list)) or not isinstance(dim, int) or dim not in (-1, out.dim() - 1):
        return None
    same = all(part.dim() == out.dim() and part.dtype == out.dtype for part in parts)
    return Joined(tuple(parts)) if same else None


def _read_norm(norm: str, args: Any, kwargs: Any) -> Normed | None:
    layer = norm == "layer"
    names = (
        ("input", "normalized_shape", "weight", "bias", "eps")
        if layer
        else ("input", "normalized_shape", "weight", "eps")
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    eps = given.get("eps", 1e-5 if layer else None)
    if len(given["normalized_shape"]) != 1 or eps is None or given["input"].dim() < 2:
        return None
    return Normed(given["input"], norm, given.get("weight"), given.get("bias"), eps)


class SeesOrigins(nn.Module):
    """Mixin for the module that contains what makes the tensors and what asks for their origins."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward and remember origins, if it is being compiled for inference."""
        if torch.is_grad_enabled():  # nobody asks, and nothing may be remembered inside a checkpoint
            return super().forward(*args, **kwargs)
        return run_sharing(self.__dict__[SEEN], super().forward, *args, **kwargs)
