"""Check the index tensors of `dots`. Reading their values synchronizes with the device, so results are cached.

A result is cached per index tensor as long as it exists and is not modified. During CUDA graph capture values cannot be
read; the check then becomes part of the graph and fails when that runs.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_FAULTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
HINT = "hint: torch.bmm(x, x.mT)[:, first, second] takes any indices"


def check_pairs(first: Tensor, second: Tensor, n: int) -> None:
    """Raise ValueError unless both are int64 [P] with values from 0 to n - 1, and no pair occurs twice."""
    fault = find_fault(first, second, n)
    if fault is not None:
        raise ValueError(f"dots: {fault}; {HINT}")


def find_fault(first: Tensor, second: Tensor, n: int) -> str | None:
    """Return what is wrong with the pairs, or None. See `check_pairs`."""
    for name, index in (("first", first), ("second", second)):
        if index.dim() != 1 or index.dtype != torch.int64:
            return f"{name} is {tuple(index.shape)} of {index.dtype}, expected [P] of torch.int64"
    if first.shape != second.shape or first.device != second.device:
        return f"first is {first.shape[0]} long on {first.device} and second {second.shape[0]} on {second.device}, expected two alike"
    if first.shape[0] > n * n:
        return f"{first.shape[0]} pairs of {n} vectors, which have {n * n}: expected every pair at most once"
    known = None if first.is_inference() else _FAULTS.get(first)  # type: ignore[no-untyped-call]
    if known is not None and known[0] is second and known[1] == _state(first, second, n):
        return known[2]  # type: ignore[no-any-return]
    fault = _find_value_fault(first, second, n)
    if not first.is_inference() and not second.is_inference():
        _FAULTS[first] = (second, _state(first, second, n), fault)
    return fault


def _state(first: Tensor, second: Tensor, n: int) -> tuple[int, int, int]:
    return first._version, (0 if second.is_inference() else second._version), n


def _find_value_fault(first: Tensor, second: Tensor, n: int) -> str | None:
    count = first.shape[0]
    if count == 0 or first.device.type == "meta":
        return None
    inside = ((first >= 0) & (first < n) & (second >= 0) & (second < n)).all()
    cells = (first * n + second).clamp(0, max(n * n - 1, 0))
    often = torch.zeros(max(n * n, 1), dtype=torch.int64, device=first.device).index_add(
        0, cells, torch.ones_like(cells)
    )
    if first.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        torch._assert_async(inside & (often.amax() <= 1), "dots: indices out of range, or a pair that occurs twice")
        return None
    within, most, where = torch.stack([inside.long(), often.amax(), often.argmax()]).tolist()
    if not within:
        return f"indices out of range, expected 0 to {n - 1} for {n} vectors"
    if most > 1:
        return f"the pair ({where // n}, {where % n}) occurs {most} times, expected every pair at most once"
    return None
