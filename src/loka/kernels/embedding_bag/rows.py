"""The memory layout of embedding tables.

    float32, bfloat16, float16     [N, D], no scales
    int8:row, e4m3:row[:pow2]      [N, D] of one byte, and one float32 scale per row
    int4:row                       [N, D / 2], two codes per byte, low nibble first

The scale of a row of at most INLINE_UP_TO bytes (one memory sector) is stored at the end of the row, so that one memory
access reads both; a separate array of scales would need a second access for every item (on an H200 50 us instead of 68
for 65,536 bags of 20 rows of 32 bytes). Such rows start at multiples of 4 bytes and are read 4 bytes at a time. Wider
rows are read 16 bytes at a time and have their scales behind all rows: there the narrow reads cost more (104 us instead
of 80 at 128 bytes, 155 instead of 124 at 256, with an earlier kernel; 56 instead of 63 at 64 bytes with this one, but
updates of such rows have not been timed). Kernels take rows and scales with any stride; both are in one
allocation, the `store`.

Some rows may be kept in float32 ("hot" rows): `slot[r]` is the place of row r in `hot`, or -1. The low-precision copy
of a hot row is not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import FORMATS, INT4, ROW, QTensor, Spec, dequantize, quantize

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INLINE_UP_TO = 32  # bytes per row
_SCALE = 4  # bytes


def parse_rows(kind: str) -> Spec | torch.dtype:
    """Parse a row format: a float dtype, or a Spec with one scale per row.

    Args:
        kind: `float32`, `bfloat16`, `float16`, `int8:row`, `e4m3:row`, `e4m3:row:pow2`, `e5m2:row`, `int4:row`.

    Returns:
        The dtype or the Spec.

    Example:
        >>> parse_rows("int8:row").format.name
        'int8'
    """
    if kind in FLOATS:
        return FLOATS[kind]
    if kind.partition(":")[0] not in FORMATS:
        raise ValueError(
            f"unknown row format {kind!r}; expected {', '.join(FLOATS)} or a Spec with one scale per row, e.g. int8:row"
        )
    spec = Spec.parse(kind)
    if spec.block != ROW or spec.mode != "dynamic" or spec.scale not in ("f32", "pow2") or spec.format.name == "e2m1":
        raise ValueError(
            f"rows have one float32 scale each, computed from the row: int8:row, e4m3:row[:pow2], e5m2:row, int4:row; got {kind}"
        )
    if spec.rounding != "nearest":
        raise ValueError(f"{kind}: rounding is an option of the update, not of the rows; hint: drop ':stochastic'")
    return spec


@dataclass(frozen=True, eq=False)
class Rows:
    """A table of N rows of width D.

    Args:
        data: the elements.
        scale: float32 [N]; None for float rows.
        spec: of quantized rows; None for float rows.
        slot: int32 [N], -1 or a place in `hot`; None if there are no hot rows.
        hot: float32 [H, D], rows kept in float32.

    Example:
        >>> rows = Rows.of(torch.randn(1000, 64), "int8:row")
        >>> rows.bytes / (1000 * 64 * 4)
        0.265625
    """

    data: Tensor
    scale: Tensor | None = None
    spec: Spec | None = None
    slot: Tensor | None = None
    hot: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.spec is None) != (self.scale is None) or (self.slot is None) != (self.hot is None):
            raise ValueError("give both spec and scale (quantized rows) or neither, and both slot and hot or neither")
        floats = self.data.dtype in FLOATS.values()
        expected = floats if self.spec is None else self.data.dtype == _storage_dtype(self.spec)
        if self.data.dim() != 2 or not expected:
            raise ValueError(f"rows of {self.kind} are 2-D, got {self.data.dtype} {tuple(self.data.shape)}")
        for name, dtype in (("scale", torch.float32), ("slot", torch.int32)):
            held: Tensor | None = getattr(self, name)
            if held is not None and (
                held.shape != (self.count,) or held.dtype != dtype or held.device != self.data.device
            ):
                raise ValueError(
                    f"{name} must be {dtype} [{self.count}] on {self.data.device}, got {held.dtype} {tuple(held.shape)} on {held.device}"
                )
        if self.hot is not None and (self.hot.dtype != torch.float32 or self.hot.shape[1:] != (self.width,)):
            raise ValueError(f"hot must be float32 [H, {self.width}], got {self.hot.dtype} {tuple(self.hot.shape)}")

    @classmethod
    def of(cls, weight: Tensor, kind: str, *, inline: bool | None = None) -> Rows:
        """Convert a float table to another row format, rounding to nearest; `inline` as in `fill_store`."""
        return cls.in_store(*fill_store(weight, kind, inline=inline), weight.shape[1])

    @classmethod
    def in_store(
        cls, store: Tensor, spec: Spec | None, width: int, *, slot: Tensor | None = None, hot: Tensor | None = None
    ) -> Rows:
        """Return views of the rows in a store made by `fill_store`."""
        if spec is None:
            return cls(store, None, None, slot, hot)
        used = width // 2 if spec.format == INT4 else width
        row = -(-used // _SCALE) * _SCALE
        if store.dim() == 2:
            codes, scale = store, store[:, row:].view(torch.float32)[:, 0]
        else:
            count = store.numel() // (row + _SCALE)
            codes, scale = store[: count * row].view(count, row), store[count * row :].view(torch.float32)
        return cls(codes[:, :used].view(_storage_dtype(spec)), scale, spec, slot, hot)

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return self.data.shape[0]

    @property
    def width(self) -> int:
        """Return the number of elements per row."""
        return self.data.shape[1] * (2 if self.spec is not None and self.spec.format == INT4 else 1)

    @property
    def kind(self) -> str:
        """Return the row format as `parse_rows` reads it."""
        return str(self.data.dtype).removeprefix("torch.") if self.spec is None else str(self.spec)

    @property
    def bytes(self) -> int:
        """Return the memory of rows, scales, slots and hot rows in bytes."""
        row = self.data.stride(0) * self.data.element_size()
        # an inline scale has a larger stride, and is already counted as part of the row
        scale = 0 if self.scale is None or self.scale.stride(0) > 1 else _SCALE
        hot = sum(t.numel() * t.element_size() for t in (self.slot, self.hot) if t is not None)
        return self.count * (row + scale) + hot

    def take(self, index: Tensor) -> Tensor:
        """Return rows by index, dequantized to float32 [n, D]."""
        data = self.data[index]
        if self.spec is None or self.scale is None:
            values = data.float()
        else:
            codes = unpack_codes(data, self.spec)
            values = dequantize(QTensor(codes, self.scale[index].unsqueeze(1), self.spec))
        if self.slot is None or self.hot is None:
            return values
        place = self.slot[index].long()
        return torch.where((place >= 0).unsqueeze(1), self.hot[place.clamp(min=0)] if len(self.hot) else values, values)

    def dequantize(self) -> Tensor:
        """Return the whole table as float32."""
        return self.take(torch.arange(self.count, device=self.data.device))


def fill_store(weight: Tensor, kind: str, *, inline: bool | None = None) -> tuple[Tensor, Spec | None]:
    """Convert a float table to a row format, rounding to nearest.

    Args:
        weight: floating point [N, D].
        kind: the row format.
        inline: store each scale at the end of its row, instead of all scales behind all rows. None: by the width.

    Returns:
        The store and its Spec: [N, D] and None for float rows, else uint8 [N, bytes of a row and its scale], flat if
        the scales are behind the rows.
    """
    parsed = parse_rows(kind)
    weight = weight.detach()
    if isinstance(parsed, torch.dtype):
        return weight.to(parsed), None
    if parsed.format == INT4 and weight.shape[1] % 2:
        raise ValueError(f"int4 rows are packed in pairs: the width must be even, got {weight.shape[1]}")
    q = quantize(weight, parsed)
    codes = pack_codes(q.data, parsed)
    row = -(-codes.shape[1] // _SCALE) * _SCALE
    inline = row <= INLINE_UP_TO if inline is None else inline
    shape = (len(codes), row + _SCALE) if inline else (len(codes) * (row + _SCALE),)
    store = torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    rows = Rows.in_store(store, parsed, weight.shape[1])
    rows.data.view(torch.uint8).copy_(codes.view(torch.uint8))
    if rows.scale is not None:
        rows.scale.copy_(q.scale.view(-1))
    return store, parsed


def _storage_dtype(spec: Spec) -> torch.dtype:
    return torch.uint8 if spec.format == INT4 else spec.format.dtype


def pack_codes(codes: Tensor, spec: Spec) -> Tensor:
    """Return codes as stored: int4 codes packed in pairs."""
    if spec.format != INT4:
        return codes.contiguous()
    pair = codes.view(torch.uint8) & 15
    return (pair[:, 0::2] | (pair[:, 1::2] << 4)).contiguous()


def unpack_codes(data: Tensor, spec: Spec) -> Tensor:
    """Undo `pack_codes`."""
    if spec.format != INT4:
        return data
    nibbles = torch.stack((data & 15, data >> 4), -1).flatten(1).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)
