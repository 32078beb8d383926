"""Triton router: product, sigmoid, choice and weights in one kernel, the sort in a second. See `triton_kernels`."""

import torch
from torch import Tensor

from loka.kernels.backend import Verdict, no
from loka.kernels.op import invoke
from loka.kernels.route.call import RouterCall
from loka.kernels.strides import unit_rows
from loka.kernels.triton_device import triton_multiplies_on

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS = 256
MOST_VISITS = 16  # they are chosen one after the other


def supports(call: RouterCall, device: torch.device) -> Verdict:
    """Accept bf16, fp16 and fp32 with up to 256 experts, on a CUDA device or in Triton's interpreter."""
    if call.dtype not in _DTYPES:
        return no(f"reads bf16, fp16 and fp32, not {call.dtype}")
    if call.experts + int(call.always) > MOST_EXPERTS:
        return no(f"compares up to {MOST_EXPERTS} experts, not {call.experts + int(call.always)}")
    if call.top > MOST_VISITS:
        return no(f"chooses up to {MOST_VISITS} experts, one after the other, not {call.top}")
    return triton_multiplies_on(device, bf16=call.dtype == torch.bfloat16)


def run(x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool = False) -> tuple[Tensor, Tensor]:
    """See `loka.kernels.route.route`."""
    from loka.kernels.route import triton_ops

    result: tuple[Tensor, Tensor] = invoke(
        triton_ops.route, unit_rows(x), unit_rows(weight), balance.contiguous(), top, always
    )
    return result


def run_sorted(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return order, offsets and inverse of a `Permutation`, and the weights."""
    from loka.kernels.route import triton_ops

    result: tuple[Tensor, Tensor, Tensor, Tensor] = invoke(
        triton_ops.route_sorted, unit_rows(x), unit_rows(weight), balance.contiguous(), top, always
    )
    return result
