"""topk: the k largest of a row, with ties in a defined order; and the k best continuations of all beams of a request."""

from typing import Any

from torch import Tensor, float32
from torch import bool as boolean

from loka.kernels.registry import pick
from loka.kernels.topk.call import BeamTopkCall, TopkCall

__all__ = ["BeamTopkCall", "TopkCall", "beam_topk", "topk"]


def topk(scores: Tensor, k: int, *, sorted: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """scores [R, n] -> values [R, k] and int64 indices [R, k]; best first, or by index where not `sorted`.

    -inf means "not there": where a row has fewer than k scores above it, the last slots hold the value -inf and the index 0. Equal scores are taken,
    and listed, lowest index first.
    """
    if scores.dim() != 2:
        raise ValueError(f"topk takes scores [rows, n], got {tuple(scores.shape)}; hint: scores.flatten(1)")
    call = TopkCall(scores.shape[0], scores.shape[1], k, scores.dtype, sorted)
    chosen = pick("topk", backend, call, scores.device)
    values, indices = chosen.backend.run(scores, k, sorted=sorted)
    return values, indices


def beam_topk(
    logits: Tensor,
    beam_scores: Tensor,
    k: int,
    *,
    mask: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """The k best of beam_scores[r, b] + log_softmax(logits[r, b])[c] over all beams b and codes c of each request r.

    logits [R, B, V]; beam_scores [R, B]; mask bool [R, B, V], True where a code may follow (the softmax is over all codes, allowed or not); lse float32 [R, B]:
    log-sum-exp of the logits where it is known already. Returns values float32 [R, k], best first, and int64 beams and codes [R, k]. Where fewer than k
    continuations are allowed, the last slots hold -inf and beam and code 0: safe to gather with, told by their value.
    """
    _check(logits, beam_scores, mask, lse)
    requests, beams, codes = logits.shape
    call = BeamTopkCall(requests, beams, codes, k, logits.dtype, mask is not None)
    chosen: Any = pick("topk", backend, call, logits.device).backend
    result: tuple[Tensor, Tensor, Tensor] = chosen.beams(logits, beam_scores, k, mask=mask, lse=lse)
    return result


def _check(logits: Tensor, beam_scores: Tensor, mask: Tensor | None, lse: Tensor | None) -> None:
    if logits.dim() != 3:
        raise ValueError(f"beam_topk takes logits [requests, beams, codes], got {tuple(logits.shape)}")
    for name, t in (("beam_scores", beam_scores), ("lse", lse)):
        if t is not None and (t.shape != logits.shape[:2] or t.dtype != float32):
            raise ValueError(f"{name} must be float32 {tuple(logits.shape[:2])}, got {t.dtype} {tuple(t.shape)}")
    if mask is not None and (mask.shape != logits.shape or mask.dtype != boolean):
        raise ValueError(f"mask must be bool {tuple(logits.shape)}, got {mask.dtype} {tuple(mask.shape)}")
