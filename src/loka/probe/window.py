"""Windows over training: a bounded history for detecting drift.

A window is a span of `length` steps. At its end, a mark stores a copy of the cumulative histogram (the difference of
two copies is the histogram of the window) and the number of looks so far (`Statistics` keeps the moments of every
look). With more than 16 marks, every other one is dropped and the length doubles, so a long run keeps its whole history
more coarsely.

Some real rows of the first and the latest window are kept too, so that candidates can be judged on either.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.probe.reservoir import Reservoir
from loka.probe.saving import select_prefix
from loka.probe.statistics import Statistics
from loka.records import Role

MAX_MARKS = 16
ROWS, ROW_BYTES = 128, 4 * 2**20
ROLES: tuple[Role, ...] = ("x", "w", "dy")


@dataclass
class Mark:
    """The end of a window: the first step after it, and the looks and histogram up to then."""

    step: int
    looks: dict[Role, int]
    bins: dict[Role, Tensor]


class Windows:
    """Marks and rows of one site."""

    def __init__(self, rows: int, widths: tuple[int, int], device: torch.device, length: int) -> None:
        self.length, self._rows = length, rows
        self._widths, self._device = widths, device
        self._generator = torch.Generator()
        self.marks: list[Mark] = []
        self.start: int | None = None  # first step of the first window
        self.first, self.latest, self._current = (self._make_reservoir() for _ in range(3))

    def _make_reservoir(self) -> Reservoir:
        return Reservoir(self.rows_for(self._rows, self._widths), self._widths, self._device, self._generator)

    @staticmethod
    def rows_for(rows: int, widths: tuple[int, int]) -> int:
        """Return the number of rows kept per window by a site that keeps `rows`."""
        return max(8, min(rows, ROWS, ROW_BYTES // (4 * max(sum(widths), 1))))

    @staticmethod
    def bytes_for(rows: int, widths: tuple[int, int]) -> int:
        """Return the memory of the rows of three windows, in bytes."""
        return 3 * 4 * Windows.rows_for(rows, widths) * sum(widths)

    def advance(self, step: int, statistics: Mapping[Role, Statistics]) -> None:
        """Close the current window if `step` lies beyond it. Called before a look at that step is added."""
        if self.start is None:
            self.start = step
        end = self.marks[-1].step if self.marks else self.start
        if step < end + self.length:
            return
        bins = {role: statistics[role].raw_bins.clone() for role in ROLES}
        self.marks.append(Mark(step, {role: statistics[role].count for role in ROLES}, bins))
        if len(self.marks) == 1:
            self.first = self._current
        self.latest, self._current = self._current, self._make_reservoir()
        if len(self.marks) > MAX_MARKS:
            self.marks = self.marks[1::2]
            self.length *= 2

    def see(self, x: Tensor, dy: Tensor | None, generator: torch.Generator) -> None:
        """Offer rows to the current window."""
        self._generator.set_state(generator.get_state())
        self._current.offer(x, dy)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        state: dict[str, Tensor] = {"length": torch.tensor([self.length, -1 if self.start is None else self.start])}
        if self.marks:
            state["marks"] = torch.tensor([[m.step, *(m.looks[r] for r in ROLES)] for m in self.marks])
            state["bins"] = torch.stack([torch.stack([m.bins[r] for r in ROLES]) for m in self.marks]).cpu()
        for name, part in (("first", self.first), ("latest", self.latest), ("current", self._current)):
            state |= {f"{name}.{key}": value for key, value in part.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        self.length, start = state["length"].tolist()
        self.start = None if start < 0 else start
        self.marks = []
        for mark, bins in zip(state.get("marks", torch.zeros(0, 4)).tolist(), state.get("bins", ()), strict=True):
            counts, kept = dict(zip(ROLES, mark[1:], strict=True)), bins.to(self._device, copy=True)
            self.marks.append(Mark(mark[0], counts, dict(zip(ROLES, kept.unbind(), strict=True))))
        for name in ("first", "latest", "current"):
            part = self._make_reservoir()
            part.load_state_dict(select_prefix(state, f"{name}."))
            setattr(self, "_current" if name == "current" else name, part)

    def merge(self, other: "Windows", roles: tuple[Role, ...], generator: torch.Generator) -> None:
        """Add the windows of another rank, which must end at the same steps."""
        self._generator.set_state(generator.get_state())
        if [m.step for m in self.marks] != [m.step for m in other.marks]:
            raise ValueError(
                f"windows end at {[m.step for m in self.marks]} here and at {[m.step for m in other.marks]} there: "
                "ranks must step together"
            )
        for mine, theirs in zip(self.marks, other.marks, strict=True):
            for role in roles:
                mine.looks[role] += theirs.looks[role]
                mine.bins[role] += theirs.bins[role].to(self._device)
        for mine_rows, their_rows in (
            (self.first, other.first),
            (self.latest, other.latest),
            (self._current, other._current),
        ):
            mine_rows.merge(their_rows)
