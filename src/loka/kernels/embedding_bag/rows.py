"""The rows of an embedding table as they lie in memory.

    float32, bfloat16, float16     [N, D], no scales
    int8:row, e4m3:row[:pow2]      [N, D] of one byte, and one float32 scale a row
    int4:row                       [N, D / 2], two codes a byte, low nibble first

A scale lies at the end of its row where that has at most INLINE_UP_TO bytes, one sector of memory: the access that brings the row brings it too, where an array of scales takes a second one for every item (on an H200 50 us
instead of 68 for 65,536 bags of 20 rows of 32 bytes). Such rows begin at multiples of 4 bytes and are read four at a time. Wider ones are read sixteen at a time and have their scales behind all rows: there the narrow reads
cost more (104 us instead of 80 at 128 bytes, 155 instead of 124 at 256). Kernels take rows and scales with any stride; both lie in one allocation, the `store`.

Some rows may be kept high: `slot[r]` is the place of row r in `hot`, float32, or -1. What the low-precision array holds for such a row is not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import FORMATS, INT4, ROW, QTensor, Spec, dequantize, quantize

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INLINE_UP_TO = 32  # bytes of a row
_SCALE = 4  # bytes


def parse_rows(kind: str) -> Spec | torch.dtype:
    """Read the spelling of a row format: a float type, or a Spec with one scale a row.

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
        raise ValueError(f"rows are {', '.join(FLOATS)} or a Spec with one scale a row, e.g. int8:row, not {kind!r}")
    spec = Spec.parse(kind)
    if spec.block != ROW or spec.mode != "dynamic" or spec.scale not in ("f32", "pow2") or spec.format.name == "e2m1":
        raise ValueError(
            f"rows have one float32 scale each, made from them: int8:row, e4m3:row[:pow2], e5m2:row, int4:row; not {kind}"
        )
    if spec.rounding != "nearest":
        raise ValueError(f"{kind}: how rows are rounded belongs to the update; hint: drop ':stochastic'")
    return spec


@dataclass(frozen=True, eq=False)
class Rows:
    """A table of N rows of width D.

    Args:
        data: the elements.
        scale: float32 [N]; None for float rows.
        spec: of quantised rows; None for float rows.
        slot: int32 [N], -1 or a place in `hot`; None where no row is kept high.
        hot: float32 [H, D].

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
            raise ValueError("quantised rows have a spec and scales, kept rows have a slot and values: both or neither")
        expected = self.data.dtype in FLOATS.values() if self.spec is None else self.data.dtype == _stored(self.spec)
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
            raise ValueError(f"kept rows are float32 [H, {self.width}], got {self.hot.dtype} {tuple(self.hot.shape)}")

    @classmethod
    def of(cls, weight: Tensor, kind: str, *, inline: bool | None = None) -> Rows:
        """The rows of a float table in another format, rounded to nearest; `inline` as `fill_store` takes it."""
        return cls.in_store(*fill_store(weight, kind, inline=inline), weight.shape[1])

    @classmethod
    def in_store(
        cls, store: Tensor, spec: Spec | None, width: int, *, slot: Tensor | None = None, hot: Tensor | None = None
    ) -> Rows:
        """The rows that lie in a memory of `fill_store`."""
        if spec is None:
            return cls(store, None, None, slot, hot)
        used = width // 2 if spec.format == INT4 else width
        row = -(-used // _SCALE) * _SCALE
        if store.dim() == 2:
            codes, scale = store, store[:, row:].view(torch.float32)[:, 0]
        else:
            count = store.numel() // (row + _SCALE)
            codes, scale = store[: count * row].view(count, row), store[count * row :].view(torch.float32)
        return cls(codes[:, :used].view(_stored(spec)), scale, spec, slot, hot)

    @property
    def count(self) -> int:
        """Rows."""
        return self.data.shape[0]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.data.shape[1] * (2 if self.spec is not None and self.spec.format == INT4 else 1)

    @property
    def kind(self) -> str:
        """The spelling `parse_rows` reads."""
        return str(self.data.dtype).removeprefix("torch.") if self.spec is None else str(self.spec)

    @property
    def bytes(self) -> int:
        """All that is stored."""
        row = self.data.stride(0) * self.data.element_size()
        scale = 0 if self.scale is None or self.scale.stride(0) > 1 else _SCALE  # else it is part of the row
        beside = sum(t.numel() * t.element_size() for t in (self.slot, self.hot) if t is not None)
        return self.count * (row + scale) + beside

    def take(self, index: Tensor) -> Tensor:
        """Some rows as float32 [n, D], by number, each once."""
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
        """The whole table as float32."""
        return self.take(torch.arange(self.count, device=self.data.device))


def fill_store(weight: Tensor, kind: str, *, inline: bool | None = None) -> tuple[Tensor, Spec | None]:
    """A float table rounded to nearest, as one tensor, and its Spec.

    Args:
        weight: floating [N, D].
        kind: of the rows.
        inline: whether each scale lies at the end of its row; otherwise they follow all rows. None: by the width.

    Returns:
        [N, D] of a float type and None; or uint8 [N, bytes of a row and its scale], flat where scales follow the rows.
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


def _stored(spec: Spec) -> torch.dtype:
    return torch.uint8 if spec.format == INT4 else spec.format.dtype


def pack_codes(codes: Tensor, spec: Spec) -> Tensor:
    """Codes as they lie in memory."""
    if spec.format != INT4:
        return codes.contiguous()
    pair = codes.view(torch.uint8) & 15
    return (pair[:, 0::2] | (pair[:, 1::2] << 4)).contiguous()


def unpack_codes(data: Tensor, spec: Spec) -> Tensor:
    """The inverse of `pack_codes`."""
    if spec.format != INT4:
        return data
    nibbles = torch.stack((data & 15, data >> 4), -1).flatten(1).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)
