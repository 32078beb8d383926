"""The memory layout of embedding tables.

    float32, bfloat16, float16     [N, D], no scales
    int8:row, e4m3:row[:pow2]      [N, D] of one byte, and one scale per row
    int4:row                       [N, D / 2], two codes per byte, low nibble first

The scale of a row is stored in one byte, a float without a sign: five exponent bits, three mantissa bits.

    scale = 2^(code // 8 - BIAS) * (1 + code % 8 / 8)        NaN if code is 255

    int8             2^-28 to 14, for rows up to 1,778       int4     2^-24 to 224, for rows up to 1,568
    e4m3, e5m2       2^-28 to 14, for rows up to 6,272 and 802,816 (:pow2: 3,584 and 458,752)

A scale is rounded up, so a row is at most an eighth and on average about 5 % coarser than with an exact scale. Rows
beyond the range cannot be packed (ValueError); an update that leads there, or to NaN or Inf in a row of integers, makes
the row NaN. Rows below the range have the smallest scale, and errors of at most half of it (2e-9 for int8).

Why one byte: memory is read in bursts of 64 bytes, so a float32 scale from an array of its own costs as much as half a
row of 128 bytes, and a 40 MB array of them does not stay in the L2 cache beside the rows that stream through it. 10 MB
do. Decoding is an addition and a shift: the code is the upper bits of a float32.

Rows and their scales are in one allocation, the `store`: all rows, then all scales. A scale at the end of its row was
slower at every width (H200: 5.2 instead of 6.7 times F.embedding_bag's speed at 256 bytes, 2.2 instead of 2.3 at 32),
because rows are then not aligned. Kernels take both with any stride.

Some rows may be kept in float32 ("hot" rows): `slot[r]` is the place of row r in `hot`, or -1. The low-precision copy
of a hot row is not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loka.formats import FORMATS, INT4, ROW, QTensor, Spec, dequantize, quantize
from loka.formats.format import round_to
from loka.formats.quantize import block_amax, scale_from_amax

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BIAS, BIAS_INT4 = 28, 24  # of the exponent of a scale
NAN_SCALE = 255
_MANTISSA = 20  # bits that float32 has beyond a scale


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
            f"rows have one scale each, computed from the row: int8:row, e4m3:row[:pow2], e5m2:row, int4:row; got {kind}"
        )
    if spec.rounding != "nearest":
        raise ValueError(f"{kind}: rounding is an option of the update, not of the rows; hint: drop ':stochastic'")
    return spec


@dataclass(frozen=True, eq=False)
class Rows:
    """A table of N rows of width D.

    Args:
        data: the elements.
        scale_code: uint8 [N], the scales as stored; None for float rows.
        spec: of quantized rows; None for float rows.
        slot: int32 [N], -1 or a place in `hot`; None if there are no hot rows.
        hot: float32 [H, D], rows kept in float32.

    Example:
        >>> rows = Rows.of(torch.randn(1000, 64), "int8:row")
        >>> rows.bytes / (1000 * 64 * 4)
        0.25390625
    """

    data: Tensor
    scale_code: Tensor | None = None
    spec: Spec | None = None
    slot: Tensor | None = None
    hot: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.spec is None) != (self.scale_code is None) or (self.slot is None) != (self.hot is None):
            raise ValueError(
                "give both spec and scale_code (quantized rows) or neither, and both slot and hot or neither"
            )
        floats = self.data.dtype in FLOATS.values()
        expected = floats if self.spec is None else self.data.dtype == _storage_dtype(self.spec)
        if self.data.dim() != 2 or not expected:
            raise ValueError(f"rows of {self.kind} are 2-D, got {self.data.dtype} {tuple(self.data.shape)}")
        for name, dtype in (("scale_code", torch.uint8), ("slot", torch.int32)):
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
    def of(cls, weight: Tensor, kind: str) -> Rows:
        """Convert a float table to another row format, rounding to nearest."""
        return cls.in_store(*fill_store(weight, kind), weight.shape[1])

    @classmethod
    def in_store(
        cls, store: Tensor, spec: Spec | None, width: int, *, slot: Tensor | None = None, hot: Tensor | None = None
    ) -> Rows:
        """Return views of the rows in a store made by `fill_store`."""
        if spec is None:
            return cls(store, None, None, slot, hot)
        row = width // 2 if spec.format == INT4 else width
        count = store.numel() // (row + 1)
        codes, scale_code = store[: count * row].view(count, row), store[count * row :]
        return cls(codes.view(_storage_dtype(spec)), scale_code, spec, slot, hot)

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
    def scale(self) -> Tensor | None:
        """Return the scales as float32 [N], a copy; None for float rows."""
        if self.spec is None or self.scale_code is None:
            return None
        return decode_scale(self.scale_code, self.spec)

    @property
    def bytes(self) -> int:
        """Return the memory of rows, scales, slots and hot rows in bytes."""
        row = self.data.stride(0) * self.data.element_size()
        scale = 0 if self.scale_code is None else 1
        hot = sum(t.numel() * t.element_size() for t in (self.slot, self.hot) if t is not None)
        return self.count * (row + scale) + hot

    def take(self, index: Tensor) -> Tensor:
        """Return rows by index, dequantized to float32 [n, D]."""
        data = self.data[index]
        if self.spec is None or self.scale_code is None:
            values = data.float()
        else:
            codes, scale = unpack_codes(data, self.spec), decode_scale(self.scale_code[index], self.spec)
            values = dequantize(QTensor(codes, scale.unsqueeze(1), self.spec))
        if self.slot is None or self.hot is None:
            return values
        place = self.slot[index].long()
        return torch.where((place >= 0).unsqueeze(1), self.hot[place.clamp(min=0)] if len(self.hot) else values, values)

    def dequantize(self) -> Tensor:
        """Return the whole table as float32."""
        return self.take(torch.arange(self.count, device=self.data.device))


def fill_store(weight: Tensor, kind: str) -> tuple[Tensor, Spec | None]:
    """Convert a float table to a row format, rounding to nearest.

    Args:
        weight: floating point [N, D].
        kind: the row format.

    Returns:
        The store and its Spec: [N, D] and None for float rows, else a flat uint8 tensor, all rows and then all scales.

    Raises:
        ValueError: an int4 row has an odd width, or a row is beyond the range of the scales.
    """
    parsed = parse_rows(kind)
    weight = weight.detach()
    if isinstance(parsed, torch.dtype):
        return weight.to(parsed), None
    if parsed.format == INT4 and weight.shape[1] % 2:
        raise ValueError(f"int4 rows are packed in pairs: the width must be even, got {weight.shape[1]}")
    q = quantize(weight, replace(parsed, mode="static"), scale=_choose_scale(weight, parsed))
    codes = pack_codes(q.data, parsed)
    count, row = codes.shape
    store = torch.zeros(count * (row + 1), dtype=torch.uint8, device=codes.device)
    rows = Rows.in_store(store, parsed, weight.shape[1])
    rows.data.view(torch.uint8).copy_(codes.view(torch.uint8))
    if rows.scale_code is not None:
        rows.scale_code.copy_(encode_scale(q.scale.view(-1), parsed))
    return store, parsed


def _choose_scale(weight: Tensor, spec: Spec) -> Tensor:
    """Return the scale of each row [N, 1]: the smallest that does not saturate it, and the same for its rounded values.

    Rounding may make the largest element smaller than that. If a smaller scale then fits, it is chosen at once: the
    largest element is as close to it. So a table that is stored as float values and packed again does not change.
    """
    amax = block_amax(weight, ROW)
    scale = _round_up(scale_from_amax(amax, spec), spec)
    if not weight.is_meta and bool(scale.isnan().any()):
        row = int(amax.argmax())
        raise ValueError(
            f"row {row} has an element of {float(amax[row]):.4g}; the scales of {spec} rows hold up to "
            f"{largest_element(spec):,.0f}; hint: bfloat16 rows have no scales"
        )
    return _round_up(scale_from_amax(round_to(amax / scale, spec.format) * scale, spec), spec)


def largest_element(spec: Spec) -> float:
    """Return the largest magnitude that rows of this Spec hold."""
    last = (NAN_SCALE - 1) // 8 * 8 if spec.scale == "pow2" else NAN_SCALE - 1
    return spec.format.max * float(decode_scale(torch.tensor(last), spec))


def _round_up(scale: Tensor, spec: Spec) -> Tensor:
    return decode_scale(encode_scale(scale, spec), spec)


def encode_scale(scale: Tensor, spec: Spec) -> Tensor:
    """Return positive float32 scales as stored, rounded up; 255, which is NaN, for NaN and beyond the range."""
    code = ((scale.view(torch.int32) + ((1 << _MANTISSA) - 1)) >> _MANTISSA) - scale_offset(spec)
    return torch.where(scale < torch.inf, code.clamp(0, NAN_SCALE), NAN_SCALE).to(torch.uint8)


def decode_scale(code: Tensor, spec: Spec) -> Tensor:
    """Return stored scales as float32."""
    scale = ((code.to(torch.int32) + scale_offset(spec)) << _MANTISSA).view(torch.float32)
    return torch.where(code == NAN_SCALE, torch.nan, scale)


def scale_offset(spec: Spec) -> int:
    """Return what is added to the code of a scale to make it the upper 12 bits of a float32."""
    return (127 - (BIAS_INT4 if spec.format == INT4 else BIAS)) * 8


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
