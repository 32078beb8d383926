"""topk: the k largest of each row with deterministic ties, and the k best continuations of all beams of a request."""

from typing import Any

from torch import Tensor, float32
from torch import bool as boolean

from loka.kernels.registry import pick
from loka.kernels.topk.call import BeamTopkCall, TopkCall

__all__ = ["BeamTopkCall", "TopkCall", "beam_topk", "topk"]


def topk(scores: Tensor, k: int, *, sorted: bool = True, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row. Of equal scores the one with the lowest index comes first.

    A score of -inf means "absent": if a row has fewer than k others, the last slots hold the value -inf and the index
    0.

    Args:
        scores: [R, n] in float32, bf16 or fp16.
        k: between 0 and n.
        sorted: best first; otherwise by ascending index.
        backend: a name of the registry, or "auto".

    Returns:
        Values [R, k] and int64 indices [R, k].

    Example:
        >>> values, items = topk(scores, 100)
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
    """Return the k best of beam_scores[r, b] + log_softmax(logits[r, b])[c] over beams b and codes c of each request r.

    Args:
        logits: [R, B, V] in float32, bf16 or fp16.
        beam_scores: float32 [R, B].
        k: between 0 and B * V.
        mask: bool [R, B, V], True for codes that may follow. The softmax is over all codes, allowed or not.
        lse: float32 [R, B], log-sum-exp of the logits, if already known.
        backend: a name of the registry, or "auto".

    Returns:
        Values float32 [R, k], best first, and int64 beams and codes [R, k]. If fewer than k continuations are allowed,
        the last slots hold the value -inf, beam 0 and code 0, so that they are safe to gather with.

    Example:
        >>> values, beams, codes = beam_topk(logits, beam_scores, 512, mask=allowed)
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
