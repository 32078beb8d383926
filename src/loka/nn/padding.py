"""Zeros for the padding of an nn.TransformerEncoder whose packing was switched off.

In eval mode, without gradients and not compiled, nn.TransformerEncoder packs a padded batch into a nested tensor for its fused kernel and returns zeros where the padding was. An encoder in
which something was converted or modified takes the ordinary path, which leaves other numbers there; a model that then averages over positions would have another result in eval mode. So
what comes out of its last layer is zeroed wherever torch would have packed. Only nn.TransformerEncoder.forward packs: a loop of somebody's own over the same layers gets what they give.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

HANDS_ON = "loka_hands_on"  # on a function mode of ours: the model that was not converted runs without it


class ZeroPadding:
    """A forward hook, with keyword arguments, for the last layer of an encoder.

    Args:
        encoder: packed its batches (`use_nested_tensor`) before.

    Example:
        >>> encoder.layers[-1].register_forward_hook(ZeroPadding(encoder), with_kwargs=True)
    """

    with_kwargs = True
    loka_sees_chains = True  # it changes what leaves the layer, which is no part of a chain

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        self.checks_mask = bool(getattr(encoder, "mask_check", True))

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Zeros for the padding, under the conditions of nn.TransformerEncoder.forward."""
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
        padding = padding if padding.dtype == torch.bool else padding != 0  # the encoder makes 0 and -inf of it
        if self.checks_mask and not torch._nested_tensor_from_mask_left_aligned(output, padding.logical_not()):
            return output
        return output.masked_fill(padding.unsqueeze(-1), 0.0)


def _is_run_by_encoder(layer: nn.Module) -> bool:
    """Whether torch's own forward of an encoder is running this layer as its last. The frames know, whatever happens in between: a subclass, an exception, threads, a wrapper of the layer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.TransformerEncoder.forward.__code__:
            return any(inner is layer for inner in frame.f_locals["self"].layers[-1].modules())
        frame = frame.f_back
    return False
