"""The same operand in other places: fresh memory, a buffer that held other values a moment ago, views at other addresses and strides.

A kernel that remembers what it saw at an address, that assumes an alignment nobody promised it, or that writes where it should read is right on
fresh contiguous operands and wrong elsewhere.

    fresh     a copy of its own
    reused    the same buffer for every operand of that shape: the address of the last call, other values
    shifted   contiguous rows that begin some elements into their storage
    slices    rows inside a wider buffer, as a slice of a concatenation has them, which begins some elements into its storage

On a GPU shifts and strides are whole multiples of 16 bytes: libraries may demand that, a fault there ends the process instead of the call, and the fronts of kernels copy
what lies elsewhere (loka.kernels.strides). A backend that says `any_alignment = True` is handed everything as it lies, and tried at every element.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from loka.formats import QTensor
from loka.kernels.strides import GRANULE

Place = Literal["fresh", "reused", "shifted", "slices"]


class Arrangement:
    """Puts operands in places; `number` chooses among the shifts, so that consecutive calls see different ones.

    Args:
        exact: shift by elements on a GPU too, not by 16 bytes.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def put(self, x: Tensor, place: Place, number: int, *, role: str) -> Tensor:
        """A tensor with the same values in another place.

        Args:
            x: what to copy.
            place: where to.
            number: of the call; other numbers, other shifts.
            role: operands of one call that may be alike in shape need different roles.

        Returns:
            The copy. It is valid until the next one of the same role and shape is put into the reused buffer.
        """
        if x.numel() == 0:
            return x.clone()
        raw = x.view(torch.uint8) if x.element_size() == 1 else x
        return self._place(raw, place, number, role).view(x.dtype)

    def put_quantized(self, q: QTensor, place: Place, number: int, *, role: str) -> QTensor:
        """A quantised operand; its scales move with it, by other distances, and lie by rows and by columns in turn."""
        data = self.put(q.data, place, number, role=role)
        scale = self.put(q.scale, "shifted" if place == "slices" else place, number // 2, role=role + " scale")
        if place == "slices" and scale.dim() == 2 and number % 2:
            scale = scale.t().contiguous().t()
        return replace(q, data=data, scale=scale)

    def _place(self, x: Tensor, place: Place, number: int, role: str) -> Tensor:
        if place == "fresh" or x.dim() == 0 or (x.dim() != 2 and place == "slices"):
            return x.clone(memory_format=torch.contiguous_format)
        if place == "reused":
            key = (role, x.dtype, tuple(x.shape))
            buffer = self._buffers.setdefault(key, torch.empty(x.shape, dtype=x.dtype, device=x.device))
            return buffer.copy_(x)
        unit = 1 if self.exact or x.device.type == "cpu" else max(1, GRANULE // x.element_size())
        shift = unit * choose_shift(number)
        if place == "shifted":
            return torch.empty(x.numel() + shift, dtype=x.dtype, device=x.device)[shift:].view(x.shape).copy_(x)
        rows, columns = x.shape
        stride = columns + -columns % unit + unit * choose_shift(number // 3)
        storage = torch.empty(rows * stride + shift, dtype=x.dtype, device=x.device)
        return storage.as_strided((rows, columns), (stride, 1), shift).copy_(x)


def choose_shift(number: int) -> int:
    """1 to 16 in an order that soon visits every power of two, then multiples of 16 up to 256."""
    order = (1, 8, 4, 2, 16, 3, 12, 6, 32, 5, 10, 7, 64, 9, 14, 11, 128, 13, 15, 48, 256, 24, 96, 20)
    return order[number % len(order)]


def unchanged(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return bool(torch.equal(x.contiguous().view(integers), y.contiguous().view(integers)))
