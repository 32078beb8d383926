"""Tally: the score sums of one site, four for every look, GEMM and recipe, in step order.

Losses and gradients change during training, and a plan is for the steps to come, so only the later half of the looks
decides. Sums stay on the device until they are read.
"""

from collections.abc import Iterable, Mapping
from typing import Self

import torch
from torch import Tensor

from loka.probe.score import SCORED, Shown, harm_from, operands_of, score_look
from loka.records import GEMMS, Gemm, Interval

FIRST, EVERY = 2, 4  # the first two looks are scored, then one in four


class Looks:
    """A table of numbers of every look, with the mean loss of an example, in step order.

    Args:
        shape: of a table.
    """

    def __init__(self, *shape: int) -> None:
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._steps = torch.zeros(0, dtype=torch.int64)
        self._tables = torch.zeros(0, *shape, dtype=torch.float64)
        self._nats = torch.zeros(0, dtype=torch.float64)

    def add(self, step: int, table: Tensor, nats: Tensor) -> None:
        """Add one look."""
        self._pending.append((step, table, nats))

    @property
    def looks(self) -> int:
        """Number of looks."""
        return len(self._pending) + len(self._steps)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the tables, float64 [looks, ...], and the mean losses, [looks], on the CPU."""
        if self._pending:
            steps, tables, nats = zip(*self._pending, strict=True)
            self._steps = torch.cat([self._steps, torch.tensor(steps)])
            self._tables = torch.cat([self._tables, torch.stack(tables).cpu()])
            self._nats = torch.cat([self._nats, torch.stack([n.double().cpu() for n in nats])])
            self._pending = []
        return self._tables, self._nats

    def merge(self, other: Self) -> None:
        """Add the looks of another rank."""
        self.read()
        other.read()
        order = torch.cat([self._steps, other._steps]).argsort(stable=True)
        for name in ("_steps", "_tables", "_nats"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)])[order])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        tables, nats = self.read()
        return {"steps": self._steps.clone(), "tables": tables.clone(), "nats": nats.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        self._pending = []
        self._steps, self._tables, self._nats = (state[name].clone() for name in ("steps", "tables", "nats"))


class Tally(Looks):
    """Score sums of every look. `keys` are the (gemm, recipe) pairs, in a fixed order."""

    def __init__(self, recipes: Iterable[str] = SCORED) -> None:
        self.recipes = tuple(recipes)
        self.keys = [(gemm, recipe) for gemm in GEMMS for recipe in self.recipes if operands_of(recipe, gemm)]
        super().__init__(len(self.keys), 4)
        self.largest: dict[str, Tensor] = {}  # amax of x and dy over all looks, for static and delayed scales

    @staticmethod
    def due(look: int) -> bool:
        """Return whether the look of this number is scored."""
        return look < FIRST or look % EVERY == 0

    def see(self, shown: Shown, step: int) -> None:
        """Score one look."""
        found = score_look(shown, self.recipes)
        if found:
            empty = torch.zeros(4, dtype=torch.float64, device=shown.x.device)
            sums = torch.stack([found.get(key, empty) for key in self.keys])
            self.add(step, sums, shown.nats)

    def remember(self, largest: Mapping[str, Tensor]) -> None:
        """Update the running amax that later looks use for static and delayed scales. Non-finite values are ignored."""
        for role, value in largest.items():
            value = torch.where(value.isfinite(), value, torch.zeros_like(value))
            seen = self.largest.get(role)
            self.largest[role] = value if seen is None else torch.maximum(seen, value)

    def later(self, gemm: Gemm, recipe: str) -> tuple[Tensor, float]:
        """Return (sums [looks, 4], mean loss of an example) over the later half of the looks with a result."""
        tables, nats = self.read()
        sums = tables[:, self.keys.index((gemm, recipe))]
        known = sums[:, 0] > 0
        sums, nats = sums[known], nats[known]
        half = slice(len(sums) // 2, None)
        size = float(nats[half].nanmean()) if len(sums) else 1.0
        return sums[half], size if size == size else 1.0

    def harm(self, gemm: Gemm, recipe: str) -> tuple[Interval, float] | None:
        """Return (harm, mean) of the later half of the looks with a result; None if there is none."""
        if (gemm, recipe) not in self.keys:
            return None
        sums, nats = self.later(gemm, recipe)
        return harm_from(gemm, sums, nats=nats)

    def merge(self, other: Self) -> None:
        """Add the looks of another rank."""
        if other.keys != self.keys:
            raise ValueError(f"scores of {other.recipes} and {self.recipes} do not merge")
        super().merge(other)
        self.remember({role: value.to(self.largest.get(role, value).device) for role, value in other.largest.items()})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        largest = [float(self.largest[role]) if role in self.largest else -1.0 for role in ("x", "dy")]
        return {**super().state_dict(), "largest": torch.tensor(largest)}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device | None = None) -> None:
        """Restore the result of `state_dict`, with `largest` on a device."""
        if state["tables"].shape[1:] != self._tables.shape[1:]:
            raise ValueError(f"scores of {state['tables'].shape[1]} pairs, expected {len(self.keys)}: other recipes")
        super().load_state_dict(state)
        roles = zip(("x", "dy"), state["largest"], strict=True)
        self.largest = {role: value.to(device, copy=True) for role, value in roles if float(value) >= 0}
