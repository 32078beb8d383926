"""Our attention of beams: every beam and query head of a group in one tile over the shared context. See `triton_kernels`."""

from typing import cast

import torch
from torch import Tensor

from loka.formats import E4M3, ROW, QTensor, Spec
from loka.kernels.backend import YES, Verdict, no, require_library
from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall
from loka.kernels.quantize import quantize
from loka.kernels.triton_device import triton_runs_on

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256
WIDEST_ROW = 4096  # of a quantised result: all heads of a beam


def supports(call: BeamAttentionCall | AncestorAttentionCall, device: torch.device) -> Verdict:
    """A CUDA device, one with FP8 where FP8 is written, or Triton's interpreter on the CPU; no float64; heads that fit into shared memory."""
    if call.dtype not in _DTYPES:
        return no(f"reads bf16, fp16 and fp32, not {call.dtype}")
    if call.d > WIDEST:
        return no(f"heads are at most {WIDEST} wide, got {call.d}")
    if isinstance(call, AncestorAttentionCall) and call.spec is not None and can_write(call.spec, call.heads, call.d):
        return triton_runs_on(device)
    reason = _refusal(device.type, call.dtype == torch.bfloat16 and isinstance(call, BeamAttentionCall))
    return no(reason) if reason else YES


def can_write(spec: Spec, heads: int, d: int) -> bool:
    """Whether the attention itself can quantise: E4M3, one dynamic scale for all heads of a beam, which a program keeps in registers."""
    plain = spec.mode == "dynamic" and spec.rounding == "nearest" and spec.scale != "e4m3"
    return plain and spec.format == E4M3 and spec.block == ROW and heads * d <= WIDEST_ROW


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


def ancestors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    *,
    keep: bool,
    spec: Spec | None,
    scale: float,
) -> Tensor | QTensor:
    """The step's attention, its keys and values filed and, per row, its result quantised, in one pass; other Specs by the op that quantises."""
    from loka.kernels.beam_attention import triton_ops

    if keys.stride() != values.stride() or keys.stride(-1) != 1:  # one set of strides reaches both
        if keep:
            keys[ancestors.shape[0], :, : q.shape[1]].copy_(k)
            values[ancestors.shape[0], :, : q.shape[1]].copy_(v)
        keys, values, keep = keys.contiguous(), values.contiguous(), False
    if not q.stride() == k.stride() == v.stride() or q.stride(-1) != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    low = spec is not None and can_write(spec, q.shape[2], q.shape[3])
    out, made = triton_ops.ancestor_attention(
        q, k, v, keys, values, ancestors.contiguous(), scale, keep, low, spec is not None and spec.scale != "f32"
    )
    if spec is None:
        return cast(Tensor, out)
    return QTensor(out, made, spec) if low else quantize(out.view(-1, q.shape[2] * q.shape[3]), spec)


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
