"""Send the arrays of one batch to the device in one copy, and fetch its result, without waiting for the device.

Each copy of pageable memory takes the host ten microseconds or more and waits for the device, and a batch of a ranker
has up to seven arrays. Here they are written one behind another into pinned memory, and one copy that does not wait
takes them all. It is queued behind the batches before; only the next `send` waits until it was made, because it writes
the same memory. The result is copied to pinned memory that belongs to it until it was read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGN = 16  # bytes: every array starts where any dtype may


class Staging:
    """Buffers on the host and on a device that grow as needed. For one thread.

    Args:
        device: where the arrays go: a GPU, or a CPU, where everything is done at once.

    Example:
        >>> staging = Staging(torch.device("cpu"))
        >>> ids, scores = staging.send([np.arange(3), np.zeros((2, 2), np.float32)])
        >>> staging.fetch(ids + 1)()
        array([1, 2, 3])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = 0.0  # of the device, from the copies of `send` to those of `fetch`
        self._host = self._there = torch.empty(0, dtype=torch.uint8)
        self._there_as: dict[np.dtype[Any], Tensor] = {}  # the device's buffer as values of a dtype
        self._apart = device.type != "cpu"  # on a CPU one buffer is both
        self._begun: Any = None  # events of the last `send`: its copy begins, it is made
        self._copied: Any = None
        self._free: list[Tensor] = []  # host memory of results that were read

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Copy arrays to the device.

        Args:
            arrays: of any shapes and of dtypes that torch has.

        Returns:
            A tensor for each, valid until the next call.
        """
        starts = np.cumsum([0, *(-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays)]).tolist()
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy still reads the host's buffer
        self._make_room(starts[-1])
        buffer = self._host.numpy()
        places = [
            buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            for array, start in zip(arrays, starts, strict=False)
        ]
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
        self._begun = self._mark()
        if self._apart:
            self._there[: starts[-1]].copy_(self._host[: starts[-1]], non_blocking=True)
        self._copied = self._mark()
        return [self._view_like(place, start) for place, start in zip(places, starts, strict=False)]

    def fetch(self, found: Tensor) -> Callable[[], NDArray[Any]]:
        """Begin to copy the result of what was sent last to the host.

        Args:
            found: the result, on the device; it may be overwritten by what is queued there later.

        Returns:
            A function that waits for the copy and returns it as an array of its own. To be called once.
        """
        size = found.numel() * found.element_size()
        place = next((place for place, memory in enumerate(self._free) if memory.numel() >= size), None)
        memory = self._pin(size) if place is None else self._free.pop(place)
        host = memory[:size].view(found.dtype).view(found.shape)
        host.copy_(found, non_blocking=True)
        begun, done = self._begun, self._mark()

        def collect() -> NDArray[Any]:
            if done is not None:
                done.synchronize()
                self.seconds += begun.elapsed_time(done) / 1e3
            out: NDArray[Any] = host.numpy().copy()
            self._free.append(memory)
            return out

        return collect

    def _view_like(self, place: NDArray[Any], start: int) -> Tensor:
        """Return what the device has for a place of the host's buffer, by one call of torch.

        Each call gives the interpreter's lock away, and under load every one waits to get it back.
        """
        whole = self._there_as.get(place.dtype)
        if whole is None:
            with torch.inference_mode(False):  # kept beyond this call
                whole = self._there_as[place.dtype] = self._there.view(_dtype_of(place))
        strides = [stride // place.itemsize for stride in place.strides]
        return whole.as_strided(place.shape, strides, start // place.itemsize)

    def _mark(self) -> Any:
        """Return an event of the device's queue; None on a CPU, which has none."""
        if not self._apart:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _pin(self, size: int) -> Tensor:
        with torch.inference_mode(False):  # kept beyond this call
            return torch.empty(max(1 << (size - 1).bit_length(), 4096), dtype=torch.uint8, pin_memory=self._apart)

    def _make_room(self, size: int) -> None:
        if size <= self._host.numel():
            return
        self._host = self._pin(size)
        self._there, self._there_as = self._host, {}
        if self._apart:
            with torch.inference_mode(False):
                self._there = torch.empty(self._host.numel(), dtype=torch.uint8, device=self.device)


def _dtype_of(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
