"""Ledger: divides a memory budget for learned distributions among the sites.

Each site needs two covariances (x and dy), the matrix normal of the weight, and the kept rows. A full covariance of K
channels takes 4 K^2 bytes, so widths above a cap are sketched instead (`loka.probe.scatter`). The cap starts at 4096,
where the widest site takes under 256 MB, and is halved until all sites known at the start fit into the budget. A site
whose shape is known only later, or that does not fit even sketched, gets what is left: fewer rows, then only rows and
statistics. The report says so.
"""

from dataclasses import dataclass

from loka.probe.gaussian import WIDTH_CAP, Gaussian
from loka.probe.matrix_normal import SIDE_CAP, MatrixNormal
from loka.probe.reservoir import Reservoir
from loka.probe.window import Windows

SITE_BYTES = 256 * 2**20
MEAN_BYTES = 64 * 2**20  # a weight larger than this keeps its row and column means instead of an elementwise mean
LEAST_CAP = 128
FEW_ROWS, LEAST_ROWS = 64, 8
DEFAULT_BUDGET = 2 * 2**30


@dataclass(frozen=True)
class Share:
    """What one site may store. A `cap` of 0 means no covariances and no matrix normal."""

    cap: int
    side_cap: int
    whole_mean: bool
    rows: int
    bytes: int


class Ledger:
    """Hands out shares of a budget in bytes."""

    def __init__(self, budget: int, rows: int) -> None:
        if budget < 2**20:
            raise ValueError(f"memory_budget={budget}: expected bytes, at least 1 MiB")
        self.budget, self.spent, self.cap = budget, 0, WIDTH_CAP
        self._rows = rows
        self.short: list[str] = []  # sites that keep only rows, or fewer rows than requested

    def prepare(self, shapes: list[tuple[int, int, bool]]) -> None:
        """Lower the cap until sites of these shapes (width of x, width of dy, has a weight) fit together."""
        while (
            self.cap > LEAST_CAP and sum(self._size_share(*s, self.cap, self._rows).bytes for s in shapes) > self.budget
        ):
            self.cap //= 2

    def reserve(self, site: str, x: int, dy: int, weight: bool) -> Share:
        """Reserve memory for one site: the largest share that fits. The smallest, eight rows, is always granted."""
        few = min(self._rows, FEW_ROWS)
        wishes = [
            (self.cap, self._rows),
            (LEAST_CAP, self._rows),
            (LEAST_CAP, few),
            (0, few),
            (0, min(few, LEAST_ROWS)),
        ]
        shares = [self._size_share(x, dy, weight, cap, rows) for cap, rows in wishes]
        left = min(SITE_BYTES, self.budget - self.spent)
        share = next((share for share in shares if share.bytes <= left), shares[-1])
        if not share.cap or share.rows < self._rows:
            self.short.append(site)
        self.spent += share.bytes
        return share

    def _size_share(self, x: int, dy: int, weight: bool, cap: int, rows: int) -> Share:
        side_cap, whole_mean = min(cap, SIDE_CAP), cap > LEAST_CAP and 4 * x * dy <= MEAN_BYTES
        size = Reservoir.bytes_for(rows, (x, dy)) + Windows.bytes_for(rows, (x, dy))
        if cap:
            size += Gaussian.bytes_for(x, cap) + Gaussian.bytes_for(dy, cap)
        if cap and weight:
            size += MatrixNormal.bytes_for(dy, x, cap=side_cap, whole_mean=whole_mean)
        return Share(cap, side_cap, whole_mean, rows, size)
