"""The errors of a product, row by row, and what its operands lost when they were quantised."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, QTensor, decode, expand_scale
from loka.formats.error import MERE_GUARD

FEW_OUTPUTS = 8  # a row of fewer has no size of its own


@dataclass(frozen=True)
class RowErrors:
    """What went wrong in every row of a result; float64 [rows]."""

    mere: Tensor  # guarded by the row's own size
    error: Tensor  # squared norm of the error
    size: Tensor  # squared norm of the reference
    saturated: Tensor  # shares of the row of a
    underflowed: Tensor

    def __getitem__(self, index: Tensor | slice) -> "RowErrors":
        return RowErrors(
            self.mere[index], self.error[index], self.size[index], self.saturated[index], self.underflowed[index]
        )


def compare_rows(out: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(guarded MERE, squared error, squared size) of every row.

    The guard, 0.01 rms, is the row's own: a row is an example, and its size must not depend on its neighbours'. With one guard for the
    whole output a tensorwise scale that flushes every small row to zero scores 0.004 (rows lognormal with sigma 5), since the large
    rows alone set the guard; row by row it scores 0.99. A row whose reference is all zero is measured against the whole, and so is a row of
    fewer than 8 outputs: a prediction layer's one output would be its own guard, and the mean of an unguarded ratio is infinite.
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
    """Shares of each row's elements that were clipped, and of its non-zero ones that became zero; float64 [rows].

    The same definitions as loka.formats.saturated_fraction and underflowed_fraction, a row at a time.
    """
    scale = q.scale if q.tensor_scale is None else q.scale * q.tensor_scale
    limit = q.spec.format.max * expand_scale(scale, q.shape, q.spec.block) * (1 + 2.0**-20)
    size = x.abs()
    known = size < torch.inf  # NaN is not
    clipped = (size > limit) & known
    nonzero = (size > 0) & known
    vanished = is_zero(q) & nonzero
    return (
        clipped.sum(1, dtype=torch.float64) / known.sum(1).clamp(min=1),
        vanished.sum(1, dtype=torch.float64) / nonzero.sum(1).clamp(min=1),
    )


def is_zero(q: QTensor) -> Tensor:
    """Where a quantised tensor holds zero: from the bits of an 8-bit float, which is much cheaper than decoding it."""
    if q.spec.format in (E4M3, E5M2):
        return (q.data.view(torch.uint8) & 0x7F) == 0
    return decode(q.data, q.spec.format) == 0
