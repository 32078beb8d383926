"""Fold a batch norm into the linear before it. In eval mode its statistics are constants:

    gamma (x W^T + b - mean) / sqrt(var + eps) + beta  =  x (a W)^T + (b - mean) a + beta

with a = gamma / sqrt(var + eps), one per output. In training mode it normalizes by the batch, so `fold` raises.
"""

import torch
from torch import Tensor, nn

# attribute of a module with only FP8 weights, from a file: it cannot be reverted, and norms are already folded in
PACKED = "loka_packed"


def can_fold(module: nn.Module | None, width: int) -> bool:
    """Check whether `fold` supports a module: a batch norm over `width` features with running statistics."""
    if not isinstance(module, nn.BatchNorm1d) or type(module).forward is not nn.BatchNorm1d.forward:
        return False
    if "forward" in vars(module):  # replaced on the instance: it may compute anything
        return False
    return module.num_features == width and module.running_mean is not None


def fold(linear: nn.Linear, norm: nn.BatchNorm1d, name: str = "") -> tuple[Tensor, Tensor]:
    """Return the weight and bias of a linear with the batch norm after it folded in.

    Args:
        linear: [N, K].
        norm: over N features, in eval mode.
        name: of the linear, for the error message.

    Returns:
        The weight and the bias in the weight's dtype; both differentiable.

    Raises:
        ValueError: the norm is in training mode.
    """
    refuse_training(norm, name)
    mean, shift, variance, gain, bias = statistics(linear, norm)
    factor = gain * torch.rsqrt(variance)
    weight = (
        linear.weight
        if linear.__dict__.get(PACKED)
        else (linear.weight.float() * factor[:, None].to(linear.weight.device)).to(linear.weight.dtype)
    )
    return weight, ((bias - mean) * factor + shift).to(linear.weight.dtype)


def refuse_training(norm: nn.Module | None, name: str) -> None:
    """Raise a ValueError if a norm folded into the linear `name` is in training mode."""
    if norm is not None and norm.training:
        raise ValueError(
            f"{name}: the batch norm after it is folded into its weight, which requires eval mode, "
            "but is in training mode; hint: model.eval(), or loka.revert(model) to train"
        )


def statistics(linear: nn.Linear, norm: nn.BatchNorm1d) -> Tensor:
    """Return what is folded into a weight, one float32 row each: mean, beta, var + eps, gamma and the linear's bias."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, variance = norm.running_mean.float(), norm.running_var.float() + norm.eps
    shift = torch.zeros_like(mean) if norm.bias is None else norm.bias.float()
    gain = torch.ones_like(mean) if norm.weight is None else norm.weight.float()
    bias = torch.zeros_like(mean) if linear.bias is None else linear.bias.float()
    return torch.stack([mean, shift, variance, gain, bias])
