"""amax_history: end a step of delayed scaling: append each operand's amax to its history, compute the next scale.

On a GPU one kernel does this for all operands of a model, wherever their tensors are allocated. It replaces some thirty
torch launches, which took 60 us of every step and a millisecond of the host.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from loka.kernels.amax_history import plain

__all__ = ["Magnitudes", "file_amax"]


class Magnitudes(Protocol):
    """The amax state of one operand. All tensors are float32 scalars on one device, except for the history.

    Example:
        >>> file_amax([state])  # any object with these attributes
    """

    history: Tensor  # amax of the last steps, newest first; 1-D, contiguous
    largest: Tensor  # maximum of the history; 0 if it is empty
    pending: Tensor  # amax of the current step so far
    scale: Tensor  # headroom * largest / 448, the E4M3 scale of the next step
    saturated: Tensor  # number of steps whose amax exceeded the range of the scale in use
    headroom: float
    floor: float  # the smallest amax that a scale is made for


@torch.no_grad()
def file_amax(operands: Sequence[Magnitudes]) -> None:
    """Append each pending amax to its history, in place, and update the scale for the next step.

        history'   = [pending, history without its last]      unchanged if pending is 0, as for an expert without tokens
        largest'   = max(history')
        scale'     = max(headroom * largest', floor) / 448    unchanged if largest' is 0
        saturated += pending > 448 * scale                    unchanged if the history was empty
        pending'   = 0

    Args:
        operands: any number, on one or several devices.

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
