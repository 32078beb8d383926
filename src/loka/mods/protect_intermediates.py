"""protect_intermediates: what is small and decides the metric is computed in the precision it needs, and kept out of conversion.

    prediction   float32    the linears that make the result: a rounding there is a rounding of the logit
    gate         float32    sigmoid and softmax gates, and the routers of experts: they decide, and saturate
    product      bfloat16   FM and dot products of feature vectors: heavy tails and no norm in front; their sums are float32 inside the GEMM
    attention    bfloat16   attention; logits and softmax are float32 inside its kernel, and float32 operands would lose the kernel

Inputs are raised to the asked precision and autocast is off inside; what comes out goes back to the stream's type, except for the result of a prediction
layer, which stays wide. Outside of autocast, and in a model that is wide already, nothing changes.

Every protected module is marked, and `unprotected(module, name)` is the filter that keeps marked modules out of Probe, of mods and of conversion:

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
    """Mixed in front of a module's own class: its forward in higher precision."""

    protected_dtype: torch.dtype
    keeps_result: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, on raised inputs, without autocast."""
        dtype = self.protected_dtype
        seen = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()), None)
        if seen is None:
            return super().forward(*args, **kwargs)
        kind = seen.device.type
        # which autocast leaves alone
        autocast = kind != "meta" and torch.is_autocast_enabled(kind) and seen.dtype != torch.float64
        narrow = torch.get_autocast_dtype(kind) if autocast else seen.dtype
        raised = torch.promote_types(narrow, self._least(dtype))
        with torch.autocast(kind if kind != "meta" else "cpu", enabled=False):
            out = super().forward(*_cast(args, raised), **_cast(kwargs, raised))
        return out if self.keeps_result else _cast(out, narrow)

    def _least(self, dtype: torch.dtype) -> torch.dtype:
        """What the module's own parameters ask for."""
        return dtype


class ProtectedLinear(Protected):
    """Mixed in front of a linear: its parameters are raised too, where they are narrower."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The linear in at least the asked precision."""
        dtype = self.protected_dtype
        weight: Tensor = self.weight  # type: ignore[assignment]
        if torch.promote_types(weight.dtype, dtype) == weight.dtype:
            return super().forward(*args, **kwargs)  # inputs are raised to its type
        x = args[0] if args else kwargs["input"]
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    def _least(self, dtype: torch.dtype) -> torch.dtype:
        weight: Tensor = self.weight  # type: ignore[assignment]
        return torch.promote_types(weight.dtype, dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in any nest of containers (named tuples and a library's own outputs too) in a type."""
    return tree_map(
        lambda part: part.to(dtype) if isinstance(part, Tensor) and part.is_floating_point() else part, value
    )


def is_protected(module: nn.Module, name: str = "") -> bool:
    """Whether a module asked to be kept out of low precision.

    Args:
        module: any.
        name: not looked at; filters are called with one.

    Returns:
        Whether `protect_intermediates` marked it.

    Example:
        >>> [n for n, m in model.named_modules() if is_protected(m)]
    """
    return PROTECTED in module.__dict__


def unprotected(module: nn.Module, name: str = "") -> bool:
    """The filter for `convert`, `Probe` and `apply` that lets everything through but protected modules.

    Args:
        module: any.
        name: not looked at.

    Returns:
        Whether it may run in low precision.

    Example:
        >>> loka.convert(model, recipe="rowwise", module_filter_fn=unprotected)
    """
    return not is_protected(module, name)


@dataclass(frozen=True)
class ProtectIntermediates:
    """Keep small computations that decide the metric in the precision they need.

    Args:
        kinds: what is protected.
        precision: at least which type all of it computes in, or for every kind what it needs.

    Example:
        >>> loka.mods.apply(model, [ProtectIntermediates()], example=batch)
    """

    kinds: tuple[Protection, ...] = get_args(Protection)
    precision: Literal["needed", "float32", "bfloat16"] = "needed"
    name: ClassVar[str] = "protect_intermediates"
    under_autocast: ClassVar[bool] = True  # where it is checked, too
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
        """Mark and raise every module of the asked kinds."""
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
        """Names with what they are; the last one that speaks for a module wins."""
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
        elif call.linear and _decides(flow, call.outputs):
            yield call.site, "gate"


def _decides(flow: Flow, outputs: tuple[int, ...]) -> bool:
    """Whether a linear's output goes, cast at most, into a choice between things: a router."""
    waiting = list(outputs)
    while waiting:
        for reader in flow.readers(waiting.pop()):
            if reader.site is None and reader.op in _DECISIONS:
                return True
            if reader.site is None and reader.op in ("_to_copy", "view"):
                waiting.extend(reader.outputs)
    return False
