"""Per-row errors of a product, and saturation and underflow of its quantized operands."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, QTensor, decode, expand_scale
from loka.formats.error import MERE_GUARD

FEW_OUTPUTS = 8  # with fewer outputs, a row's own rms is not used as a guard


@dataclass(frozen=True)
class RowErrors:
    """Errors of every row of a result; float64 [rows]."""

    mere: Tensor  # guarded by the row's own rms
    error: Tensor  # squared norm of the error
    size: Tensor  # squared norm of the reference
    saturated: Tensor  # share of the row of operand a that saturates
    underflowed: Tensor  # ... and that underflows to zero


def compare_rows(out: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (guarded MERE, squared error, squared reference) of every row.

    The guard, 0.01 rms, is computed per row: a row is an example, and its error must not depend on its neighbors. With
    one guard for the whole output, a tensorwise scale that flushes every small row to zero scores 0.004 (rows lognormal
    with sigma 5), because the large rows alone set the guard; row by row it scores 0.99. A row whose reference is all
    zero uses the rms of the whole output, and so does a row of fewer than 8 outputs: the single output of a prediction
    layer would be its own guard, and the mean of an unguarded ratio is infinite.
    """
    out, ref = out.double(), ref.double()
    error, magnitude = (out - ref).abs(), ref.abs()
    squares = magnitude.square()
    row = squares.mean(dim=1, keepdim=True).sqrt()
    whole = squares.mean().sqrt()
    if ref.shape[1] < FEW_OUTPUTS:
        row = torch.zeros_like(row)
    size = torch.where(row > 0, row, torch.where(whole > 0, whole, torch.ones_like(whole)))
    relative = error / torch.maximum(magnitude, MERE_GUARD * size)
    return relative.mean(dim=1), error.square().sum(dim=1), squares.sum(dim=1)


def lost_by_row(x: Tensor, q: QTensor) -> tuple[Tensor, Tensor]:
    """Return the share of each row that was clipped, and of its non-zero elements that became zero; float64 [rows].

    Per-row versions of `loka.formats.saturated_fraction` and `underflowed_fraction`.
    """
    limit = q.spec.format.max * expand_scale(q.multiplier(), q.shape, q.spec.block) * (1 + 2.0**-20)
    size = x.abs()
    known = size < torch.inf  # False for NaN
    clipped = (size > limit) & known
    nonzero = (size > 0) & known
    vanished = is_zero(q) & nonzero
    return (
        clipped.sum(1, dtype=torch.float64) / known.sum(1).clamp(min=1),
        vanished.sum(1, dtype=torch.float64) / nonzero.sum(1).clamp(min=1),
    )


def is_zero(q: QTensor) -> Tensor:
    """Return where a quantized tensor is zero. For 8-bit floats this reads the bits, much cheaper than decoding."""
    if q.spec.format in (E4M3, E5M2):
        return (q.data.view(torch.uint8) & 0x7F) == 0
    return decode(q.data, q.spec.format) == 0
