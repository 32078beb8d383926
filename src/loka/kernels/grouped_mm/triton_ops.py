"""The Triton kernels of a mixture of experts as torch ops, so that torch.compile does not trace their launch code."""

import torch
from torch import Tensor

from loka.kernels.grouped_mm import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op


@torch_op("grouped_mm")
def grouped_mm(
    a: Tensor, b: Tensor, sa: Tensor | None, sb: Tensor | None, offsets: Tensor, scales: int, exact: bool, out_dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """See `triton_kernels.gemm`."""
    return kernels.gemm(a, b, sa, sb, offsets, scales=scales, exact=exact, out_dtype=out_dtype)


@fake_of(grouped_mm)
def _(a, b, sa, sb, offsets, scales, exact, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


@torch_op("grouped_swiglu")
def grouped_swiglu(
    a: Tensor, b: Tensor, sa: Tensor | None, sb: Tensor | None, offsets: Tensor, scales: int, exact: bool, fp8: bool, pow2: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `triton_kernels.gemm_swiglu`."""
    options = {"scales": scales, "exact": exact, "fp8": fp8, "pow2": pow2, "out_dtype": out_dtype}
    return kernels.gemm_swiglu(a, b, sa, sb, offsets, **options)


@fake_of(grouped_swiglu)
def _(a, b, sa, sb, offsets, scales, exact, fp8, pow2, out_dtype):  # type: ignore[no-untyped-def]
    return _quantized(a, a.shape[0], b.shape[1] // 2, fp8, False, out_dtype)


def _quantized(like, m, f, fp8, whole, dtype):  # type: ignore[no-untyped-def]
    if not fp8:
        return like.new_empty(m, f, dtype=dtype), like.new_empty(0, 0, dtype=torch.float32)
    out = kernels.aligned(m, f, torch.float8_e4m3fn, like.device)
    return out, like.new_empty(m, 1, dtype=torch.float32) if whole else kernels.block_scales(m, f, 3, like.device)


swiglu = torch_op("swiglu_quantize")(kernels.swiglu)


@fake_of(swiglu)
def _(h, fp8, whole, pow2):  # type: ignore[no-untyped-def]
    return _quantized(h, h.shape[0], h.shape[1] // 2, fp8, whole, h.dtype)


permute = torch_op("permute")(kernels.permute)


@fake_of(permute)
def _(ids, experts):  # type: ignore[no-untyped-def]
    visits = ids.shape[0] * ids.shape[1]
    long = {"dtype": torch.int64}
    return ids.new_empty(visits, **long), ids.new_empty(experts + 1, dtype=torch.int32), ids.new_empty(visits, **long)


gather = torch_op("gather_rows")(kernels.gather)


@fake_of(gather)
def _(x, scale, order, top):  # type: ignore[no-untyped-def]
    rows, k = order.shape[0], x.shape[1]
    out = kernels.aligned(rows, k, x.dtype, x.device) if x.element_size() == 1 else x.new_empty(rows, k)
    groups = 0 if scale is None else scale.shape[1]
    return out, x.new_empty(groups, rows, dtype=torch.float32).T


combine = torch_op("combine")(kernels.combine)


@fake_of(combine)
def _(y, inverse, weights, add):  # type: ignore[no-untyped-def]
    return y.new_empty(weights.shape[0], y.shape[1])
