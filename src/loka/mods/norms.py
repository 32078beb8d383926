"""Norms: which modules are one, over how many features, and which must not be touched.

LayerNorm and RMSNorm of torch and of this package are known by their class. A user's own RMSNorm or LayerNorm is known by its class's name, and its width
by the length of its `weight`, or, where it has none, by what it was given when the example ran.
"""

from torch import Tensor, nn

from loka.mods.editor import Editor
from loka.mods.interception import Elsewhere
from loka.nn import BlockNorm
from loka.units.flow import Flow

_TRACKED = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
_KNOWN = (nn.LayerNorm, nn.RMSNorm)


def find_norms(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes of the model's norms over features, and of those that only look alike."""
    named = {type(m) for m in model.modules() if type(m).__name__.endswith(("LayerNorm", "RMSNorm"))}
    return (*_KNOWN, *_TRACKED, *sorted(named - {BlockNorm}, key=lambda kind: kind.__name__))


def refuse_norm(norm: nn.Module) -> str | None:
    """Why a norm must stay as it is; None where it may be rewritten."""
    if isinstance(norm, Elsewhere):
        return "norm_order has moved it; mods.revert(model), then this mod before norm_order"
    if isinstance(norm, nn.modules.batchnorm._NormBase):
        return f"{type(norm).__name__} keeps statistics over the batch, which a norm over features does not replace; hint: it may stay, or build the model with nn.LayerNorm"
    if isinstance(norm, _TRACKED):
        return f"{type(norm).__name__} normalises across channels and positions, not over the last dimension; hint: it may stay, or build the model with nn.LayerNorm"
    shape = getattr(norm, "normalized_shape", None)
    if shape is not None and len(shape) != 1:
        return f"it normalises {len(shape)} dimensions {tuple(shape)} together; a block norm works on the last one"
    if next(norm.children(), None) is not None:
        return f"{type(norm).__name__} has parts of its own; what it computes is not known"
    return None


def find_width(editor: Editor, name: str, norm: nn.Module) -> int | None:
    """The number of features a norm works on; None where nothing says it, or where it is used on several."""
    shape = getattr(norm, "normalized_shape", None)
    if shape is not None:
        return int(shape[-1])
    weight = getattr(norm, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 1:
        return int(weight.numel())
    if not isinstance(editor.flow, Flow):
        return None
    widths = {editor.flow.shapes[call.inputs[0]][-1] for call in editor.calls(name) if call.inputs}
    return widths.pop() if len(widths) == 1 else None


def is_rms(norm: nn.Module) -> bool:
    """Whether a norm subtracts no mean."""
    return isinstance(norm, nn.RMSNorm) or type(norm).__name__.endswith("RMSNorm")


def epsilon_of(norm: nn.Module) -> float | None:
    """The eps of a norm, under the names people give it; None: the precision's own."""
    for attribute in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(norm, attribute, None)
        if isinstance(value, float):
            return value
    return None
