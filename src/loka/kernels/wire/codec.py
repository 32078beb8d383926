"""Codecs: encode tensors as bytes with inline scales, for communication.

    e4m3:1x128:pow2            a 4-byte scale in front of 128 codes: 1.031 bytes per element
    e4m3:1x32:e8m0             a 1-byte scale in front of 32 codes (MXFP8): 1.031 bytes per element
    e5m2:1x128:pow2, int8:1x128, int4:1x64, e2m1:1x32:e8m0, ...:stochastic
    bf16, fp16, fp32           plain values sent as bytes, so that the transport need not support the dtype

A block is `[scale][codes]`, and the last one may be shorter, so encoding whole blocks commutes with concatenation: a
buffer can be cut at multiples of the block and its pieces sent to different ranks. 4-bit codes are packed, low nibble
first.

Scales multiply in dequantization, as in `loka.formats`. With `pow2` or `e8m0` they are powers of two, so a weight that
was gathered in E4M3 and is then quantized to E4M3 again with a power-of-two scale is not rounded a second time.
Non-finite values stay visible: in the codes if the format has them, else as a NaN scale (255 in E8M0).

Stochastic codecs round with `loka.formats.philox`: the random numbers depend on the step, the stream and the position
of the block, not on what was encoded before.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import Draw, QTensor, Spec, block_bits, dequantize, quantize, round_bf16
from loka.formats.format import power_of_two
from loka.kernels import wire

_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Codec:
    """An encoding of floating-point tensors as bytes. Build it with `parse_codec`.

    Args:
        spec: of a block codec, with `1xN` blocks and dynamic scales; None for a plain codec.
        dtype: of a plain codec.
        stochastic: round stochastically, for a plain bf16 codec (the Spec of a block codec has its own rounding).

    Example:
        >>> codec = parse_codec("e4m3:1x128:pow2")
        >>> data = codec.encode(x)
        >>> y = codec.decode(data, x.numel()).view_as(x)
    """

    spec: Spec | None = None
    dtype: torch.dtype = torch.float32
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.spec is None:
            if self.dtype not in _PLAIN.values():
                raise ValueError(f"a plain codec is one of {', '.join(_PLAIN)}, got {self.dtype}")
            if self.stochastic and self.dtype != torch.bfloat16:
                raise ValueError(f"plain stochastic rounding is to bf16, not {self.dtype}; hint: bf16:stochastic")
            return
        block, problems = self.spec.block, []
        if block.rows != 1 or block.cols < 1:
            problems.append(f"its block must be 1xN, not {block}: tensors are sent flat, without rows")
        elif self.spec.format.bits == 4 and block.cols % 2:
            problems.append(f"four-bit codes are packed in pairs, so a block of {block.cols} cannot be cut")
        if self.spec.mode != "dynamic":
            problems.append(f"its scales are sent with the data, so they cannot be {self.spec.mode}")
        if self.spec.scale == "e4m3":
            problems.append("two-level scales need the maximum of the whole tensor, which no piece of it knows")
        if problems:
            raise ValueError(f"{self.spec} is no codec: {'; '.join(problems)}; hint: e4m3:1x128:pow2")

    @property
    def block(self) -> int:
        """Return the elements per block; 1 for a plain codec."""
        return 1 if self.spec is None else self.spec.block.cols

    @property
    def is_stochastic(self) -> bool:
        """Return True if `encode` needs a `draw`."""
        return self.stochastic or (self.spec is not None and self.spec.rounding == "stochastic")

    @property
    def _scale_bytes(self) -> int:
        return 0 if self.spec is None else 1 if self.spec.scale == "e8m0" else 4

    def size(self, elements: int) -> int:
        """Return the encoded size of so many elements in bytes, scales included."""
        if self.spec is None:
            return elements * self.dtype.itemsize
        return -(-elements // self.block) * self._scale_bytes + -(-elements * self.spec.format.bits // 8)

    def encode(self, x: Tensor, *, draw: Draw | None = None, first_block: int = 0) -> Tensor:
        """Encode a floating-point tensor.

        Args:
            x: any shape; read in row-major order.
            draw: determines the random numbers; required by stochastic codecs and refused by others.
            first_block: index of x's first block in the whole tensor, if x is a piece of it.

        Returns:
            uint8 [size(x.numel())].
        """
        if self.is_stochastic != (draw is not None):
            wants = "needs a draw: step and stream" if self.is_stochastic else "rounds to nearest and takes no draw"
            raise ValueError(f"{self} {wants}")
        flat = x.detach().reshape(-1)
        if self.spec is None:
            if draw is not None:
                place = torch.arange(first_block, first_block + len(flat), device=x.device)
                first = first_block // 128
                rows = torch.arange(first, (first_block + len(flat)) // 128 + 1, device=x.device)
                bits = block_bits(rows, 128, draw).flatten()[place - 128 * first]
                return round_bf16(flat.float(), bits << 3).view(torch.uint8)
            return _saturate(flat, self.dtype).to(self.dtype).contiguous().view(torch.uint8)
        whole = len(flat) // self.block
        if whole and wire.supports(self.spec, flat.dtype, flat.device):
            cut = whole * self.block
            blocks = flat[:cut].view(whole, self.block)
            packed = wire.pack(blocks, self.spec, draw=draw, first_block=first_block).view(-1)
            if cut == len(flat):
                return packed
            return torch.cat([packed, self._encode_blocks(flat[cut:], draw, first_block + whole)])
        return self._encode_blocks(flat, draw, first_block)

    def _encode_blocks(self, flat: Tensor, draw: Draw | None, first_block: int) -> Tensor:
        """Encode with torch operations. This defines the byte format."""
        assert self.spec is not None
        blocks = F.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        blocks = torch.where(blocks.isnan(), torch.nan, blocks)  # without a sign, which the hardware's cast drops
        noise = None
        if draw is not None:
            rows = torch.arange(first_block, first_block + len(blocks), device=flat.device)
            noise = block_bits(rows, self.block, draw).to(torch.float32) * 2.0**-20
        quantized = quantize(blocks, self.spec, noise=noise)
        pieces = [self._write_scales(quantized.scale), self._write_codes(quantized.data)]
        return torch.cat(pieces, 1).view(-1)[: self.size(len(flat))]

    def decode(self, data: Tensor, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode what `encode` returned.

        Args:
            data: uint8 [size(elements)].
            elements: number of values.
            dtype: of the result.

        Returns:
            A tensor [elements] of `dtype`.
        """
        if data.dtype != torch.uint8 or data.numel() != self.size(elements):
            raise ValueError(
                f"{self} writes {elements} elements as {self.size(elements)} bytes, got {data.numel()} of {data.dtype}"
            )
        if self.spec is None:
            return data.clone().view(self.dtype).to(dtype)
        width, whole = self.size(self.block), elements // self.block
        if whole and wire.supports(self.spec, dtype, data.device):
            values = wire.unpack(data[: whole * width].view(whole, width), self.spec, dtype).view(-1)
            if len(values) == elements:
                return values
            return torch.cat([values, self._decode_blocks(data[whole * width :], elements - len(values), dtype)])
        return self._decode_blocks(data, elements, dtype)

    def _decode_blocks(self, data: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """Decode with torch operations."""
        assert self.spec is not None
        width = self.size(self.block)
        rows = F.pad(data, (0, -data.numel() % width)).view(-1, width)
        codes = self._read_codes(rows[:, self._scale_bytes :])
        scale = self._read_scales(rows[:, : self._scale_bytes])
        return dequantize(QTensor(codes, scale, self.spec), dtype).view(-1)[:elements]

    def _write_scales(self, scale: Tensor) -> Tensor:
        if self._scale_bytes == 4:
            return scale.contiguous().view(torch.uint8)
        exponent = torch.frexp(scale).exponent + 126  # scale = 0.5 * 2^exponent
        return torch.where(scale.isnan(), 255, exponent).to(torch.uint8)

    def _read_scales(self, data: Tensor) -> Tensor:
        if self._scale_bytes == 4:
            return data.contiguous().view(torch.float32)
        scale = power_of_two(data.int() - 127)
        return torch.where(data == 255, torch.nan, scale)

    def _write_codes(self, codes: Tensor) -> Tensor:
        assert self.spec is not None
        data = codes.contiguous().view(torch.uint8)
        if self.spec.format.bits == 8:
            return data
        return (data[:, 0::2] & 15) | ((data[:, 1::2] & 15) << 4)

    def _read_codes(self, data: Tensor) -> Tensor:
        assert self.spec is not None
        if self.spec.format.bits == 8:
            return data.contiguous().view(self.spec.format.dtype)
        nibbles = torch.stack((data & 15, data >> 4), -1).flatten(1)
        if not self.spec.format.is_integer:
            return nibbles
        signed: Tensor = nibbles.to(torch.int8)
        return torch.where(signed > 7, signed - 16, signed)

    def __str__(self) -> str:
        if self.spec is not None:
            return str(self.spec)
        name = next(name for name, dtype in _PLAIN.items() if dtype == self.dtype)
        return f"{name}:stochastic" if self.stochastic else name


def parse_codec(text: str | Codec) -> Codec:
    """Parse a codec.

    Args:
        text: `fp32`, `bf16`, `bf16:stochastic`, `fp16`, or the Spec of a block codec, e.g. `e4m3:1x128:pow2`. A Codec
            is returned as it is.

    Returns:
        The codec.

    Raises:
        ValueError: the text is not a codec; the message has every reason.

    Example:
        >>> parse_codec("e4m3:1x32:e8m0").size(4096) / 4096
        1.03125
    """
    if isinstance(text, Codec):
        return text
    name, _, rest = text.partition(":")
    if name in _PLAIN and rest in ("", "stochastic"):
        return Codec(dtype=_PLAIN[name], stochastic=bool(rest))
    return Codec(Spec.parse(text))


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp finite values to the range of a narrower dtype; keep NaN and Inf."""
    if torch.finfo(dtype).max >= torch.finfo(x.dtype).max:
        return x
    limit = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-limit, limit))
