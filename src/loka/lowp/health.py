"""Counters of non-finite values and errors of a low-precision linear, on the device; the host reads none during a step.

One float32 vector per site, with these fields for fprop and again for backward:

    calls       number of observed calls
    bad in      calls whose input (x; dy) had a NaN or Inf
    bad weight  calls whose weight had one
    bad out     calls whose output (y; dx, dW) had one
    error       sum of the sampled errors of the calls
    turn        number of observed calls in total: it shifts the sample and, unlike the others, is not reset by a check

The error is that of the GEMM itself: 16 rows and 64 columns of the output are computed again in float32 from the
high-precision operands. The sampled rows and columns shift by one from call to call. The error is the largest of three,
because each hides what another shows:

    ||out - exact|| / ||exact|| over the sample       errors of large values; one huge row hides all others
    the mean over its rows of the same, at most 1     rows that vanish next to a huge one
    the mean over its columns                         channels that vanish next to a large one

A row or column whose sum happens to cancel is not an error of the GEMM: the latter two divide by at least the root of
the summed squares of the products, which is what the output would be if signs were random. It costs 2 x 16 x 64 x K
products. wgrad contracts over all rows, so its output cannot be sampled cheaply; the quantization error of sampled rows
of dy is measured instead.
"""

import torch
from torch import Tensor

FIELDS = ("calls", "bad_in", "bad_weight", "bad_out", "error", "turn")
FORWARD, BACKWARD = 0, len(FIELDS)
ROWS, COLUMNS = 16, 64


def new_health(device: torch.device) -> Tensor:
    """Return a vector of zeros for one site."""
    return torch.zeros(2 * len(FIELDS), device=device)


def clear(health: Tensor) -> None:
    """Reset the counters, but not the position of the sample."""
    health.view(2, len(FIELDS))[:, : FIELDS.index("turn")].zero_()


def turn_of(health: Tensor, place: int) -> Tensor:
    """Return the position of the sample: how many were drawn before."""
    return health[place + FIELDS.index("turn")]


def _sample(size: int, wanted: int, turn: Tensor) -> Tensor:
    """Return indices spread evenly over `size`, shifted by one each turn."""
    step = max(size // wanted, 1)
    taken = min(size, wanted)
    return (torch.arange(taken, device=turn.device) * step + turn.long()) % size


def _ratio(wrong: Tensor, dim: tuple[int, ...], *sizes: Tensor) -> Tensor:
    """Return ||wrong|| / max ||size|| along `dim`; 0 if it is not finite, which is counted elsewhere."""
    norms = torch.stack([torch.linalg.vector_norm(size, dim=dim) for size in sizes])
    error = torch.linalg.vector_norm(wrong, dim=dim) / norms.amax(0).clamp(min=1e-30)
    return torch.where(error.isfinite(), error, torch.zeros_like(error))


def _error(got: Tensor, exact: Tensor, random: Tensor) -> Tensor:
    """Return the largest of the overall error, the mean error of the rows, and that of the columns."""
    wrong = got.float() - exact
    rows, columns = (_ratio(wrong, dim, exact, random).clamp(max=1).mean() for dim in ((1,), (0,)))
    return torch.maximum(_ratio(wrong, (0, 1), exact), torch.maximum(rows, columns))


def sampled_error(a: Tensor, b: Tensor, out: Tensor, turn: Tensor) -> Tensor:
    """Return the error of out [M, N] = a [M, K] @ b [K, N] on a sample of rows and columns."""
    if out.numel() == 0 or a.shape[1] == 0:
        return torch.zeros((), device=out.device)
    rows, columns = _sample(out.shape[0], ROWS, turn), _sample(out.shape[1], COLUMNS, turn)
    a, b = a.index_select(0, rows).float(), b.index_select(1, columns).float()
    exact = a @ b
    random = (a.square() @ b.square()).sqrt().nan_to_num(posinf=0.0)  # squares may overflow when products do not
    return _error(out.index_select(0, rows).index_select(1, columns), exact, random)


def quantization_error(x: Tensor, dequantized: Tensor, turn: Tensor) -> Tensor:
    """Return the error of a quantized operand on a sample of its rows."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    rows = _sample(x.shape[0], ROWS, turn)
    exact = x.index_select(0, rows).float()
    return _error(dequantized.index_select(0, rows), exact, exact)


def sampled_rows(size: int, turn: Tensor) -> Tensor:
    """Return the indices of the rows sampled in this turn."""
    return _sample(size, ROWS, turn)


def row_error(got: Tensor, exact: Tensor) -> Tensor:
    """Return the error of rows [R, N] compared with the same rows in float32."""
    return _error(got, exact, exact)


def is_bad(x: Tensor | None, like: Tensor) -> Tensor:
    """Return 1 if a tensor has a NaN or Inf, else 0, in one read."""
    if x is None or x.numel() == 0:
        return torch.zeros_like(like)
    # both are NaN if any value is; on a CPU 27 times as fast as the infinity norm
    least, largest = torch.aminmax(x)
    fine = (least.float() > -float("inf")) & (largest.float() < float("inf"))
    return torch.where(fine, torch.zeros_like(like), torch.ones_like(like))


def record(
    health: Tensor, place: int, given: Tensor, weight: Tensor | None, results: tuple[Tensor | None, ...], error: Tensor
) -> None:
    """Add one call to a site's vector; `weight` is None if the results do not depend on it."""
    one = torch.ones_like(error)
    bad_out = torch.zeros_like(error)
    for result in results:
        bad_out = torch.maximum(bad_out, is_bad(result, error))
    added = torch.stack([one, is_bad(given, error), is_bad(weight, error), bad_out, error, one])
    health[place : place + len(FIELDS)].add_(added)
