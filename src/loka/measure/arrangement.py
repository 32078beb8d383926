"""Place the same operand elsewhere in memory: new memory, a reused buffer, views at other addresses and strides.

A kernel that caches by address, assumes an alignment it was not promised, or writes to its inputs is correct on fresh
contiguous operands and wrong elsewhere.

    fresh     a new copy
    reused    one buffer for all operands of that shape: the address of the last call with other values
    shifted   contiguous rows that begin some elements into their storage, and end some before its end
    slices    rows inside a wider buffer, like a slice of a concatenation, which begins some elements into its storage

On a GPU, shifts and strides are multiples of 16 bytes: libraries may require that, a violation kills the process
instead of failing the call, and the facades of kernels copy other operands (loka.kernels.strides). A backend with
`any_alignment = True` gets operands uncopied and is tested with shifts of single elements.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.kernels.strides import GRANULE

Place = Literal["fresh", "reused", "shifted", "slices"]


class Arrangement:
    """Places operands in memory. `number` selects the shift, so that consecutive calls see different ones.

    If `exact`, shifts are single elements on a GPU too, instead of 16 bytes.
    """

    def __init__(self, *, exact: bool = False) -> None:
        self.exact = exact
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def put(self, x: Tensor, place: Place, number: int, *, role: str) -> Tensor:
        """Copy a tensor to another place. Operands of one call that may have the same shape need different roles.

        A reused buffer is valid until the next copy of the same role and shape.
        """
        if x.numel() == 0:
            return x.clone()
        raw = x.view(torch.uint8) if x.element_size() == 1 else x
        return self._place(raw, place, number, role).view(x.dtype)

    def put_quantized(self, q: QTensor, place: Place, number: int, *, role: str) -> QTensor:
        """Copy a quantized operand. Its scales are moved too, by other distances, alternating row- and column-major."""
        data = self.put(q.data, place, number, role=role)
        scale = self.put(q.scale, "shifted" if place == "slices" else place, number // 2, role=role + " scale")
        if place == "slices" and scale.dim() == 2 and number % 2:
            scale = scale.t().contiguous().t()
        return replace(q, data=data, scale=scale)

    def _place(self, x: Tensor, place: Place, number: int, role: str) -> Tensor:
        if place == "fresh" or (x.dim() != 2 and place == "slices"):
            return x.clone(memory_format=torch.contiguous_format)
        if place == "reused":
            key = (role, x.dtype, tuple(x.shape))
            buffer = self._buffers.setdefault(key, torch.empty(x.shape, dtype=x.dtype, device=x.device))
            return buffer.copy_(x)
        unit = 1 if self.exact or x.device.type == "cpu" else max(1, GRANULE // x.element_size())
        shift = unit * choose_shift(number)
        if place == "shifted":
            storage = torch.empty(x.numel() + 2 * shift, dtype=x.dtype, device=x.device)
            return storage[shift : shift + x.numel()].view(x.shape).copy_(x)
        rows, columns = x.shape
        stride = columns + -columns % unit + unit * choose_shift(number // 3)
        storage = torch.empty(rows * stride + shift, dtype=x.dtype, device=x.device)
        return storage.as_strided((rows, columns), (stride, 1), shift).copy_(x)


def choose_shift(number: int) -> int:
    """Return a shift from 1 to 256. Consecutive numbers give different alignments."""
    order = (1, 8, 4, 2, 16, 3, 12, 6, 32, 5, 10, 7, 64, 9, 14, 11, 128, 13, 15, 48, 256, 24, 96, 20)
    return order[number % len(order)]


@torch.no_grad()
def refill(held: Any, new: Any) -> Any:
    """Return operands in the memory of earlier ones, wherever both have a tensor of the same shape and dtype.

    Args:
        held: the earlier operands: tensors in dataclasses, tuples, lists and dicts. Their values are overwritten.
        new: the operands, of the same structure. They are not changed.

    Returns:
        The values of `new` at the addresses of `held`.

    Example:
        >>> operands = refill(operands, adapter.operands(call, seed=1, distribution="normal", device=device))
    """
    if isinstance(new, Tensor):
        same = isinstance(held, Tensor) and (held.shape, held.dtype) == (new.shape, new.dtype)
        return held.copy_(new) if same else new
    if type(held) is not type(new):
        return new
    if isinstance(new, dict):
        return {name: refill(held.get(name), value) for name, value in new.items()}
    if isinstance(new, tuple | list):
        parts = [refill(old, value) for old, value in zip(held, new, strict=True)] if len(held) == len(new) else new
        return type(new)(*parts) if hasattr(new, "_fields") else type(new)(parts)
    if is_dataclass(new) and not isinstance(new, type | Spec):
        named = {f.name: refill(getattr(held, f.name), getattr(new, f.name)) for f in fields(new) if f.init}
        return replace(new, **named)
    return new


def same_values(x: Any, y: Any) -> bool:
    """Check whether the tensors of two operands of the same structure (see `refill`) are bitwise equal.

    Example:
        >>> same_values(operands, copy.deepcopy(operands))
        True
    """
    if isinstance(x, Tensor):
        return x is y or unchanged(x, y)
    if isinstance(x, dict):
        return all(same_values(value, y[name]) for name, value in x.items())
    if isinstance(x, tuple | list):
        return all(same_values(one, other) for one, other in zip(x, y, strict=True))
    if is_dataclass(x) and not isinstance(x, type | Spec):
        return all(same_values(getattr(x, f.name), getattr(y, f.name)) for f in fields(x))
    return True


class Surroundings:
    """The memory around some tensors, to see whether a kernel has written to it.

    Args:
        tensors: as a kernel gets them: views of larger storages.

    Example:
        >>> around = Surroundings(a.data, b.data)
        >>> kernel(a, b)
        >>> around.changed()
        False
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._storages = [_storage_of(t) for t in tensors if t.untyped_storage().nbytes() > t.nbytes]
        self._before = [storage.clone() for storage in self._storages]

    def changed(self) -> bool:
        """Return True if anything in the storages of the tensors differs from before."""
        pairs = zip(self._storages, self._before, strict=True)
        return not all(torch.equal(now, before) for now, before in pairs)


def _storage_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def unchanged(x: Tensor, y: Tensor) -> bool:
    """Check whether two tensors are bitwise equal."""
    return all_unchanged([(x, y)])[0]


def all_unchanged(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Check which pairs of tensors are bitwise equal. On a GPU all are fetched at once, since each fetch waits.

    Args:
        pairs: of tensors on one device.

    Returns:
        An answer for each pair.

    Example:
        >>> all_unchanged([(torch.zeros(2), torch.zeros(2)), (torch.zeros(2), -torch.zeros(2))])
        [True, False]
    """
    alike = [x.shape == y.shape and x.dtype == y.dtype for x, y in pairs]
    compared = [(_bits(x), _bits(y)) for (x, y), same in zip(pairs, alike, strict=True) if same]
    if len(compared) > 1 and compared[0][0].is_cuda:
        found = (~torch.stack([(x != y).any() for x, y in compared])).tolist()
    else:
        found = [torch.equal(x, y) for x, y in compared]
    answers = iter(found)
    return [same and next(answers) for same in alike]


def _bits(x: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(integers)
