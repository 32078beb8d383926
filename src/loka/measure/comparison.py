"""Check every element of a product of any size: it must be the exact one, up to hardware accumulation and one rounding.

    y = sum_k (a_k s_a)(b_k s_b)                 in float64
    T = sqrt( sum_k (a_k b_k)^2 + y^2 )          the size that accumulation errors are relative to (`conformance`);
                                                 subnormals count as the smallest normal
    e = max(0, |out - y| - ulp(out) / 2) / T     what rounding the result once does not explain

e is the accumulation error, at most about `conformance.accumulation_error`, whatever the output type. Subtracting half
an ulp removes output rounding altogether instead of averaging it out, which also works for results that repeat
(duplicate rows, sums of signs).

An error may be anywhere, so root mean squares are taken over every unit that a kernel works in: all elements, each row,
each column, strips of 64 along both, tiles of 8 x 8 and of 64 x 64. A group of n elements is allowed 1 + 5 / sqrt(n)
times the bound, a single element 8 times; the worst counts. A bad row, column, tile or element cannot hide among good
ones, nor a small row among large ones, since e is relative for each element.

Results are compared in slabs of rows, to limit the memory for float64 copies.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, expand_scale
from loka.formats import decode as decode_elements
from loka.measure.conformance import ELEMENT_ALLOWANCE, ULP, Conformance, Law, nominal_size, show_first

SLAB = 1 << 25  # elements of a result compared at a time
STRIP, TILE = 64, 8


class Product:
    """The exact product of two quantized operands, computed in slabs of rows.

    Args:
        a, b: the operands.
        keep: keep slabs for the next results that are compared with it, until `forget`.
    """

    def __init__(self, a: QTensor, b: QTensor, *, keep: bool) -> None:
        self.a, self.b, self._keep = a, b, keep
        self._right: tuple[Tensor, Tensor, Tensor] | None = None
        self._kept: dict[int, Law] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self.a.shape[0], self.b.shape[0]

    def slabs(self) -> Iterator[tuple[int, Law]]:
        """Yield (first row, exact rows) from top to bottom."""
        rows, columns = self.shape
        height = max(STRIP, SLAB // max(columns, 1) // STRIP * STRIP)
        for start in range(0, rows, height):
            known = self._kept.get(start)
            if known is None:
                known = self._compute(start, min(rows, start + height))
                if self._keep:
                    self._kept[start] = known
            yield start, known

    def forget(self) -> None:
        """Release what was computed. It is computed again when it is asked for."""
        self._kept.clear()
        self._right = None

    def _compute(self, start: int, stop: int) -> Law:
        left, left_sizes, rows = _normalize_rows(self.a, start, stop)
        if self._right is None:
            self._right = _normalize_rows(self.b, 0, self.b.shape[0])
        right, right_sizes, columns = self._right
        y = (left @ right.T).mul_(rows).mul_(columns.T)
        size = (left_sizes.square() @ right_sizes.square().T).sqrt_()
        # in halves: a product of both may be in the range of float32 where neither factor times a size is
        for half in (rows.abs().sqrt().float(), columns.T.abs().sqrt().float()) * 2:
            size.mul_(half)
        return Law(y, torch.hypot(size, y.float()))


def _rows(q: QTensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return the elements and expanded scales of some rows, the latter in float64."""
    elements = decode_elements(q.data[start:stop], q.spec.format)
    scale = q.multiplier(torch.float64)
    if q.spec.block.rows == 1:
        return elements, expand_scale(scale[start:stop], elements.shape, q.spec.block)
    expanded = expand_scale(scale, q.shape, q.spec.block)
    return elements, expanded[start:stop] if expanded.dim() == 2 and expanded.shape[0] == q.shape[0] else expanded


def _normalize_rows(q: QTensor, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return some rows and their nominal sizes, both divided by one number a row, and these numbers.

    Without this, squares would leave the range of float32. It is a row's scale, if it has one, or its largest value.
    """
    elements, scale = _rows(q, start, stop)
    sizes = nominal_size(elements, q.spec.format)
    if scale.dim() == 0 or scale.shape[1] == 1:
        return elements.double(), sizes.float().nan_to_num(0.0), scale.expand(len(elements), 1)
    values = elements * scale
    largest = (
        values.abs().nan_to_num(0.0).amax(dim=1, keepdim=True) if values.shape[1] else values.new_ones(len(values), 1)
    )
    largest = torch.where(largest > 0, largest, 1.0)
    return values / largest, (sizes * scale.abs() / largest).nan_to_num(0.0).float(), largest


def compare_product(
    out: Tensor, exact: Product, *, allowed: float, dtype: torch.dtype, alike: bool = False
) -> Conformance:
    """Compare a result with the exact product. The verdict's `error` is the worst error over its allowance.

    `allowed` bounds the accumulation error, as a share of T. `alike`: most rows are equal, and so are their errors, so
    only single elements are checked.
    """
    if tuple(out.shape) != exact.shape or out.dtype != dtype:
        seen, wanted = f"{tuple(out.shape)} {out.dtype}", f"{exact.shape} {dtype}"
        return Conformance.failed(f"result is {seen}, expected {wanted}", allowed)
    if out.numel() == 0:
        return Conformance(True, 0.0, allowed)
    worst, where = 0.0, ""
    columns = torch.zeros(out.shape[1], dtype=torch.float64, device=out.device)
    for start, slab in exact.slabs():
        some = out[start : start + slab.y.shape[0]]
        finite = _are_finite(some, slab)
        misplaced = None if finite else _find_misplaced(some, slab, allowed, start)
        if misplaced:
            return Conformance.failed(misplaced, allowed)
        squares = _unexplained(some, slab, finite=finite).square_()
        columns += squares.sum(dim=0, dtype=torch.float64)
        worst, where = max((worst, where), _find_worst(_looks(squares, start, alike)))
    if not alike:
        worst, where = max((worst, where), _find_worst(_look_at_columns(columns, out.shape[0])))
    return Conformance.within(worst, allowed, f"{where}: error {worst:.3g} of the terms, allowed {allowed:.3g}")


def _unexplained(out: Tensor, exact: Law, *, finite: bool) -> Tensor:
    """Return e (see the module docstring) in float32; 0 where the exact or the actual result is not finite."""
    # Rounded to float32: what is left of two neighbors needs none of float64's digits, nor does T.
    error = torch.sub(exact.y, out, out=torch.empty_like(exact.y, dtype=torch.float32)).abs_()
    binade = (out.float().view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^floor(log2 |out|), 0 for subnormals
    step = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
    error.sub_(binade.mul_(ULP[out.dtype] / 2).clamp_(min=step)).clamp_(min=0.0)
    ratio = error.div_(exact.terms).nan_to_num_(nan=0.0, posinf=torch.inf)  # 0 / 0: nothing was to be added up
    return ratio if finite else torch.where(exact.y.isfinite() & out.isfinite(), ratio, 0.0)


def _are_finite(out: Tensor, exact: Law) -> bool:
    """Check whether all elements are finite, and so far from overflowing that no rounding decides."""
    least, largest = exact.y.aminmax()  # NaN if y contains one
    limit = torch.finfo(out.dtype).max / 2
    return bool((largest < limit) & (least > -limit) & out.isfinite().all())


def _find_misplaced(out: Tensor, exact: Law, allowed: float, start: int) -> str | None:
    """Describe where NaN or infinity differs from the exact result, or return None."""
    y, limit = exact.y, torch.finfo(out.dtype).max
    room = ELEMENT_ALLOWANCE * allowed * exact.terms.double() + ULP[out.dtype] * y.abs()
    infinite = out.isinf()
    for what, wrong in (
        ("differ in being NaN", out.isnan() != y.isnan()),
        ("overflow differently", (y.isinf() | (y.abs() - room > limit)) & ~infinite),
        ("overflow differently", (y.abs() + room < limit) & infinite),
        ("overflow differently", infinite & (out.sign() != y.sign())),
    ):
        if wrong.any():
            return f"{int(wrong.sum())} elements {what}, {show_first(wrong, out, y, start=start)}"
    return None


@dataclass(frozen=True)
class _Worst:
    """The worst of the root mean squares over their allowances, still on the device."""

    square: Tensor
    index: Tensor
    place: Callable[[int], str]


def _looks(squares: Tensor, start: int, alike: bool) -> Iterator[_Worst]:
    """Yield the worst of each kind of group."""
    height, width = squares.shape
    yield _worst(squares, 1 / ELEMENT_ALLOWANCE**2, lambda i: f"element [{start + i // width}, {i % width}]")
    if alike:
        return
    yield _worst(squares.mean(dim=1), 1 / _allowance(width) ** 2, lambda i: f"row {start + i}")
    yield _worst_block(_pool(squares, 1, STRIP), (height, width), (1, STRIP), start)
    yield _worst_block(_pool(squares, STRIP, 1), (height, width), (STRIP, 1), start)
    tiles = _pool(squares, TILE, TILE)
    yield _worst_block(tiles, (height, width), (TILE, TILE), start)
    yield _worst_block(_pool(tiles, STRIP // TILE, STRIP // TILE), (height, width), (STRIP, STRIP), start)


def _look_at_columns(sums: Tensor, rows: int) -> Iterator[_Worst]:
    yield _worst(sums, 1 / (rows * _allowance(rows) ** 2), lambda i: f"column {i}")
    whole = sums.mean() / (rows * _allowance(rows * len(sums)) ** 2)
    yield _Worst(whole, torch.zeros_like(whole), lambda i: "the whole result")


def _worst(squares: Tensor, share: float, place: Callable[[int], str]) -> _Worst:
    largest, index = squares.flatten().max(0)
    return _Worst(largest * share, index, place)


def _find_worst(looks: Iterable[_Worst]) -> tuple[float, str]:
    """Return the worst root mean square and its place. Everything is fetched at once, since each fetch waits."""
    found = list(looks)
    table = torch.stack([torch.stack((look.square.double(), look.index.double())) for look in found]).tolist()
    square, index, look = max(((s, i, look) for (s, i), look in zip(table, found, strict=True)), key=lambda row: row[0])
    return math.sqrt(square), look.place(int(index))


def _pool(sums: Tensor, high: int, wide: int) -> Tensor:
    """Sum over blocks; blocks at the edges may be smaller."""
    rows, columns = sums.shape
    padded = F.pad(sums, (0, -columns % wide, 0, -rows % high)) if rows % high or columns % wide else sums
    return padded.reshape(-(-rows // high), high, -(-columns // wide), wide).sum(dim=(1, 3))


def _worst_block(sums: Tensor, shape: tuple[int, int], block: tuple[int, int], start: int) -> _Worst:
    """Return the worst of blocks, by their sums of squares. Those at the edges have fewer elements."""
    (height, width), (high, wide) = shape, block
    last_high, last_wide = (height - 1) % high + 1, (width - 1) % wide + 1

    def share(rows: int, columns: int) -> float:
        return 1 / (rows * columns * _allowance(rows * columns) ** 2)

    found = sums * share(high, wide)
    found[-1] = sums[-1] * share(last_high, wide)
    found[:, -1] = sums[:, -1] * share(high, last_wide)
    found[-1, -1] = sums[-1, -1] * share(last_high, last_wide)

    def place(index: int) -> str:
        row, column = index // sums.shape[1] * high, index % sums.shape[1] * wide
        ends = start + min(row + high, height) - 1, min(column + wide, width) - 1
        return f"rows {start + row} to {ends[0]}, columns {column} to {ends[1]}"

    return _worst(found, 1.0, place)


def _allowance(count: int) -> float:
    return 1 + 5 / math.sqrt(count)
