"""The Triton GEMM as one torch op, opaque to torch.compile."""

import torch
from torch import Tensor

from loka.kernels.op import fake_of, torch_op
from loka.kernels.scaled_mm import triton_kernels as kernels


@torch_op("scaled_mm")
def scaled_mm(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, a_source: int, b_source: int, exact: bool, out_dtype: torch.dtype
) -> Tensor:
    """See `triton_kernels.gemm`."""
    return kernels.gemm(a, b, sa, sb, a_source=a_source, b_source=b_source, exact=exact, out_dtype=out_dtype)


@fake_of(scaled_mm)
def _(a, b, sa, sb, a_source, b_source, exact, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
