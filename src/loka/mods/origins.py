"""Tell a module how its input was made, while the forward around it is compiled: joined from parts, or normalized.

A linear with few outputs often reads a tensor that was made for it alone: a concatenation, or a norm and an activation.
If it knows the parts, or the norm's input, it can compute its result from these, and the compiler drops the tensor that
nobody reads any more. The values are the ones that the user's forward has computed, so nothing depends on the tensor
being dropped. Eager calls tell nothing.
"""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.kernels.activation import LEAK
from loka.lowp.passing import spell_call
from loka.mods.editor import Editor
from loka.nn.sharing import Shared, Watch, run_sharing
from loka.nn.wrapping import find_holder, is_scripted
from loka.units.example import call_model
from loka.units.undisturbed import set_mode, undisturbed

ORIGINS = "loka_origins_seen"  # attribute of a module that asks for the origin of its input: the Origins
_JOINS = (torch.cat, torch.concat, torch.concatenate)
_LAYER, _RMS = (F.layer_norm, torch.layer_norm), (F.rms_norm, torch.rms_norm)  # compiled code shows either
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
        self.made: list[tuple[Tensor, Origin]] = []

    def forget(self) -> None:
        """Discard all tensors, which may have changed."""
        self.made = []

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember a tensor that was joined or normalized."""
        origin = self._read(func, args, kwargs, out)
        if origin is not None:
            self.made = [*self.made[1 - _RECENT :], (out, origin)]

    def find(self, x: Tensor) -> Origin | None:
        """Return how exactly this tensor was made; None if that is not known, or gradients are enabled."""
        if not self.open or not torch.compiler.is_compiling() or torch.is_grad_enabled():
            return None
        return self._find(x)

    def _find(self, x: Any) -> Origin | None:
        for tensor, origin in self.made:
            if tensor is x:
                return origin
        return None

    def _read(self, func: Any, args: Any, kwargs: Any, out: Any) -> Origin | None:
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
    names = ("input", "normalized_shape", "weight", "bias", "eps") if layer else ("input", "normalized_shape", "weight", "eps")  # fmt: skip
    given = dict(zip(names, args, strict=False)) | kwargs
    eps = given.get("eps", 1e-5 if layer else None)
    if len(given["normalized_shape"]) != 1 or eps is None or given["input"].dim() < 2:
        return None
    return Normed(given["input"], norm, given.get("weight"), given.get("bias"), eps)


class SeesOrigins(nn.Module):
    """Mixin for the module that contains what makes the tensors and what asks for their origins."""

    loka_origins: tuple[Origins, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward and remember origins, if it is being compiled."""
        return run_sharing(self.loka_origins, super().forward, *args, **kwargs)


class Found(NamedTuple):
    """How the input of a module was made on an example."""

    origin: Origin
    holder: str  # the innermost module whose forward makes the input and calls the module


class _Noting(Origins):
    """Records origins while an example runs in eager mode, with the module whose forward made each, and versions."""

    def __init__(self, running: list[str]) -> None:
        super().__init__()
        self.running = running
        self.places: list[tuple[Tensor, list[str], list[tuple[Tensor, int]]]] = []

    def forget(self) -> None:
        """Keep what was recorded: versions tell what was written to."""

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record a tensor's origin, where it was made, and the versions of what it was made from."""
        origin = self._read(func, args, kwargs, out)
        if origin is None:
            return
        source = args[0] if args else kwargs.get("input")
        read = [out, *(origin.parts if isinstance(origin, Joined) else (origin.x,))]
        places, versions = (
            [f"{self.running[-1]}.call".removeprefix(".")],
            [(tensor, tensor._version) for tensor in read],
        )
        for tensor, where, then in self.places:
            if tensor is source:  # an activation or dropout: what its input was made from must not have changed since
                places, versions = [*places, *where], [*versions, *then]
        self.made.append((out, origin))
        self.places.append((out, places, versions))

    def find_unchanged(self, x: Any) -> tuple[Origin, list[str]] | None:
        """Return a tensor's origin and where it was made, unless anything it was made from has changed since."""
        for (tensor, origin), (_, places, read) in zip(reversed(self.made), reversed(self.places), strict=True):
            if tensor is x:
                return (origin, places) if all(t._version == version for t, version in read) else None
        return None


def find_origins(editor: Editor, names: list[str]) -> dict[str, Found]:
    """Run the example, and find how the inputs of some modules are made.

    Args:
        editor: the model's editor. If the example fails, the reason is reported here.
        names: of modules that take one tensor.

    Returns:
        What was found, by the name of the module. Modules that are called more than once are not in it.
    """
    if editor.example is None or not names:
        return {}
    running: list[str] = []
    noting = _Noting(running)
    calls: dict[str, list[tuple[Origin, list[str]] | None]] = {name: [] for name in names}

    def enter(name: str) -> Any:
        def run(module: nn.Module, args: Any) -> None:
            if name in calls:
                calls[name].append(noting.find_unchanged(args[0] if args else None))
            running.append(name)

        return run

    def leave(*_: Any) -> None:
        running.pop()

    try:
        with undisturbed(editor.model), torch.no_grad(), ExitStack() as stack:
            for name, module in editor.model.named_modules():
                if not is_scripted(module):
                    stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                    stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(Watch([noting]))
            set_mode(editor.model, False)
            call_model(editor.model, editor.example)
    except Exception as error:  # whatever a user's forward raises
        editor.leave("", f"the model failed on the example: {type(error).__name__}: {error}")
        return {}
    found = {}
    for name, seen in calls.items():
        if len(seen) == 1 and seen[0] is not None:
            origin, places = seen[0]
            found[name] = Found(origin, find_holder([name, *places], editor.model))
    return found
