"""protect_intermediates: compute small parts that decide the metric in the precision they need, and never convert them.

    prediction   float32    the linears that produce the result: rounding there rounds the logit
    gate         float32    sigmoid and softmax gates, and routers of experts: they decide, and saturate
    product      bfloat16   FM and dot products of feature vectors: heavy tails, no norm before; GEMMs sum in float32
    attention    bfloat16   logits and softmax are float32 inside the kernel; float32 operands would disable it

Inputs are upcast to at least that precision, and autocast is off inside. The output is cast back to autocast's dtype
(without autocast, the input's), except for prediction layers. In a float32 model without autocast nothing changes.

Protected modules are marked, and the filter `unprotected(module, name)` keeps them out of Probe, mods and conversion:

    Probe(model, mods.unprotected)          convert(model, recipe="rowwise", module_filter_fn=mods.unprotected)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from loka.mods.editor import Editor
from loka.nn import DotInteraction, DotProductAttention, FactorizationMachine, HardSigmoid, Sigmoid
from loka.records.mods import ModClass
from loka.units.discovery import PROTECTED
from loka.units.flow import Flow

Protection = Literal["prediction", "product", "attention", "gate"]
NEEDED: dict[Protection, torch.dtype] = {
    "prediction": torch.float32,
    "gate": torch.float32,
    "product": torch.bfloat16,
    "attention": torch.bfloat16,
}
_GATES = (nn.Sigmoid, nn.Hardsigmoid, nn.Softmax, nn.LogSoftmax, nn.Softmax2d, Sigmoid, HardSigmoid)
_ATTENTION_OPS = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "_softmax"}
_PRODUCT_OPS = {"mm", "bmm", "baddbmm"}
_DECISIONS = {"sigmoid", "topk", "_softmax", "argmax", "sort"}


class Protected(nn.Module):
    """Mixin that runs a module's forward in higher precision."""

    protected_dtype: torch.dtype
    keeps_result: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on upcast inputs, without autocast."""
        dtype = self.protected_dtype
        seen = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()), None)
        if seen is None:
            return super().forward(*args, **kwargs)
        kind = seen.device.type
        # autocast does not affect float64
        autocast = kind != "meta" and torch.is_autocast_enabled(kind) and seen.dtype != torch.float64
        narrow = torch.get_autocast_dtype(kind) if autocast else seen.dtype
        wide = torch.promote_types(narrow, self._min_dtype(dtype))
        with torch.autocast(kind if kind != "meta" else "cpu", enabled=False):
            out = super().forward(*_cast(args, wide), **_cast(kwargs, wide))
        return out if self.keeps_result else _cast(out, narrow)

    def _min_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the narrowest dtype to compute in."""
        return dtype


class ProtectedLinear(Protected):
    """Mixin for a linear that upcasts its parameters too, if they are narrower."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the linear in at least the protected dtype."""
        dtype = self.protected_dtype
        weight: Tensor = self.weight  # type: ignore[assignment]
        if torch.promote_types(weight.dtype, dtype) == weight.dtype:
            return super().forward(*args, **kwargs)  # inputs are upcast to the weight's dtype
        x = args[0] if args else kwargs["input"]
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    def _min_dtype(self, dtype: torch.dtype) -> torch.dtype:
        weight: Tensor = self.weight  # type: ignore[assignment]
        return torch.promote_types(weight.dtype, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in any nested containers, including named tuples and registered pytrees."""
    return tree_map(
        lambda part: part.to(dtype) if isinstance(part, Tensor) and part.is_floating_point() else part, value
    )


def is_protected(module: nn.Module, name: str = "") -> bool:
    """Check whether `protect_intermediates` marked a module to be kept out of low precision.

    Args:
        module: any module.
        name: ignored; module filters are called with a name.

    Returns:
        True if the module is marked.

    Example:
        >>> [n for n, m in model.named_modules() if is_protected(m)]
    """
    return PROTECTED in module.__dict__


def unprotected(module: nn.Module, name: str = "") -> bool:
    """Filter for `convert`, `Probe` and `apply` that excludes protected modules.

    Args:
        module: any module.
        name: ignored.

    Returns:
        True if the module may run in low precision.

    Example:
        >>> loka.convert(model, recipe="rowwise", module_filter_fn=unprotected)
    """
    return not is_protected(module, name)


@dataclass(frozen=True)
class ProtectIntermediates:
    """Keep small computations that decide the metric in the precision they need.

    Args:
        kinds: which kinds of modules are protected.
        precision: the dtype that all of them compute in, at least; "needed" uses the dtype of each kind.

    Example:
        >>> loka.mods.apply(model, [ProtectIntermediates()], example=batch)
    """

    kinds: tuple[Protection, ...] = get_args(Protection)
    precision: Literal["needed", "float32", "bfloat16"] = "needed"
    name: ClassVar[str] = "protect_intermediates"
    under_autocast: ClassVar[bool] = True
    effect: ClassVar[ModClass] = "rounding"

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in NEEDED]
        if unknown or not self.kinds:
            raise ValueError(f"protect_intermediates(kinds={self.kinds}): choose from {', '.join(NEEDED)}")
        if self.precision not in ("needed", "float32", "bfloat16"):
            raise ValueError(
                f"protect_intermediates(precision={self.precision!r}): expected needed, float32 or bfloat16"
            )

    def rewrite(self, editor: Editor) -> None:
        """Mark every module of these kinds and run it in higher precision."""
        kinds = dict(self._find(editor))
        for name, module in editor.modules():
            kind = kinds.get(name)
            if kind is None or kind not in self.kinds:
                continue
            if is_protected(module):
                editor.leave(name, "it is protected already")
            else:
                self._protect(editor, name, module, kind)

    def _protect(self, editor: Editor, name: str, module: nn.Module, kind: Protection) -> None:
        dtype: torch.dtype = NEEDED[kind] if self.precision == "needed" else getattr(torch, self.precision)
        guard = ProtectedLinear if isinstance(module, nn.Linear) else Protected
        editor.mark(name, PROTECTED, kind)
        editor.mix(name, guard, protected_dtype=dtype, keeps_result=kind == "prediction")
        what = f"{kind}: computed in {str(dtype).removeprefix('torch.')} or better, and kept out of conversion"
        editor.change(name, what, "rounding")

    @staticmethod
    def _find(editor: Editor) -> Iterator[tuple[str, Protection]]:
        """Yield names with their kind. If a name occurs more than once, the last kind wins."""
        for name, module in editor.model.named_modules():
            if isinstance(module, (FactorizationMachine, DotInteraction)):
                yield name, "product"
            elif isinstance(module, DotProductAttention):
                yield name, "attention"
            elif isinstance(module, _GATES):
                yield name, "gate"
        if isinstance(editor.flow, Flow):
            yield from _read_flow(editor, editor.flow)
        for name in editor.prediction:
            yield name, "prediction"


def _read_flow(editor: Editor, flow: Flow) -> Iterator[tuple[str, Protection]]:
    for call in flow.calls:
        if call.site is None:
            continue
        module = editor.model.get_submodule(call.site)
        bare = next(module.parameters(), None) is None
        if bare and call.inner & _ATTENTION_OPS and call.inner & (_PRODUCT_OPS | _ATTENTION_OPS - {"_softmax"}):
            yield call.site, "attention"
        elif bare and call.inner & _PRODUCT_OPS and not isinstance(module, DotProductAttention):
            yield call.site, "product"
        elif call.linear and _is_router(flow, call.outputs):
            yield call.site, "gate"


def _is_router(flow: Flow, outputs: tuple[int, ...]) -> bool:
    """Return True if a linear is a router: its output, cast or viewed at most, feeds a sigmoid, softmax or top-k."""
    waiting = list(outputs)
    while waiting:
        for reader in flow.readers(waiting.pop()):
            if reader.site is None and reader.op in _DECISIONS:
                return True
            if reader.site is None and reader.op in ("_to_copy", "view"):
                waiting.extend(reader.outputs)
    return False
