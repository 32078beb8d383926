"""Zero the padding in the output of an nn.TransformerEncoder whose nested tensors were disabled.

In eval mode, without gradients and not compiled, nn.TransformerEncoder packs a padded batch into a nested tensor for
its fused kernel and returns zeros for the padding. An encoder in which something was converted or modified takes the
ordinary path, which returns other values there, and a model that averages over positions would change its result. So
the output of the last layer is zeroed whenever torch would have packed. Only nn.TransformerEncoder.forward packs: a
custom loop over the same layers is not affected.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

HANDS_ON = "loka_hands_on"  # attribute of our function modes, under which only converted models run


class ZeroPadding:
    """A forward hook, with keyword arguments, for the last layer of an encoder that packed its batches before."""

    with_kwargs = True
    loka_sees_chains = True  # the output of the layer is not part of a chain

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        self.checks_mask = bool(getattr(encoder, "mask_check", True))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Zero the padding if nn.TransformerEncoder.forward would have packed the batch."""
        padding = kwargs.get("src_key_padding_mask")
        if torch.compiler.is_compiling() or module.training or not isinstance(padding, Tensor) or not isinstance(output, Tensor):  # fmt: skip
            return output
        if (
            kwargs.get("src_mask") is not None
            or output.dim() != 3
            or torch.is_autocast_enabled()
            or output.requires_grad
            or not torch.backends.mha.get_fastpath_enabled()
            or any(not getattr(mode, HANDS_ON, False) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
            or not _is_run_by_encoder(module)
        ):
            return output
        padding = padding if padding.dtype == torch.bool else padding != 0  # the encoder turns a mask into 0 and -inf
        if self.checks_mask and not torch._nested_tensor_from_mask_left_aligned(output, padding.logical_not()):
            return output
        return output.masked_fill(padding.unsqueeze(-1), 0.0)


def _is_run_by_encoder(layer: nn.Module) -> bool:
    """Check whether nn.TransformerEncoder.forward is running this layer as its last.

    The stack frames tell reliably, whatever is in between: a subclass, an exception, threads, a wrapper of the layer.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.TransformerEncoder.forward.__code__:
            return any(inner is layer for inner in frame.f_locals["self"].layers[-1].modules())
        frame = frame.f_back
    return False
