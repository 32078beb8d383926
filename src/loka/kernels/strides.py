"""What kernels ask of their operands: rows, or columns, that lie in memory without gaps between their numbers, and begin where 16 bytes can be read at once. And the numbers of blocks that cover
them: Triton's own functions, outside of a kernel, take 2 us for a division."""

import torch
from torch import Tensor

GRANULE = 16  # bytes in one transaction of TMA and cuBLASLt: rows of operands begin at multiples of it


def cdiv(count: int, size: int) -> int:
    """How many blocks of a size cover so many elements."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """The smallest power of two that is not less; 0 for none."""
    return 1 << (count - 1).bit_length() if count else 0


def unit_rows(x: Tensor) -> Tensor:
    """x with a last stride of one; copied only where it has another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def near_rows(x: Tensor) -> Tensor:
    """x [B, H, T, d] with a last stride of one, of which every entry of B spans less than 2^31 numbers: kernels count those in 32 bits. Copied only where it is not so."""
    near = (x.shape[1] - 1) * x.stride(1) + (x.shape[2] - 1) * x.stride(2) < 2**31
    return x if x.stride(-1) == 1 and near else x.contiguous()


def one_number(x: Tensor) -> Tensor:
    """x of one element as a float32 without dimensions: itself where it is one."""
    return x if x.dim() == 0 and x.dtype == torch.float32 else x.float().reshape(())


def empty_rows(rows: int, columns: int, step: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty [rows, columns] whose rows start at multiples of `step` elements.

    A view is left out where it would be the whole. A number that a compiler has not fixed is not asked whether it would: the answer would become a condition of the compiled code.
    """
    wide = -(-columns // step) * step
    made = torch.empty(rows, wide, dtype=dtype, device=device)
    return made if isinstance(columns, int) and wide == columns else made[:, :columns]


def empty_words(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, step: int = 16) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`empty_rows` of a type of one byte, and the same memory in words of four bytes [rows, words], as kernels write it that transpose."""
    wide = -(-columns // step) * step
    words = torch.empty(rows, wide // 4, dtype=torch.int32, device=device)
    made = words.view(dtype)
    return (made if wide == columns else made[:, :columns]), words


def aligned_rows(x: Tensor) -> Tensor:
    """x [M, K] on a GPU with all its rows at multiples of 16 bytes; copied only where they lie elsewhere.

    Kernel libraries may demand it, be wrong or fault without, and the gate (loka.measure.gate) tries them at such addresses alone; so nothing else may reach them. Storage begins at more than
    that, so offset and stride decide. In compiled code operands are made by the quantiser before, at the start of their storage, and an offset cannot be asked for: it would break the graph.
    """
    if x.device.type == "cpu" or x.numel() == 0 or x.stride(1) != 1:
        return x
    size = x.element_size()
    begins = torch.compiler.is_compiling() or x.storage_offset() * size % GRANULE == 0
    if begins and (x.shape[0] == 1 or x.stride(0) * size % GRANULE == 0):
        return x
    each = max(1, GRANULE // size)
    made = torch.empty(x.shape[0], -(-x.shape[1] // each) * each, dtype=x.dtype, device=x.device)[:, : x.shape[1]]
    return made.copy_(x)


def token_columns(v: Tensor) -> Tensor:
    """Values [R, S, G, D] with unit stride along S, each column at a multiple of 16 elements; as they are where they lie so."""
    if v.stride(1) == 1 and v.stride(3) % 16 == 0:
        return v
    requests, s, groups, d = v.shape
    made = torch.zeros(requests, groups, d, (s + 15) // 16 * 16, dtype=v.dtype, device=v.device)
    made[..., :s] = v.permute(0, 2, 3, 1)
    return made[..., :s].permute(0, 3, 1, 2)
