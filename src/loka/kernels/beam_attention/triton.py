"""Our attention of beams: every beam and query head of a group in one tile over the shared context. See `triton_kernels`."""

import torch
from torch import Tensor

from loka.kernels.backend import YES, Verdict, no, require_library
from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256


def supports(call: BeamAttentionCall | AncestorAttentionCall, device: torch.device) -> Verdict:
    """A CUDA device, or Triton's interpreter on the CPU; no float64; heads that fit into shared memory."""
    if call.dtype not in _DTYPES:
        return no(f"reads bf16, fp16 and fp32, not {call.dtype}")
    if call.d > WIDEST:
        return no(f"heads are at most {WIDEST} wide, got {call.d}")
    if isinstance(call, AncestorAttentionCall) and call.steps < 1:
        return no("a beam without a past attends to nothing")
    reason = _refusal(device.type, call.dtype == torch.bfloat16 and isinstance(call, BeamAttentionCall))
    return no(reason) if reason else YES


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refusal(kind: str, multiplies_bf16: bool) -> str:
    """Why not, or "": a string, so that torch.compile takes it as a constant and does not trace an import."""
    available = require_library("triton", "dev")
    if not available or kind == "cuda":
        return available.reason
    import triton

    if kind == "cpu" and triton.knobs.runtime.interpret:
        return (
            "Triton's interpreter multiplies bf16 by its bit patterns; test in fp16 or fp32" if multiplies_bf16 else ""
        )
    return f"Triton needs a CUDA device, not {kind} (on the CPU only its interpreter runs: TRITON_INTERPRET=1)"


def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """q [R, B, H, D], k, v [R, S, G, D] -> [R, B, H, D]."""
    from loka.kernels.beam_attention import triton_ops

    values = None if v is k else _unit(v)
    out: Tensor = triton_ops.beam_attention(_unit(q), _unit(k), values, lengths.contiguous(), scale)
    return out


def ancestors(q: Tensor, k: Tensor, v: Tensor, ancestors: Tensor, *, scale: float) -> Tensor:
    """q [R, B, H, D], k, v [P, R, W, H, D], ancestors [P, R, B] -> [R, B, H, D]."""
    from loka.kernels.beam_attention import triton_ops

    k, v = _unit(k), _unit(v)
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    out: Tensor = triton_ops.ancestor_attention(_unit(q), k, v, ancestors.contiguous(), scale)
    return out


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
