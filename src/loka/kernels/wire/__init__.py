"""wire: blocks of a tensor as bytes with their scales in front, and back, each in one pass over memory.

The bytes are those of `loka.comms.Codec`, whose torch operations are the law; the kernels are for what travels most: whole blocks of E4M3 and E5M2. What they do not write, a codec
writes by the law, to the same bytes.
"""

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, Draw, Spec
from loka.kernels.backend import Verdict, no

__all__ = ["pack", "supports", "unpack"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def supports(spec: Spec, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Blocks of E4M3 or E5M2, 16 to 1,024 long, of 16- and 32-bit floats; stochastic E4M3 too."""
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
    """Bytes [n, scale + block] of blocks [n, block]; `supports` must have said yes."""
    from loka.kernels.wire import triton_kernels

    return triton_kernels.pack(blocks.contiguous(), spec, draw, first_block)


def unpack(data: Tensor, spec: Spec, dtype: torch.dtype) -> Tensor:
    """The blocks [n, block] that `pack` wrote."""
    from loka.kernels.wire import triton_kernels

    aligned = data.contiguous() if data.data_ptr() % 16 == 0 else data.clone()  # scales are read as words
    return triton_kernels.unpack(aligned, spec, dtype)
