"""An endless stream of batches: epoch after epoch of a split, with a position that can be saved.

A training run counts steps, not epochs. At the end of an epoch the stream opens the next one, in a new order drawn from
(seed, epoch), and drops the incomplete last batch, so that every step has the same shape. Its state is plain JSON: the
epoch, and the split's own position in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class Batches(Protocol):
    """One epoch of batches with a position."""

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved position."""
        ...


class Split(Protocol):
    """One part of a data set, as in `loka.data.ranking.Split`."""

    def batches(
        self, batch_size: int, *, shuffle: bool, seed: int, drop_last: bool, rank: int, world: int, epoch: int
    ) -> Batches:
        """Return one epoch, in the order of (seed, epoch)."""
        ...


class TrainData(Protocol):
    """Data to train and evaluate on, as in `loka.data.RankingData`."""

    @property
    def train(self) -> Any:
        """A Split."""
        ...

    @property
    def valid(self) -> Any:
        """A Split, or None if nothing is evaluated."""
        ...


class EpochStream:
    """Endless batches of one shape from one rank's share of a split."""

    def __init__(self, split: Split, batch_size: int, *, seed: int, rank: int = 0, world: int = 1) -> None:
        self._split, self._batch_size = split, batch_size
        self._seed, self._rank, self._world = seed, rank, world
        self.epoch = 0
        self._batches = self._open()

    def _open(self) -> Batches:
        return self._split.batches(
            self._batch_size,
            shuffle=True,
            seed=self._seed,
            drop_last=True,
            rank=self._rank,
            world=self._world,
            epoch=self.epoch,
        )

    def __iter__(self) -> EpochStream:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches, None)
        if batch is not None:
            return batch
        self.epoch += 1
        self._batches = self._open()
        batch = next(self._batches, None)
        if batch is None:
            raise ValueError(
                f"rank {self._rank} of {self._world} has less than one full batch of {self._batch_size} examples; "
                "use a smaller batch_size or more data"
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the position in it."""
        return {"epoch": self.epoch, "position": self._batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. All ranks are at the same position, so the state of any rank will do."""
        self.epoch = state["epoch"]
        self._batches = self._open()
        position = dict(state["position"])
        if "rank" in position:
            position["rank"] = self._rank
        self._batches.load_state_dict(position)
