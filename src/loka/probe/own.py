"""Errors of a link of an FP8 chain as it runs: operands before rounding, compared with those the chain multiplied.

Unlike a candidate recipe, this is measured, with the scales in use (bounded, delayed, calibrated), saturation, and
gradients computed from FP8 activations:

    fprop   x_low W_low^T  vs.  x W^T        dgrad   dy_low W_low  vs.  dy W        wgrad   dy_low^T x_low  vs.  dy^T x

Per look and GEMM it keeps the four sums of the score (`loka.probe.score`) and four errors: guarded MERE, relative L2,
and the saturated and underflowed shares of the worse operand. In a report this is the candidate with the recipe
"chain".
"""

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.lowp.chain_trace import take_quantized
from loka.probe.interval import summarise_draws
from loka.probe.look import Look, Own
from loka.probe.row_errors import compare_rows, lost_by_row
from loka.probe.score import Shown, harm_from, score_operands
from loka.probe.shown import RoundedOperands
from loka.probe.tally import Looks
from loka.records import GEMMS, DistributionError, Gemm, Interval

_WIDTH = 8  # four sums, four errors
_UNKNOWN = (torch.tensor(torch.nan), torch.tensor(torch.nan))


class _OwnOperands(RoundedOperands):
    """Operands whose rounded values are those of the chain; the requested Spec is ignored."""

    def __init__(self, shown: Shown, own: Own) -> None:
        super().__init__(shown)
        self._own = own

    def low(self, role: str, spec: Spec, *, transposed: bool = False) -> Tensor:
        """Return x, dy or w as the chain multiplied it."""
        if role == "w":
            return self._own.w_t.dequantize().T if transposed else self._own.w.dequantize()
        low = self._own.x if role == "x" else self._own.dy
        assert low is not None
        return low.dequantize()


class OwnTally(Looks):
    """Score sums and errors of every look, for each GEMM; NaN if it did not run or was not scored."""

    def __init__(self) -> None:
        super().__init__(len(GEMMS), _WIDTH)

    def see(self, look: Look, weight: Tensor, loss: tuple[Tensor, Tensor] | None, step: int) -> None:
        """Measure one look. If the loss is unknown, only errors are measured."""
        assert look.own is not None
        index = look.rows_to_score()
        dy = None if look.own.dy is None or look.dy is None else take_quantized(look.own.dy, index)
        own = Own(take_quantized(look.own.x, index), look.own.w, look.own.w_t, dy)
        device = look.x.device
        known = loss or (_UNKNOWN[0].to(device), _UNKNOWN[1].to(device))
        shown = look.show(weight, known, {})
        table = torch.full((len(GEMMS), _WIDTH), torch.nan, dtype=torch.float64, device=device)
        sums = score_operands(_OwnOperands(shown, own), shown) if dy is not None and loss is not None else {}
        for number, gemm in enumerate(GEMMS):
            if gemm != "fprop" and dy is None:
                continue
            if gemm in sums:
                table[number, :4] = sums[gemm]
            table[number, 4:] = _measure_errors(gemm, shown, own)
        self.add(step, table, known[1])

    def _later_half(self) -> tuple[Tensor, Tensor]:
        """Return the later half of the looks: float64 [looks, 3, 8], and their mean losses [looks]."""
        tables, nats = self.read()
        return tables[self.looks // 2 :], nats[self.looks // 2 :]

    def harm(self, gemm: Gemm) -> tuple[Interval, float] | None:
        """Return (harm, mean) over the later half of the looks; None if nothing was scored."""
        table, nats = self._later_half()
        sums = table[:, GEMMS.index(gemm), :4]
        known = (sums[:, 0] > 0) & ~sums.isnan().any(1)
        size = float(nats[known].nanmean()) if bool(known.any()) else 1.0
        return harm_from(gemm, sums[known], nats=size if size == size else 1.0)

    def errors(self, gemm: Gemm, rows: int) -> DistributionError | str | None:
        """Return the errors over the later half of the looks with their intervals; None if the GEMM was not observed.

        A string is the reason why there is no result: an error is not finite.
        """
        values = self._later_half()[0][:, GEMMS.index(gemm), 4:]
        values = values[~values[:, 2].isnan()]  # the saturated share is finite even if errors are not
        if not len(values):
            return None
        found = [(v[0], v[1], v[2], v[3]) for v in values.tolist()]
        return summarise_draws(found, range(len(found)), "rows", rows, torch.Generator().manual_seed(0))


def _measure_errors(gemm: Gemm, shown: Shown, own: Own) -> Tensor:
    """Return MERE, relative L2, and the saturated and underflowed shares of the worse operand."""
    x, w = shown.x.float(), shown.weight.float()
    x_low = own.x.dequantize()
    lost: list[tuple[Tensor, Tensor]] = []
    if gemm == "fprop":
        out, exact = x_low @ own.w.dequantize().T, x @ w.T
        lost.append(_measure_lost(x, own.x))
    else:
        assert shown.dy is not None
        assert own.dy is not None
        dy, dy_low = shown.dy.float(), own.dy.dequantize()
        if gemm == "dgrad":
            out, exact = dy_low @ own.w_t.dequantize().T, dy @ w
        else:
            out, exact = dy_low.T @ x_low, dy.T @ x
            lost.append(_measure_lost(x, own.x))
        lost.append(_measure_lost(dy, own.dy))
    mere, error, size = compare_rows(out, exact)
    l2 = (error.sum() / size.sum().clamp(min=1e-300)).sqrt()
    shares = [torch.stack(part).amax() for part in zip(*lost, strict=True)]
    return torch.stack([mere.mean(), l2, *shares])


def _measure_lost(plain: Tensor, low: QTensor) -> tuple[Tensor, Tensor]:
    clipped, vanished = lost_by_row(plain, low)
    return clipped.mean(), vanished.mean()
