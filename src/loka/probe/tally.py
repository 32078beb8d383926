"""Tally: the score sums of one site, four for every look, GEMM and recipe, in step order.

Losses and gradients change during training, and a plan is for the steps to come, so only the later half of the looks
decides. Sums stay on the device until they are read.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from loka.probe.score import SCORED, Shown, harm_from, operands_of, score_look
from loka.records import GEMMS, Gemm, Interval

FIRST, EVERY = 2, 4  # the first two looks are scored, then one in four


class Tally:
    """Score sums of every look. `keys` are the (gemm, recipe) pairs, in a fixed order."""

    def __init__(self, recipes: Iterable[str] = SCORED) -> None:
        self.recipes = tuple(recipes)
        self.keys = [(gemm, recipe) for gemm in GEMMS for recipe in self.recipes if operands_of(recipe, gemm)]
        self._pending: list[tuple[int, Tensor, Tensor]] = []
        self._steps = torch.zeros(0, dtype=torch.int64)
        self._sums = torch.zeros(0, len(self.keys), 4, dtype=torch.float64)
        self._nats = torch.zeros(0, dtype=torch.float64)
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
            self._pending.append((step, sums, shown.nats))

    def remember(self, largest: Mapping[str, Tensor]) -> None:
        """Update the running amax that later looks use for static and delayed scales. Non-finite values are ignored."""
        for role, value in largest.items():
            value = torch.where(value.isfinite(), value, torch.zeros_like(value))
            seen = self.largest.get(role)
            self.largest[role] = value if seen is None else torch.maximum(seen, value)

    def _settle(self) -> None:
        if self._pending:
            steps, sums, nats = zip(*self._pending, strict=True)
            self._steps = torch.cat([self._steps, torch.tensor(steps)])
            self._sums = torch.cat([self._sums, torch.stack(sums).cpu()])
            self._nats = torch.cat([self._nats, torch.stack([n.double().cpu() for n in nats])])
            self._pending = []

    @property
    def looks(self) -> int:
        """Number of looks scored."""
        return len(self._pending) + len(self._steps)

    def later(self, gemm: Gemm, recipe: str) -> tuple[Tensor, float]:
        """Return (sums [looks, 4], mean loss of an example) over the later half of the looks with a result."""
        self._settle()
        sums = self._sums[:, self.keys.index((gemm, recipe))]
        known = sums[:, 0] > 0
        sums, nats = sums[known], self._nats[known]
        half = slice(len(sums) // 2, None)
        size = float(nats[half].nanmean()) if len(sums) else 1.0
        return sums[half], size if size == size else 1.0

    def harm(self, gemm: Gemm, recipe: str) -> tuple[Interval, float] | None:
        """Return (harm, mean) of the later half of the looks with a result; None if there is none."""
        if (gemm, recipe) not in self.keys:
            return None
        sums, nats = self.later(gemm, recipe)
        return harm_from(gemm, sums, nats=nats)

    def merge(self, other: "Tally") -> None:
        """Add the looks of another rank."""
        self._settle()
        other._settle()
        if other.keys != self.keys:
            raise ValueError(f"scores of {other.recipes} and {self.recipes} do not merge")
        order = torch.cat([self._steps, other._steps]).argsort(stable=True)
        for name in ("_steps", "_sums", "_nats"):
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)])[order])
        self.remember({role: value.to(self.largest.get(role, value).device) for role, value in other.largest.items()})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        self._settle()
        largest = [float(self.largest[role]) if role in self.largest else -1.0 for role in ("x", "dy")]
        return {
            "steps": self._steps.clone(),
            "sums": self._sums.clone(),
            "nats": self._nats.clone(),
            "largest": torch.tensor(largest),
        }

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the result of `state_dict`."""
        if state["sums"].shape[1:] != self._sums.shape[1:]:
            raise ValueError(f"scores of {state['sums'].shape[1]} pairs, expected {len(self.keys)}: other recipes")
        self._pending = []
        self._steps, self._sums, self._nats = (state[name].clone() for name in ("steps", "sums", "nats"))
        roles = zip(("x", "dy"), state["largest"], strict=True)
        self.largest = {role: value.to(device, copy=True) for role, value in roles if float(value) >= 0}
