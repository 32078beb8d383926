"""Our router: product, sigmoid, choice and weights in one kernel, and the sorted order of the visits in a second. See `triton_kernels`."""

import torch
from torch import Tensor

from loka.kernels.backend import YES, Verdict, no, require_library
from loka.kernels.route.call import RouterCall

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS = 256
MOST_VISITS = 16  # chosen one after the other


def supports(call: RouterCall, device: torch.device) -> Verdict:
    """A CUDA device, or Triton's interpreter on the CPU; no float64; the scores of a token fit into a program."""
    if call.dtype not in _DTYPES:
        return no(f"reads bf16, fp16 and fp32, not {call.dtype}")
    if call.experts + int(call.always) > MOST_EXPERTS:
        return no(f"compares up to {MOST_EXPERTS} experts, not {call.experts + int(call.always)}")
    if call.top > MOST_VISITS:
        return no(f"chooses up to {MOST_VISITS} experts, one after the other, not {call.top}")
    reason = _refusal(device.type, call.dtype == torch.bfloat16)
    return no(reason) if reason else YES


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refusal(kind: str, bf16: bool) -> str:
    """Why not, or "": a string, so that torch.compile takes it as a constant and does not trace an import."""
    available = require_library("triton", "dev")
    if not available or kind == "cuda":
        return available.reason
    import triton

    if kind == "cpu" and triton.knobs.runtime.interpret:
        return "Triton's interpreter multiplies bf16 by its bit patterns; test in fp16 or fp32" if bf16 else ""
    return f"Triton needs a CUDA device, not {kind} (on the CPU only its interpreter runs: TRITON_INTERPRET=1)"


def run(x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool = False) -> tuple[Tensor, Tensor]:
    """Experts int64 and weights float32, [T, top] or one column more."""
    from loka.kernels.route import triton_ops

    result: tuple[Tensor, Tensor] = triton_ops.route(_unit(x), _unit(weight), balance.contiguous(), top, always)
    return result


def run_sorted(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order, offsets, inverse, weights: two kernels."""
    from loka.kernels.route import triton_ops

    result: tuple[Tensor, Tensor, Tensor, Tensor] = triton_ops.route_sorted(
        _unit(x), _unit(weight), balance.contiguous(), top, always
    )
    return result


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
