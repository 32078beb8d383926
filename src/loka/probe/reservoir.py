"""A small uniform sample of the real rows a site saw, x and dy of the same rows together.

Algorithm R: row number t (counted from 1) replaces a random one of the `capacity` kept rows with probability capacity / t, so that at
any time every row seen so far has the same chance to be kept. Real rows are the control for everything that is modelled: a heavy
tail that a Gaussian misses is in here.

What it does not keep is which rows made up a batch: a weight gradient is evaluated on rows of several sampled steps.
"""

import torch
from torch import Tensor

MAX_BYTES = 32 * 2**20  # per site; wide sites keep fewer rows
MIN_ROWS = 64


class Reservoir:
    """Rows of x [*, K] and, where there are gradients, of dy [*, N]."""

    def __init__(self, rows: int, widths: tuple[int, int], device: torch.device, generator: torch.Generator) -> None:
        affordable = MAX_BYTES // (4 * max(sum(widths), 1))
        self.capacity = max(1, min(rows, max(affordable, MIN_ROWS)))
        self._generator = generator
        self._x = torch.zeros(self.capacity, widths[0], device=device)
        self._dy = torch.zeros(self.capacity, widths[1], device=device)
        self.seen = 0
        self.has_dy = False

    @property
    def kept(self) -> int:
        """Rows held."""
        return min(self.seen, self.capacity)

    @property
    def x(self) -> Tensor:
        """Kept rows of the input."""
        return self._x[: self.kept]

    @property
    def dy(self) -> Tensor | None:
        """Kept rows of the output's gradient, matching `x`; None when no gradient was seen."""
        return self._dy[: self.kept] if self.has_dy else None

    @torch.no_grad()
    def offer(self, x: Tensor, dy: Tensor | None) -> None:
        """Show rows; rows without a gradient are dropped once rows with one were seen, and replaced by them."""
        if dy is None and self.has_dy:
            return
        if dy is not None and not self.has_dy:
            self.seen, self.has_dy = 0, True
        targets = self._place(x.shape[0])
        if not targets:
            return
        slots = torch.tensor(list(targets), device=self._x.device)
        rows = torch.tensor(list(targets.values()), device=self._x.device)
        self._x[slots] = x[rows].to(self._x)
        if dy is not None:
            self._dy[slots] = dy[rows].to(self._dy)

    def _place(self, count: int) -> dict[int, int]:
        """Slot -> offered row; a later row wins a slot, as it would one by one."""
        first = self.seen
        self.seen += count
        targets: dict[int, int] = {}
        draws = torch.rand(count, generator=self._generator, dtype=torch.float64).tolist()
        for row, draw in enumerate(draws):
            number = first + row
            slot = number if number < self.capacity else int(draw * (number + 1))
            if slot < self.capacity:
                targets[slot] = row
        return targets

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors."""
        return {
            "x": self.x.cpu().clone(),
            "dy": self._dy[: self.kept].cpu().clone() if self.has_dy else torch.zeros(0, self._dy.shape[1]),
            "seen": torch.tensor([self.seen, int(self.has_dy)]),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""
        x, dy, (seen, has_dy) = state["x"], state["dy"], state["seen"].tolist()
        if x.shape[1] != self._x.shape[1] or x.shape[0] > self.capacity:
            raise ValueError(
                f"reservoir of {tuple(x.shape)} does not fit one of {self.capacity} rows x {self._x.shape[1]}"
            )
        self._x[: x.shape[0]] = x.to(self._x)
        self._dy[: dy.shape[0]] = dy.to(self._dy)
        self.seen, self.has_dy = seen, bool(has_dy)
