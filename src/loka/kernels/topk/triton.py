"""Triton top-k: exact, one read of the scores, ties to the lowest index. See `triton_kernels`."""

import torch
from torch import Tensor

from loka.kernels.backend import Verdict, no
from loka.kernels.op import invoke
from loka.kernels.strides import unit_rows
from loka.kernels.topk.call import BeamTopkCall, TopkCall
from loka.kernels.triton_device import triton_runs_on

LARGEST_K = 8192  # k chunks of two must fit into the registers of one program
_LARGEST_N = 2**31 - 1


def supports(call: TopkCall | BeamTopkCall, device: torch.device) -> Verdict:
    """Accept k up to 8192 and rows that a 32-bit index can address."""
    if call.k > LARGEST_K:
        return no(f"selects at most {LARGEST_K}, not {call.k}")
    n = call.n if isinstance(call, TopkCall) else call.beams * call.codes
    if n > _LARGEST_N:
        return no(f"uses 32-bit indices within a request, {n} scores are too many")
    return triton_runs_on(device)


def run(scores: Tensor, k: int, *, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """See `loka.kernels.topk.topk`."""
    from loka.kernels.topk import triton_ops

    scores = unit_rows(scores)
    values, indices = invoke(triton_ops.topk, scores, k, sorted)
    return values, indices


def beams(
    logits: Tensor, beam_scores: Tensor, k: int, *, mask: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `loka.kernels.topk.beam_topk`."""
    from loka.kernels.topk import triton_ops

    known = None if lse is None else lse.contiguous()
    result: tuple[Tensor, Tensor, Tensor] = invoke(
        triton_ops.beam_topk, _dense(logits), beam_scores.contiguous(), k, None if mask is None else _dense(mask), known
    )
    return result


def _dense(x: Tensor) -> Tensor:
    """Return x with unit stride along codes and the same stride between any two consecutive beams, across requests."""
    aligned = x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if aligned else x.contiguous()
