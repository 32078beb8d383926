"""How a low-precision linear is doing, counted on the device: no value is read by the host while a step runs.

One float32 vector a site. For fprop, and again for backward:

    calls       how many times it was looked at
    bad in      calls whose input (x; dy) had a NaN or an Inf
    bad out     calls whose output (y; dx, dW) had one
    error       sum over the calls of the sampled relative error

The error is that of the GEMM itself: 16 rows and 64 columns of the output, computed again in float32 from the operands in high precision, as
||out - exact|| / ||exact|| over the sample. Which rows and columns moves from call to call. It costs 16 x 64 x K products. wgrad contracts over all rows, so its
output cannot be sampled cheaply: what is measured for it is the quantisation of dy's sampled rows.
"""

import torch
from torch import Tensor

__all__ = ["BACKWARD", "FIELDS", "FORWARD", "new_health", "quantization_error", "record", "sampled_error"]

FIELDS = ("calls", "bad_in", "bad_out", "error")
FORWARD, BACKWARD = 0, len(FIELDS)
ROWS, COLUMNS = 16, 64


def new_health(device: torch.device) -> Tensor:
    """A vector of zeros for one site."""
    return torch.zeros(2 * len(FIELDS), device=device)


def _sample(size: int, wanted: int, turn: Tensor) -> Tensor:
    """Indices spread evenly over an extent, shifted by one each turn."""
    step = max(size // wanted, 1)
    taken = min(size, wanted)
    return (torch.arange(taken, device=turn.device) * step + turn.long()) % size


def _relative(got: Tensor, exact: Tensor) -> Tensor:
    """||got - exact|| / ||exact||; 0 for nothing, and for what is not finite (counted elsewhere)."""
    error = torch.linalg.vector_norm(got.float() - exact) / torch.linalg.vector_norm(exact).clamp(min=1e-30)
    return torch.where(error.isfinite(), error, torch.zeros_like(error))


def sampled_error(a: Tensor, b: Tensor, out: Tensor, turn: Tensor) -> Tensor:
    """Relative error of out [M, N] = a [M, K] @ b [K, N] on a sample of rows and columns."""
    if out.numel() == 0 or a.shape[1] == 0:
        return torch.zeros((), device=out.device)
    rows, columns = _sample(out.shape[0], ROWS, turn), _sample(out.shape[1], COLUMNS, turn)
    exact = a.index_select(0, rows).float() @ b.index_select(1, columns).float()
    return _relative(out.index_select(0, rows).index_select(1, columns), exact)


def quantization_error(x: Tensor, dequantized: Tensor, turn: Tensor) -> Tensor:
    """Relative error of a quantised operand on a sample of its rows."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    rows = _sample(x.shape[0], ROWS, turn)
    return _relative(dequantized.index_select(0, rows), x.index_select(0, rows).float())


def is_bad(x: Tensor | None, like: Tensor) -> Tensor:
    """1 where a tensor has a NaN or an Inf, else 0; one read."""
    if x is None or x.numel() == 0:
        return torch.zeros_like(like)
    largest = torch.linalg.vector_norm(x, float("inf")).float()
    return torch.where(largest < float("inf"), torch.zeros_like(largest), torch.ones_like(largest))


def record(health: Tensor, place: int, given: Tensor, results: tuple[Tensor | None, ...], error: Tensor) -> None:
    """Add one call to a site's vector."""
    one = torch.ones_like(error)
    bad_out = torch.zeros_like(error)
    for result in results:
        bad_out = torch.maximum(bad_out, is_bad(result, error))
    added = torch.stack([one, is_bad(given, error), bad_out, error])
    health[place : place + len(FIELDS)].add_(added)
