"""Reservoir: a small uniform sample of the real rows of a site, x and dy of the same rows together.

Algorithm R: row number t (counted from 1) replaces a random one of the `capacity` kept rows with probability capacity /
t, so that at any time every row seen so far is equally likely to be kept. Real rows are the control for everything that
is modeled: they contain heavy tails that a Gaussian misses.

Slots are drawn on the CPU and sent to the device without synchronization. Two reservoirs are merged by drawing each
kept row from one or the other in proportion to the rows they have seen.

The reservoir does not know which rows formed a batch: a weight gradient is evaluated on rows of several sampled steps.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

MAX_BYTES = 16 * 2**20  # per site; wide sites keep fewer rows
MIN_ROWS = 64


class Reservoir:
    """A uniform sample of rows of x [*, K] and, if there are gradients, of dy [*, N]."""

    def __init__(self, rows: int, widths: tuple[int, int], device: torch.device, generator: torch.Generator) -> None:
        self.capacity = self.rows_for(rows, widths)
        self._generator = generator
        self._x = torch.zeros(self.capacity, widths[0], device=device)
        self._dy = torch.zeros(self.capacity, widths[1], device=device)
        self.seen = 0
        self.has_dy = False

    @staticmethod
    def rows_for(rows: int, widths: tuple[int, int]) -> int:
        """Return how many of the wanted rows are kept at these widths."""
        return max(1, min(rows, max(MAX_BYTES // (4 * max(sum(widths), 1)), MIN_ROWS)))

    @staticmethod
    def bytes_for(rows: int, widths: tuple[int, int]) -> int:
        """Return the memory it takes, in bytes."""
        return 4 * Reservoir.rows_for(rows, widths) * sum(widths)

    @property
    def kept(self) -> int:
        """Number of rows kept."""
        return min(self.seen, self.capacity)

    @property
    def x(self) -> Tensor:
        """Kept rows of the input."""
        return self._x[: self.kept]

    @property
    def dy(self) -> Tensor | None:
        """Kept rows of the output's gradient, matching `x`; None if no gradient was seen."""
        return self._dy[: self.kept] if self.has_dy else None

    @torch.no_grad()
    def offer(self, x: Tensor, dy: Tensor | None) -> None:
        """Offer rows to the sample. Rows without a gradient are dropped, and ignored, once rows with one arrive."""
        if dy is None and self.has_dy:
            return
        if dy is not None and not self.has_dy:
            self.seen, self.has_dy = 0, True
        slots, rows = self._place(x.shape[0])
        if not slots.numel():
            return
        slots, rows = slots.to(self._x.device, non_blocking=True), rows.to(self._x.device, non_blocking=True)
        self._x[slots] = x[rows].to(self._x)
        if dy is not None:
            self._dy[slots] = dy[rows].to(self._dy)

    def _place(self, count: int) -> tuple[Tensor, Tensor]:
        """Return slots and the offered rows to store there. A later row wins a slot, as it would one by one."""
        numbers = torch.arange(self.seen, self.seen + count)
        self.seen += count
        draws = torch.rand(count, generator=self._generator, dtype=torch.float64)
        slots = torch.where(numbers < self.capacity, numbers, (draws * (numbers + 1)).long())
        winners = torch.full((self.capacity + 1,), -1)
        winners.scatter_reduce_(0, slots.clamp(max=self.capacity), torch.arange(count), "amax")
        taken = (winners[:-1] >= 0).nonzero().reshape(-1)
        return taken, winners[taken]

    @torch.no_grad()
    def merge(self, other: "Reservoir") -> None:
        """Merge in place into a uniform sample of the rows of both. Rows with gradients replace rows without."""
        if other.seen == 0 or (self.has_dy and not other.has_dy):
            return
        if self.seen == 0 or (other.has_dy and not self.has_dy):
            self._take(other.x, other.dy, other.seen)
            return
        total = self.seen + other.seen
        size = min(total, self.capacity)
        theirs = int((torch.rand(size, generator=self._generator) < other.seen / total).sum())
        theirs = min(max(theirs, size - self.kept), other.kept)
        mine = min(size - theirs, self.kept)
        ours = torch.randperm(self.kept, generator=self._generator)[:mine].to(self._x.device)
        from_them = torch.randperm(other.kept, generator=self._generator)[:theirs].to(other.x.device)
        x = torch.cat([self.x[ours], other.x[from_them].to(self._x)])
        dy = None
        if self.dy is not None and other.dy is not None:
            dy = torch.cat([self.dy[ours], other.dy[from_them].to(self._dy)])
        self._take(x, dy, total)

    def _take(self, x: Tensor, dy: Tensor | None, seen: int) -> None:
        if x.shape[1] != self._x.shape[1] or x.shape[0] > self.capacity:
            raise ValueError(
                f"reservoir of {tuple(x.shape)} does not fit one of {self.capacity} rows x {self._x.shape[1]}"
            )
        self._x[: x.shape[0]] = x.to(self._x)
        self.seen, self.has_dy = seen, dy is not None
        if dy is not None:
            self._dy[: dy.shape[0]] = dy.to(self._dy)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        return {
            "x": self.x.cpu().clone(),
            "dy": self._dy[: self.kept].cpu().clone() if self.has_dy else torch.zeros(0, self._dy.shape[1]),
            "seen": torch.tensor([self.seen, int(self.has_dy)]),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        seen, has_dy = state["seen"].tolist()
        self._take(state["x"], state["dy"] if has_dy else None, seen)
