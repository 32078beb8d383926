"""A batch norm behind a linear, folded into it: in evaluation its statistics are constants.

    gamma (x W^T + b - mean) / sqrt(var + eps) + beta  =  x (a W)^T + (b - mean) a + beta,        a = gamma / sqrt(var + eps), one for each output

In training it normalises by the batch, which no weight can hold: `fold` refuses.
"""

import torch
from torch import Tensor, nn

# on a module: FP8 weights alone, out of a file: nothing to revert to, and nothing to fold any more
PACKED = "loka_packed"


def can_fold(module: nn.Module | None, width: int) -> bool:
    """Whether a module is a batch norm over `width` features that knows its statistics.

    Args:
        module: what stands behind a linear.
        width: the linear's outputs.

    Returns:
        Whether `fold` takes it.
    """
    if not isinstance(module, nn.BatchNorm1d) or type(module).forward is not nn.BatchNorm1d.forward:
        return False
    return module.num_features == width and module.running_mean is not None


def fold(linear: nn.Linear, norm: nn.BatchNorm1d, name: str = "") -> tuple[Tensor, Tensor]:
    """The weight and the bias of a linear with the batch norm behind it.

    Args:
        linear: [N, K].
        norm: over N features, in evaluation mode.
        name: of the linear, for the message.

    Returns:
        The weight in its own type and the bias in the same; both differentiable.

    Raises:
        ValueError: the norm is in training mode.
    """
    refuse_training(norm, name)
    mean, shift, variance, gain, bias = statistics(linear, norm)
    factor = gain * torch.rsqrt(variance)
    weight = linear.weight if linear.__dict__.get(PACKED) else (linear.weight.float() * factor[:, None].to(linear.weight.device)).to(linear.weight.dtype)  # fmt: skip
    return weight, ((bias - mean) * factor + shift).to(linear.weight.dtype)


def refuse_training(norm: nn.Module | None, name: str) -> None:
    """ValueError where a norm that is folded into the linear `name` would normalise by the batch."""
    if norm is not None and norm.training:
        raise ValueError(f"{name}: the batch norm behind it is folded into its weight, as evaluation has it, and is in training mode; hint: model.eval(), or loka.revert(model) to train")  # fmt: skip


def statistics(linear: nn.Linear, norm: nn.BatchNorm1d) -> Tensor:
    """Everything that is folded into a weight: mean, beta, variance + eps and gamma of the norm and the linear's bias, one row each, in float32."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, variance = norm.running_mean.float(), norm.running_var.float() + norm.eps
    shift = torch.zeros_like(mean) if norm.bias is None else norm.bias.float()
    gain = torch.ones_like(mean) if norm.weight is None else norm.weight.float()
    bias = torch.zeros_like(mean) if linear.bias is None else linear.bias.float()
    return torch.stack([mean, shift, variance, gain, bias])
