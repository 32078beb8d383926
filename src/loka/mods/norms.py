"""Find a model's norms, their widths, and which of them must not be rewritten.

LayerNorm and RMSNorm of torch and of this package are recognized by class, a user's own by the name of its class. The
width of the latter is the length of its `weight` or, without one, the width of its input on the example. What a user's
own norm computes is tried out: its name does not say whether its gain is `weight` or, as in Gemma, 1 + `weight`.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.mods.editor import Editor
from loka.mods.interception import Elsewhere
from loka.nn import BlockNorm
from loka.units.flow import Flow

_TRACKED = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
_KNOWN = (nn.LayerNorm, nn.RMSNorm)


def find_norms(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of the model's norms, including those that `refuse_norm` rejects."""
    named = {type(m) for m in model.modules() if type(m).__name__.endswith(("LayerNorm", "RMSNorm"))}
    return (*_KNOWN, *_TRACKED, *sorted(named - {BlockNorm}, key=lambda kind: kind.__name__))


def refuse_norm(norm: nn.Module) -> str | None:
    """Return why a norm must not be rewritten, or None if it may."""
    if isinstance(norm, Elsewhere):
        return "norm_order has moved it; mods.revert(model), then this mod before norm_order"
    if isinstance(norm, nn.modules.batchnorm._NormBase):
        return (
            f"{type(norm).__name__} keeps statistics over the batch, which a norm over features does not replace; "
            "hint: keep it, or build the model with nn.LayerNorm"
        )
    if isinstance(norm, _TRACKED):
        return (
            f"{type(norm).__name__} normalises across channels and positions, not over the last dimension; hint: "
            "keep it, or build the model with nn.LayerNorm"
        )
    shape = getattr(norm, "normalized_shape", None)
    if shape is not None and len(shape) != 1:
        return f"it normalises {len(shape)} dimensions {tuple(shape)} together; a block norm works on the last one"
    if next(norm.children(), None) is not None:
        return f"{type(norm).__name__} has child modules; what it computes is not known"
    return None


@torch.no_grad()
def refuse_formula(norm: nn.Module, width: int) -> str | None:
    """Return why a norm is not normalized(x) * weight + bias, by a LayerNorm or an RMSNorm, or None if it is.

    Args:
        norm: a norm over the last dimension; one with a forward of its own is run on random rows.
        width: the number of features.
    """
    known = type(norm).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward) and "forward" not in vars(norm)
    weight, bias = (getattr(norm, name, None) for name in ("weight", "bias"))
    device = weight.device if isinstance(weight, Tensor) else torch.device("cpu")
    if known or device.type == "meta":
        return None
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0)).to(device)
    x = x.to(weight.dtype) if isinstance(weight, Tensor) else x
    try:
        found = copy.deepcopy(norm).eval()(x).float()  # a copy: it may count or remember something
    except Exception as error:  # a user's forward may raise anything
        return f"{type(norm).__name__} could not be tried on [8, {width}]: {type(error).__name__}: {error}"
    eps = epsilon_of(norm) or torch.finfo(torch.float32).eps
    for normalized in (F.layer_norm(x.float(), (width,), eps=eps), F.rms_norm(x.float(), (width,), eps=eps)):
        expected = normalized * (weight.float() if isinstance(weight, Tensor) else 1.0)
        expected = expected + bias.float() if isinstance(bias, Tensor) else expected
        if found.shape == expected.shape and float((found - expected).norm()) <= 0.02 * float(expected.norm()):
            return None
    return (
        f"{type(norm).__name__} does not compute a layer or RMS norm times its weight plus its bias, "
        "as a block norm would assume; hint: keep it, or build the model with nn.RMSNorm"
    )


def find_width(editor: Editor, name: str, norm: nn.Module) -> int | None:
    """Return the number of features a norm works on, or None if it is unknown or varies."""
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
    """Return True if a norm does not subtract the mean."""
    return isinstance(norm, nn.RMSNorm) or type(norm).__name__.endswith("RMSNorm")


def epsilon_of(norm: nn.Module) -> float | None:
    """Return the eps of a norm under any of its usual names. None: the norm uses its dtype's machine epsilon."""
    for attribute in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(norm, attribute, None)
        if isinstance(value, float):
            return value
    return None
