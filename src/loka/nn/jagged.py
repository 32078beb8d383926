"""Linears over jagged nested tensors: rows of different lengths, one behind another, and where each begins.

nn.Linear takes them, so whatever observes or replaces one does too. A linear acts on the rows alone: `dense` gives
them as one tensor, `on_values` computes with that and returns the lengths. Nested tensors of torch's older, strided
layout have no such tensor and are refused.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def dense(x: Tensor) -> Tensor:
    """Return the values [total, ...] of a jagged nested tensor; any other tensor as it is.

    Args:
        x: a tensor, nested or not.

    Returns:
        A tensor that is not nested. Gradients flow through it.

    Raises:
        ValueError: a nested tensor of the strided layout, or one with gaps between its rows.

    Example:
        >>> dense(torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)).shape
        torch.Size([5, 8])
    """
    if not x.is_nested:
        return x
    if x.layout != torch.jagged or x.lengths() is not None or getattr(x, "_ragged_idx", 1) != 1:  # type: ignore[attr-defined]
        raise ValueError(
            f"a nested tensor of layout {x.layout}, expected torch.jagged, with rows one behind another and the second "
            "dimension ragged; hint: torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    return x.values()


def on_values(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of rows to the values of a jagged nested tensor.

    Args:
        compute: takes values [total, ...] and returns as many rows.
        x: see `dense`.

    Returns:
        A nested tensor with the lengths of x; operations may combine both.

    Example:
        >>> on_values(torch.relu, jagged).offsets() is jagged.offsets()
        True
    """
    return torch.nested.nested_tensor_from_jagged(compute(dense(x)), x.offsets())  # type: ignore[attr-defined]
