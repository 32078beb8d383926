"""Send the arrays of one batch to the device in one copy.

Each copy of pageable memory takes the host ten microseconds or more and waits for the device, and a batch of a ranker
has up to seven arrays. Here they are written one behind another into pinned memory, and one copy that does not wait
takes them all.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 16  # bytes: every array starts where any dtype may


class Staging:
    """A pair of buffers, on the host and on a device, that grow as needed. For one thread.

    Args:
        device: where the arrays go.

    Example:
        >>> ids, scores = Staging(torch.device("cpu")).send([np.arange(3), np.zeros((2, 2), np.float32)])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = self._there = torch.empty(0, dtype=torch.uint8)
        self._apart = device.type != "cpu"  # on a CPU one buffer is both
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copy arrays to the device.

        Args:
            arrays: of any shapes and of dtypes that torch has.

        Returns:
            A tensor for each, valid until the next call.
        """
        starts = np.cumsum([0, *(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays)]).tolist()
        self._make_room(starts[-1])
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy still reads the host's buffer
        buffer = self._host.numpy()
        for array, start in zip(arrays, starts, strict=False):
            buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        if self._apart:
            self._there[: starts[-1]].copy_(self._host[: starts[-1]], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device))
        return [
            self._there[start : start + array.nbytes].view(_dtype_of(array)).view(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        ]

    def _make_room(self, size: int) -> None:
        if size <= self._host.numel():
            return
        size = max(1 << (size - 1).bit_length(), 4096)
        with torch.inference_mode(False):  # kept beyond this call
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._copied is not None)
            self._there = torch.empty(size, dtype=torch.uint8, device=self.device) if self._apart else self._host


def _dtype_of(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
