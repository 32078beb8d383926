"""Quantization and dequantization: the reference for every kernel.

    x  ~  q * scale                      scale multiplies in dequantization

    amax  = max |x| over the finite elements of a block
    scale = amax / format.max            1 if amax is 0, so that zeros stay zeros and nothing divides by 0
    q     = round(saturate(x * (1 / scale)))

`1 / scale` is computed once per block in float32 and multiplied, as in a kernel: the last bit depends on it.
Power-of-two scales are rounded *up*, so that the largest element never saturates. Everything is computed in float32
whatever the input's dtype, and finite values stay finite in both directions: a float64 beyond float32 saturates, and so
does a product `q * scale` beyond the output dtype (with a power-of-two scale float16's 65504 rounds up to 65536).

Scales have one element per block, shaped like the grid of blocks over the last two dimensions (`tensor`: a scalar). The
last block may be smaller. An empty extent has no blocks, but `*` is always one block: an empty row has a scale, 1.
NVFP4 has two scales: E4M3 block scales, rounded to nearest, times one float32 `tensor_scale` = amax(x) / (6 * 448).

NaN and Inf are left out of the maximum, so that the other elements of the block keep their values. A format that cannot
hold them sets the scale of their block to NaN instead.

This module is numerics only: no autograd, fusion or layouts. The fast kernels are in `loka.kernels.quantize`.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats.format import E4M3, Format, decode, encode, power_of_two, round_to
from loka.formats.spec import TENSOR, WHOLE, Block, Spec


def smallest_scale() -> float:
    """Return the smallest normal float32: its reciprocal is finite, and no flush-to-zero turns it into 0.

    For code that torch.compile traces: a literal is a constant there, see `Format.max`; SMALLEST_SCALE is not.
    """
    return 2.0**-126


SMALLEST_SCALE = smallest_scale()


class _Bytes(NamedTuple):
    """A tensor of one-byte floats, as it is pickled."""

    data: Tensor
    dtype: torch.dtype


def pack(value: Any) -> Any:
    """Return a value, or a tuple or dict of values, with 8-bit floats as bytes: torch's pickles of them do not load."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.itemsize == 1:
        return _Bytes(value.view(torch.uint8), value.dtype)
    if isinstance(value, dict):
        return {name: pack(part) for name, part in value.items()}
    return tuple(pack(part) for part in value) if type(value) is tuple else value


def unpack(value: Any) -> Any:
    """Undo `pack`."""
    if isinstance(value, _Bytes):
        return value.data.view(value.dtype)
    if isinstance(value, dict):
        return {name: unpack(part) for name, part in value.items()}
    return tuple(unpack(part) for part in value) if type(value) is tuple else value


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized tensor: elements, their scales and their Spec.

    Args:
        data: elements, in the format's dtype.
        scale: float32, one per block: x ~ data * scale.
        spec: how it was quantized.
        tensor_scale: a scalar, for two-level scales (NVFP4) only.

    Example:
        >>> loka.formats.quantize(torch.randn(4, 128), loka.Spec.parse("e4m3:1x128")).dequantize().shape
        torch.Size([4, 128])
    """

    data: Tensor
    scale: Tensor
    spec: Spec
    tensor_scale: Tensor | None = None

    def __post_init__(self) -> None:
        if self.data.dtype != self.spec.format.dtype:
            raise ValueError(f"{self.spec} is stored as {self.spec.format.dtype}, got data of {self.data.dtype}")
        expected = scale_shape(self.data.shape, self.spec.block)
        if self.scale.shape != expected:
            seen = tuple(self.scale.shape)
            raise ValueError(
                f"{self.spec} of shape {tuple(self.data.shape)} needs scales of {tuple(expected)}, got {seen}"
            )
        if (self.tensor_scale is not None) != (self.spec.scale == "e4m3"):
            raise ValueError(f"a tensor_scale belongs to e4m3 block scales and to no other; {self.spec} breaks that")
        for name, held in (("scale", self.scale), ("tensor_scale", self.tensor_scale)):
            if held is not None and (held.dtype != torch.float32 or held.device != self.data.device):
                raise ValueError(
                    f"{name} must be float32 on {self.data.device}, where data is; got {held.dtype} on {held.device}"
                )
        if self.tensor_scale is not None and self.tensor_scale.dim() != 0:
            raise ValueError(f"tensor_scale must be a scalar, got shape {tuple(self.tensor_scale.shape)}")

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the tensor that this represents."""
        return self.data.shape

    @property
    def device(self) -> torch.device:
        """Return the device of the data."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Return the bytes of elements and scales."""
        extra = 0 if self.tensor_scale is None else self.tensor_scale.nbytes
        return self.data.nbytes + self.scale.nbytes + extra

    def multiplier(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return what elements are multiplied by, one number per block: the product of both levels if there are two."""
        scale = self.scale.to(dtype)
        return scale if self.tensor_scale is None else scale * self.tensor_scale.to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that this represents."""
        return dequantize(self, dtype)

    def __getstate__(self) -> dict[str, Any]:
        return pack(vars(self))  # type: ignore[no-any-return]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(unpack(state))

    def transpose(self) -> "QTensor":
        """Swap the last two dimensions, as views. Elements keep their scales."""
        if self.data.dim() < 2:
            raise ValueError(f"transpose swaps the last two dimensions, got shape {tuple(self.shape)}")
        scale = self.scale if self.scale.dim() < 2 else self.scale.transpose(-2, -1)
        return replace(self, data=self.data.transpose(-2, -1), scale=scale, spec=self.spec.transposed)


def scale_shape(shape: torch.Size | tuple[int, ...], block: Block) -> torch.Size:
    """Return the shape of the scales of a tensor, one per block.

    Args:
        shape: of the tensor.
        block: elements that share a scale.

    Returns:
        The shape of the scales.

    Example:
        >>> scale_shape((4, 256), Block.parse("1x128"))
        torch.Size([4, 2])
    """
    if block == TENSOR:
        return torch.Size(())
    rows, cols = _extents(shape, block)
    high, wide = _last_two(shape)
    grid = [  # `*` is one block even of an empty extent, so that every row has a scale
        1 if block.rows == WHOLE else -(-high // rows),
        1 if block.cols == WHOLE else -(-wide // cols),
    ]
    return torch.Size([*shape[:-2], *grid]) if len(shape) >= 2 else torch.Size(grid[1:][: len(shape)])


def _last_two(shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
    return (shape[-2] if len(shape) >= 2 else 1, shape[-1] if len(shape) >= 1 else 1)


def _extents(shape: torch.Size | tuple[int, ...], block: Block) -> tuple[int, int]:
    """Return the block's extents: at most the shape's, and at least 1, so that empty tensors have an empty grid."""
    rows, cols = (max(total, 1) for total in _last_two(shape))
    return (
        rows if block.rows == WHOLE else min(block.rows, rows),
        cols if block.cols == WHOLE else min(block.cols, cols),
    )


def _reduce_blocks(values: Tensor, block: Block) -> Tensor:
    """Return the maximum of non-negative values over each block, shaped like the scales."""
    if block == TENSOR:
        return values.amax() if values.numel() else values.new_zeros(())
    shape = scale_shape(values.shape, block)
    if values.numel() == 0:
        return values.new_zeros(shape)
    rows, cols = _extents(values.shape, block)
    grid = values if values.dim() >= 2 else values.reshape(1, -1)
    pad_rows, pad_cols = -grid.shape[-2] % rows, -grid.shape[-1] % cols
    if pad_rows or pad_cols:
        grid = F.pad(grid, (0, pad_cols, 0, pad_rows))
    high, wide = grid.shape[-2] // rows, grid.shape[-1] // cols
    blocks = grid.reshape(*grid.shape[:-2], high, rows, wide, cols)
    return blocks.amax(dim=(-3, -1)).reshape(shape)


def expand_scale(scale: Tensor, shape: torch.Size | tuple[int, ...], block: Block) -> Tensor:
    """Repeat block scales so that they multiply a tensor element by element.

    Args:
        scale: one per block.
        shape: of the tensor.
        block: elements that share a scale.

    Returns:
        A tensor that broadcasts to `shape`.

    Example:
        >>> q = quantize(torch.randn(4, 256), Spec.parse("e4m3:1x128"))
        >>> (q.data.float() * expand_scale(q.scale, q.shape, q.spec.block)).equal(q.dequantize())
        True
    """
    if block == TENSOR or len(shape) == 0:
        return scale
    scale = scale if len(shape) >= 2 else scale.reshape(1, -1)
    # a single row or column of scales broadcasts by itself
    if block.rows not in (1, WHOLE) and scale.shape[-2] > 1:
        scale = scale.repeat_interleave(block.rows, dim=-2)[..., : shape[-2], :]
    if block.cols not in (1, WHOLE) and scale.shape[-1] > 1:
        scale = scale.repeat_interleave(block.cols, dim=-1)[..., : shape[-1]]
    return scale if len(shape) >= 2 else scale.reshape(-1)


def _to_float32(x: Tensor) -> Tensor:
    """Convert to float32, saturating: a finite float64 stays finite, Inf stays Inf."""
    if x.dtype != torch.float64:
        return x.float()
    limit = torch.finfo(torch.float32).max
    return torch.where(x.isinf(), x, x.clamp(-limit, limit)).float()


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Return the largest finite magnitude (amax) of each block.

    Args:
        x: the tensor.
        block: elements that share a scale.

    Returns:
        float32, one per block; 0 for a block without finite elements.

    Example:
        >>> block_amax(torch.tensor([[1.0, -3.0]]), Block.parse("row"))
        tensor([[3.]])
    """
    magnitude = _to_float32(x).abs()
    return _reduce_blocks(magnitude.nan_to_num(nan=0.0, posinf=0.0), block)


def scale_from_amax(amax: Tensor, spec: Spec) -> Tensor:
    """Return the scale that maps a magnitude to the format's largest value.

    Two-level scales are not supported: they also need the maximum of the whole tensor (`quantize` computes them).

    Args:
        amax: largest magnitudes.
        spec: format and type of the scale.

    Returns:
        Scales of amax's shape; NaN where amax is not finite.

    Example:
        >>> scale_from_amax(torch.tensor(448.0), Spec.parse("e4m3:tensor"))
        tensor(1.)
    """
    if spec.scale == "e4m3":
        raise ValueError(f"{spec} has two levels of scales; hint: quantize makes both")
    amax = _to_float32(amax)
    scale = _divide(amax, spec.format.max).clamp(min=smallest_scale())
    if spec.scale in ("pow2", "e8m0"):
        scale = _round_up_to_power_of_two(scale)
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    # amax - amax is 0, or NaN where amax is not finite. A literal NaN is unequal to itself, so a compiler would not
    # recognize two quantizations of one tensor as the same.
    return scale + (amax - amax)


def _divide(x: Tensor, divisor: float) -> Tensor:
    """Divide, correctly rounded on every device: on CUDA, torch would multiply by the reciprocal of a Python number."""
    return x / torch.full_like(x, divisor)


def _round_up_to_power_of_two(scale: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, 0.5 <= mantissa < 1
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return power_of_two(exponent.clamp(-126, 127))


def _two_level_scale(amax: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Return NVFP4's E4M3 block scales and float32 tensor scale, whose product is at least SMALLEST_SCALE."""
    total = amax.amax() if amax.numel() else amax.new_zeros(())
    outer = _divide(total, format.max * E4M3.max).clamp(min=smallest_scale() / E4M3.smallest_subnormal)
    outer = torch.where(total > 0, outer, torch.ones_like(outer))
    inner = round_to(_divide(amax, format.max) / outer, E4M3).clamp(min=E4M3.smallest_subnormal)
    return torch.where(amax > 0, inner, torch.ones_like(inner)), outer


def _check_given_scale(scale: Tensor, x: Tensor, spec: Spec) -> Tensor:
    """Check a static or delayed scale and return it as float32. Values are checked on the CPU only."""
    expected = scale_shape(x.shape, spec.block)
    if scale.shape != expected:
        raise ValueError(
            f"{spec} of shape {tuple(x.shape)} needs scales of {tuple(expected)}, got {tuple(scale.shape)}"
        )
    scale = scale.detach().to(x.device, torch.float32)
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(((scale >= SMALLEST_SCALE) & scale.isfinite()).all()):
            raise ValueError(f"the scales given to {spec} must be finite and at least 2^-126, got {scale}")
        if spec.scale in ("pow2", "e8m0") and bool((torch.frexp(scale).mantissa != 0.5).any()):
            raise ValueError(f"the scales given to {spec} must be powers of two, got {scale}")
    return scale


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    scale: Tensor | None = None,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> QTensor:
    """Quantize a floating-point tensor.

    Args:
        x: the tensor.
        spec: how to quantize it.
        scale: required by static and delayed specs, refused by dynamic ones.
        generator: of the random numbers for stochastic rounding.
        noise: uniform in [0, 1), of x's shape, instead of `generator`.

    Returns:
        Elements and scales.

    Example:
        >>> quantize(torch.randn(4, 128), Spec.parse("e4m3:row")).scale.shape
        torch.Size([4, 1])
    """
    if not x.is_floating_point():
        raise ValueError(f"quantize takes a floating tensor, got {x.dtype}")
    x = _to_float32(x.detach())
    tensor_scale = None
    if spec.mode == "dynamic":
        if scale is not None:
            raise ValueError(
                f"{spec} computes its scale from x; hint: a given scale needs {spec.format}:{spec.block}:static"
            )
        amax = block_amax(x, spec.block)
        if spec.scale == "e4m3":
            scale, tensor_scale = _two_level_scale(amax, spec.format)
        else:
            scale = scale_from_amax(amax, spec)
    elif scale is None:
        raise ValueError(f"{spec} needs a scale: its scales do not come from x")
    else:
        scale = _check_given_scale(scale, x, spec)
    multiplier = scale if tensor_scale is None else scale * tensor_scale
    inverse = expand_scale(1.0 / multiplier.clamp(min=smallest_scale()), x.shape, spec.block)
    scaled = x * inverse
    if spec.mode != "dynamic":  # with a small given scale a finite x may overflow float32: saturate instead of Inf
        scaled = torch.where(x.abs() < torch.inf, scaled.clamp(-spec.format.max, spec.format.max), x)
    data = encode(scaled, spec.format, rounding=spec.rounding, generator=generator, noise=noise)
    if not spec.format.has_nan:
        poisoned = _reduce_blocks((~x.isfinite()).float(), spec.block) > 0
        scale = torch.where(poisoned, torch.full_like(scale, torch.nan), scale)
    return QTensor(data, scale, spec, tensor_scale)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `data * scale`, computed in float32; a finite product beyond the range of `dtype` saturates.

    Args:
        q: the quantized tensor.
        dtype: of the result.

    Returns:
        The values that q represents.

    Example:
        >>> dequantize(quantize(x, Spec.parse("e4m3:row")), torch.bfloat16)
    """
    elements = decode(q.data, q.spec.format)
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    values = (elements * expand_scale(q.multiplier(), q.shape, q.spec.block)).clamp(-limit, limit)  # clamp keeps NaN
    if q.spec.format.has_inf:
        values = torch.where(elements.isinf(), elements, values)
    return values.to(dtype)


def fake_quantize(
    x: Tensor, spec: Spec, *, scale: Tensor | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """Quantize and dequantize a tensor, keeping its dtype.

    Args:
        x: the tensor.
        spec: how to quantize it.
        scale: as for `quantize`.
        generator: as for `quantize`.

    Returns:
        x with its quantization error.

    Example:
        >>> (fake_quantize(x, Spec.parse("e4m3:tensor")) - x).abs().max()
    """
    return dequantize(quantize(x, spec, scale=scale, generator=generator), x.dtype)
