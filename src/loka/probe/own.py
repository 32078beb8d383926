"""What a link of an FP8 chain loses as it runs: the rows of a look before they were rounded, beside the same rows as the chain multiplied them.

Not a recipe that is tried out but what happened, with the scale that was in force (bounded, delayed, calibrated), saturation, and a gradient that was made from FP8 activations:

    fprop   x_low W_low^T  beside  x W^T            dgrad   dy_low W_low  beside  dy W            wgrad   dy_low^T x_low  beside  dy^T x

Per look and GEMM the four sums of the score (`loka.probe.score`) and four errors: guarded MERE, relative L2, and the shares that saturate and that underflow in the worse operand. As a
candidate of the report this has the recipe "chain".
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from loka.formats import QTensor, Spec
from loka.lowp.chain_trace import take_quantized
from loka.probe.interval import summarise_draws
from loka.probe.look import Look, Own
from loka.probe.row_errors import compare_rows, lost_by_row
from loka.probe.score import Shown, harm_from, score_operands
from loka.probe.shown import RoundedOperands
from loka.records import GEMMS, DistributionError, Gemm, Interval

_WIDTH = 8  # four sums, four errors
_UNKNOWN = (torch.tensor(torch.nan), torch.tensor(torch.nan))


class _OwnOperands(RoundedOperands):
    """Operands whose low-precision side is what the chain had, whatever Spec is asked for."""

    def __init__(self, shown: Shown, own: Own) -> None:
        super().__init__(shown)
        self._own = own

    def low(self, role: str, spec: Spec, *, transposed: bool = False) -> Tensor:
        """x, dy or w as the chain multiplied it."""
        if role == "w":
            return self._own.w_t.dequantize().T if transposed else self._own.w.dequantize()
        low = self._own.x if role == "x" else self._own.dy
        assert low is not None
        return low.dequantize()


class OwnTally:
    """Sums and errors by look."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._rows: list[Tensor] = []  # [3, 8] a look; NaN where a GEMM did not happen or was not scored
        self._nats: list[Tensor] = []

    @property
    def looks(self) -> int:
        """Looks measured."""
        return len(self._steps)

    def see(self, look: Look, weight: Tensor, loss: tuple[Tensor, Tensor] | None, step: int) -> None:
        """Measure one look; without a known loss only errors."""
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
            table[number, 4:] = _errors(gemm, shown, own)
        self._steps.append(step)
        self._rows.append(table)
        self._nats.append(known[1].double())

    def _table(self) -> tuple[Tensor, Tensor]:
        """float64 [looks, 3, 8] and [looks], in the order of steps; the later half of them counts."""
        order = sorted(range(self.looks), key=self._steps.__getitem__)[self.looks // 2 :]
        return torch.stack([self._rows[i].cpu() for i in order]), torch.stack([self._nats[i].cpu() for i in order])

    def harm(self, gemm: Gemm) -> tuple[Interval, float] | None:
        """(harm, mean) of the latest looks; None where nothing was scored."""
        if not self.looks:
            return None
        table, nats = self._table()
        sums = table[:, GEMMS.index(gemm), :4]
        known = (sums[:, 0] > 0) & ~sums.isnan().any(1)
        size = float(nats[known].nanmean()) if bool(known.any()) else 1.0
        return harm_from(gemm, sums[known], nats=size if size == size else 1.0)

    def errors(self, gemm: Gemm, rows: int) -> DistributionError | str | None:
        """The errors of the latest looks with their interval over looks; a text where one is not finite; None where the GEMM was not seen."""
        if not self.looks:
            return None
        values = self._table()[0][:, GEMMS.index(gemm), 4:]
        values = values[~values[:, 2].isnan()]  # the share that saturates is a number even where errors are not
        if not len(values):
            return None
        found = [(v[0], v[1], v[2], v[3]) for v in values.tolist()]
        return summarise_draws(found, range(len(found)), "rows", rows, torch.Generator().manual_seed(0))

    def merge(self, other: "OwnTally") -> None:
        """Add another rank's looks."""
        self._steps += other._steps
        self._rows += other._rows
        self._nats += other._nats

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors; nothing where nothing was seen."""
        if not self.looks:
            return {}
        stacked = {
            "rows": torch.stack([row.cpu() for row in self._rows]),
            "nats": torch.stack([n.cpu() for n in self._nats]),
        }
        return {"steps": torch.tensor(self._steps), **stacked}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""
        self._steps = state["steps"].tolist()
        self._rows, self._nats = list(state["rows"].clone().unbind()), list(state["nats"].clone().unbind())


def _errors(gemm: Gemm, shown: Shown, own: Own) -> Tensor:
    """MERE, relative L2, and the shares of the worse operand that saturate and underflow."""
    x, w = shown.x.float(), shown.weight.float()
    x_low = own.x.dequantize()
    lost: list[tuple[Tensor, Tensor]] = []
    if gemm == "fprop":
        out, exact = x_low @ own.w.dequantize().T, x @ w.T
        lost.append(_lost(x, own.x))
    else:
        assert shown.dy is not None
        assert own.dy is not None
        dy, dy_low = shown.dy.float(), own.dy.dequantize()
        if gemm == "dgrad":
            out, exact = dy_low @ own.w_t.dequantize().T, dy @ w
        else:
            out, exact = dy_low.T @ x_low, dy.T @ x
            lost.append(_lost(x, own.x))
        lost.append(_lost(dy, own.dy))
    mere, error, size = compare_rows(out, exact)
    l2 = (error.sum() / size.sum().clamp(min=1e-300)).sqrt()
    shares = [torch.stack(part).amax() for part in zip(*lost, strict=True)]
    return torch.stack([mere.mean(), l2, *shares])


def _lost(plain: Tensor, low: QTensor) -> tuple[Tensor, Tensor]:
    clipped, vanished = lost_by_row(plain, low)
    return clipped.mean(), vanished.mean()
