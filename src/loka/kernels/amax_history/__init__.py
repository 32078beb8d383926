"""amax_history: end a step of delayed scales. Every operand's largest magnitude is filed, and the scales of the next step are made.

On a GPU one kernel does it for all operands of a model, whose tensors lie wherever they were allocated: some thirty launches of torch, 60 us of every step and a millisecond of the host,
in their place.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from loka.kernels.amax_history import plain

__all__ = ["Magnitudes", "file_amax"]


class Magnitudes(Protocol):
    """The magnitudes of one operand: float32 tensors of one number each, but for the history, on one device."""

    history: Tensor  # the steps' largest magnitudes, newest first: one dimension, contiguous
    largest: Tensor  # of the history; 0: none yet
    pending: Tensor  # of this step so far
    scale: Tensor  # headroom * largest / 448, the E4M3 scale of the next step
    saturated: Tensor  # steps whose largest magnitude did not fit the scale that was in force
    headroom: float
    floor: float  # a magnitude that every scale reaches, whatever was seen


@torch.no_grad()
def file_amax(operands: Sequence[Magnitudes]) -> None:
    """File what is pending, in place, and start the next step.

        history'   = [pending, history without its last]      unchanged where pending is 0: an expert without tokens files nothing
        largest'   = max(history')
        scale'     = max(headroom * largest', floor) / 448    unchanged where largest' is 0
        saturated += pending > 448 * scale, where there was a history
        pending'   = 0

    Args:
        operands: any number, on one device or several.

    Example:
        >>> file_amax([state])  # after the optimizer's step
    """
    from loka.kernels.triton_device import triton_runs_on

    by_device: dict[torch.device, list[Magnitudes]] = {}
    for operand in operands:
        by_device.setdefault(operand.history.device, []).append(operand)
    for device, mine in by_device.items():
        if triton_runs_on(device):
            from loka.kernels.amax_history import triton_kernels

            if triton_kernels.file_amax(mine):
                continue
        plain.file_amax(mine)
