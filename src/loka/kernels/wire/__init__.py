"""wire: pack blocks of a tensor into bytes with inline scales, and unpack them, each in one pass over memory.

The byte format is defined by the torch operations of `loka.kernels.wire.codec`. The kernels here cover the most common
traffic, whole blocks of E4M3 and E5M2, and write the same bytes; a codec uses torch for everything else.
"""

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, Draw, Spec
from loka.kernels.backend import Verdict, no

__all__ = ["pack", "supports", "unpack"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def supports(spec: Spec, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Check whether the kernels can pack and unpack: E4M3 or E5M2 blocks of 16 to 1,024 elements.

    Args:
        spec: of the blocks. Stochastic rounding is supported for E4M3 only.
        dtype: of the tensor.
        device: of the tensor.

    Returns:
        Yes, or no with the reason.

    Example:
        >>> bool(supports(Spec.parse("e4m3:1x128:pow2"), torch.bfloat16, torch.device("cuda")))
    """
    if spec.format not in (E4M3, E5M2) or (spec.rounding == "stochastic" and spec.format != E4M3):
        return no(f"writes e4m3, e5m2 to nearest, and e4m3 stochastically, not {spec}")
    block = spec.block.cols
    if not 16 <= block <= 1024 or block & (block - 1):
        return no(f"blocks are powers of two from 16 to 1,024, not {block}")
    if dtype not in _FLOATS:
        return no(f"reads and writes fp32, bf16 and fp16, not {dtype}")
    from loka.kernels.triton_device import triton_runs_on

    return triton_runs_on(device)


def pack(blocks: Tensor, spec: Spec, *, draw: Draw | None = None, first_block: int = 0) -> Tensor:
    """Quantize blocks and pack them with their scales. `supports` must accept the call.

    Args:
        blocks: [n, block].
        spec: of the blocks.
        draw: determines the random numbers of stochastic rounding.
        first_block: index of the first block in the whole tensor, if this is a piece of it.

    Returns:
        uint8 [n, bytes of a scale + block].

    Example:
        >>> data = pack(x.view(-1, 128), Spec.parse("e4m3:1x128:pow2"))
    """
    from loka.kernels.wire import triton_kernels

    return triton_kernels.pack(blocks.contiguous(), spec, draw, first_block)


def unpack(data: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
    """Unpack and dequantize what `pack` returned.

    Args:
        data: uint8 [n, bytes of a scale + block].
        spec: of the blocks.
        dtype: of the result.

    Returns:
        [n, block] in `dtype`.

    Example:
        >>> x = unpack(data, Spec.parse("e4m3:1x128:pow2"), torch.bfloat16)
    """
    from loka.kernels.wire import triton_kernels

    aligned = data.contiguous() if data.data_ptr() % 16 == 0 else data.clone()  # scales are read as 4-byte words
    return triton_kernels.unpack(aligned, spec, dtype)
