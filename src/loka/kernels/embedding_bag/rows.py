"""The rows of an embedding table as they lie in memory.

    float32, bfloat16, float16     [N, D], no scales
    int8:row, e4m3:row[:pow2]      [N, D] of one byte, and one float32 scale a row in an array of its own
    int4:row                       [N, D / 2], two codes a byte, low nibble first

Scales have an array of their own and not a place in the row: a row of 128 bytes then begins where a 32-byte sector begins, and the scales of hot rows stay in the cache.
A row costs 4 bytes more, a sector more to read.

Some rows may be kept high: `slot[r]` is the place of row r in `hot`, float32, or -1. What the low-precision array holds for such a row is not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import FORMATS, INT4, ROW, QTensor, Spec, dequantize, quantize

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    def of(cls, weight: Tensor, kind: str) -> Rows:
        """The rows of a float table in another format, rounded to nearest."""
        parsed = parse_rows(kind)
        weight = weight.detach()
        if isinstance(parsed, torch.dtype):
            return cls(weight.to(parsed))
        if parsed.format == INT4 and weight.shape[1] % 2:
            raise ValueError(f"int4 rows are packed in pairs: the width must be even, got {weight.shape[1]}")
        q = quantize(weight, parsed)
        return cls(pack_codes(q.data, parsed), q.scale.view(-1).contiguous(), parsed)

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
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.slot, self.hot) if t is not None)

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
