"""Zeros for the padding of an nn.TransformerEncoder whose packing was switched off.

In eval mode, without gradients and not compiled, nn.TransformerEncoder packs a padded batch into a nested tensor for its fused kernel and returns zeros where the padding was. An encoder in
which something was converted or modified takes the ordinary path, which leaves other numbers there; a model that then averages over positions would have another result in eval mode. So
what comes out of its last layer is zeroed wherever torch would have packed.
"""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ZeroPadding"]


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
        ):
            return output
        padding = padding if padding.dtype == torch.bool else padding != 0  # the encoder makes 0 and -inf of it
        if self.checks_mask and not torch._nested_tensor_from_mask_left_aligned(output, padding.logical_not()):
            return output
        return output.masked_fill(padding.unsqueeze(-1), 0.0)
