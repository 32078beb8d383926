"""Strides and alignment that kernels require: unit stride along a dimension, rows that start at multiples of 16 bytes.

Also integer helpers: Triton's own functions take 2 us for a division outside of a kernel.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._C._dynamo import guards

GRANULE = 16  # bytes: TMA and cuBLASLt require rows that start at multiples of it
Maker = Callable[[], Tensor]


def cdiv(count: int, size: int) -> int:
    """Return count / size, rounded up."""
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two >= count; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0


def unit_rows(x: Tensor) -> Tensor:
    """Return x with unit stride in the last dimension, copied only if needed."""
    return x if x.stride(-1) == 1 else x.contiguous()


def near_rows(x: Tensor) -> Tensor:
    """Return x [B, H, T, d] with unit stride in the last dimension, copied only if needed.

    Each entry of B spans less than 2^31 elements, because kernels compute offsets within it in 32 bits.
    """
    near = (x.shape[1] - 1) * x.stride(1) + (x.shape[2] - 1) * x.stride(2) < 2**31
    return x if x.stride(-1) == 1 and near else x.contiguous()


def one_number(x: Tensor) -> Tensor:
    """Return a one-element tensor as a float32 scalar tensor, x itself if it already is one."""
    return x if x.dim() == 0 and x.dtype == torch.float32 else x.float().reshape(())


def empty_rows(rows: int, columns: int, step: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized [rows, columns] tensor whose rows start at multiples of `step` elements.

    No view is made if there is no padding. A symbolic size is not compared: that would add a guard to compiled code.
    """
    wide = -(-columns // step) * step
    made = torch.empty(rows, wide, dtype=dtype, device=device)
    return made if isinstance(columns, int) and wide == columns else made[:, :columns]


def alignment(*numbers: int) -> int:
    """Return the power of two, at most 16, that divides all numbers: the widths and row strides of what a kernel loads.

    Without it the compiler moves one element at a time if the width is not a multiple of 16, at a fifth of the speed.
    """
    return math.gcd(16, *numbers)


def maker(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, stride: tuple[int, ...] | None = None) -> Maker:  # fmt: skip
    """Return a function that makes uninitialized tensors on the current GPU, or the CPU, without a layer of Python.

    It calls what torch's own compiled code allocates with, which takes half as long as `torch.empty`: 2.4 us compared
    with 5.4 on the host of an H200. What is called does not fill memory as torch's deterministic mode asks for, so
    `torch.empty_strided` is called if that mode is on when the maker is made.

    Args:
        size: of the tensors.
        dtype: of the tensors.
        device: where they are; a GPU must be the current one, as it is inside an op (`loka.kernels.op`).
        stride: of the tensors; contiguous if omitted.
    """
    size = tuple(size)  # no torch.Size: what is called below takes nothing but tuples
    if stride is None:
        stride = tuple([math.prod([max(1, n) for n in size[at + 1 :]]) for at in range(len(size))])
    if device.type not in ("cpu", "cuda") or torch.are_deterministic_algorithms_enabled():
        return partial(torch.empty_strided, size, stride, dtype=dtype, device=device)
    empty = getattr(guards, f"_empty_strided_{device.type}")  # getattr: absent from torch's type stubs
    return partial(empty, size, stride, dtype)


def rows_maker(rows: int, columns: int, step: int, dtype: torch.dtype, device: torch.device) -> Maker:
    """Return a `maker` of what `empty_rows` returns."""
    wide = cdiv(columns, step) * step
    whole = maker((rows, wide), dtype, device)
    return whole if wide == columns else lambda: whole()[:, :columns]


def empty_words(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `empty_rows` of a one-byte dtype, in steps of 16, and its memory as int32 [rows, words] for kernels that transpose."""
    wide = cdiv(columns, 16) * 16
    words = torch.empty(rows, wide // 4, dtype=torch.int32, device=device)
    made = words.view(dtype)
    return (made if wide == columns else made[:, :columns]), words


def aligned_rows(x: Tensor) -> Tensor:
    """Return x [M, K] with rows that start at multiples of 16 bytes, copied only if needed. A no-op on the CPU.

    Without this alignment kernel libraries may refuse, compute wrong results or fault, and the gate
    (`loka.measure.gate`) tests them at aligned addresses only. Storage itself is aligned, so offset and stride decide.
    In compiled code the offset cannot be read without a graph break; operands there come from the quantizer, at the
    start of their storage.
    """
    if x.device.type == "cpu" or x.numel() == 0 or x.stride(1) != 1:
        return x
    size = x.element_size()
    starts_aligned = torch.compiler.is_compiling() or x.storage_offset() * size % GRANULE == 0
    if starts_aligned and (x.shape[0] == 1 or x.stride(0) * size % GRANULE == 0):
        return x
    each = max(1, GRANULE // size)
    made = torch.empty(x.shape[0], -(-x.shape[1] // each) * each, dtype=x.dtype, device=x.device)[:, : x.shape[1]]
    return made.copy_(x)


def token_columns(v: Tensor) -> Tensor:
    """Return v [R, S, G, D] with unit stride along S and columns at multiples of 16 elements, copied only if needed."""
    if v.stride(1) == 1 and v.stride(3) % 16 == 0:
        return v
    requests, s, groups, d = v.shape
    made = torch.zeros(requests, groups, d, (s + 15) // 16 * 16, dtype=v.dtype, device=v.device)
    made[..., :s] = v.permute(0, 2, 3, 1)
    return made[..., :s].permute(0, 3, 1, 2)
