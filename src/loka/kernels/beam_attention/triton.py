"""Triton beam attention: tiles of beams and query heads over the shared context. See `triton_kernels`."""

from typing import cast

import torch
from torch import Tensor

from loka.formats import E4M3, ROW, QTensor, Spec
from loka.kernels.backend import Verdict, no
from loka.kernels.beam_attention.call import AncestorAttentionCall, BeamAttentionCall
from loka.kernels.op import invoke
from loka.kernels.quantize import quantize
from loka.kernels.strides import token_columns, unit_rows
from loka.kernels.triton_device import triton_multiplies_on, triton_runs_on

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256
WIDEST_ROW = 4096  # all heads of a beam, if the result is quantized


def supports(call: BeamAttentionCall | AncestorAttentionCall, device: torch.device) -> Verdict:
    """Accept bf16, fp16 and fp32, heads up to 256 wide, on a CUDA device (with FP8 if used) or Triton's interpreter."""
    if call.dtype not in _DTYPES:
        return no(f"reads bf16, fp16 and fp32, not {call.dtype}")
    if call.d > WIDEST:
        return no(f"heads are at most {WIDEST} wide, got {call.d}")
    if isinstance(call, BeamAttentionCall) and call.cache is not None and not (fp8 := triton_runs_on(device)):
        return fp8
    if isinstance(call, AncestorAttentionCall) and call.spec is not None and can_write(call.spec, call.heads, call.d):
        return triton_runs_on(device)
    return triton_multiplies_on(device, bf16=call.dtype == torch.bfloat16 and isinstance(call, BeamAttentionCall))


def can_write(spec: Spec, heads: int, d: int) -> bool:
    """Return True if the kernel can quantize its result: E4M3 with one dynamic scale for all heads of a beam.

    A program holds all heads of a beam in registers, which limits the row.
    """
    plain = spec.mode == "dynamic" and spec.rounding == "nearest" and spec.scale != "e4m3"
    return plain and spec.format == E4M3 and spec.block == ROW and heads * d <= WIDEST_ROW


def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
    """See `loka.kernels.beam_attention.beam_attention`. Runs in FP8 for an E4M3 context if the head width allows it."""
    from loka.kernels.beam_attention import triton_ops

    if k.dtype == torch.float8_e4m3fn and triton_ops.fits(q.shape[3]):
        low: Tensor = invoke(triton_ops.beam_attention_low, unit_rows(q), unit_rows(k), token_columns(v), lengths.contiguous(), scale)  # fmt: skip
        return low
    values = None if v is k else unit_rows(v)
    out: Tensor = invoke(triton_ops.beam_attention, unit_rows(q), unit_rows(k), values, lengths.contiguous(), scale)
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
    """See `loka.kernels.beam_attention.ancestor_attention`.

    One kernel attends, writes the cache and quantizes per row; other Specs are quantized by a separate op.
    """
    from loka.kernels.beam_attention import triton_ops

    if keys.stride() != values.stride() or keys.stride(-1) != 1:  # the kernel uses the same strides for both
        if keep:
            keys[ancestors.shape[0], :, : q.shape[1]].copy_(k)
            values[ancestors.shape[0], :, : q.shape[1]].copy_(v)
        keys, values, keep = keys.contiguous(), values.contiguous(), False
    if not q.stride() == k.stride() == v.stride() or q.stride(-1) != 1:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    low = spec is not None and can_write(spec, q.shape[2], q.shape[3])
    pow2 = spec is not None and spec.scale != "f32"
    out, made = invoke(triton_ops.ancestor_attention, q, k, v, keys, values, ancestors.contiguous(), scale, keep, low, pow2)  # fmt: skip
    if spec is None:
        return cast(Tensor, out)
    return QTensor(out, made, spec) if low else quantize(out.view(-1, q.shape[2] * q.shape[3]), spec)
