"""One minibatch of a ranking data set: plain tensors with fixed meanings.

All models read data through these two types, so they only move between devices and read ragged rows. Ids are int64, as
embedding lookups need them; id 0 means "unknown or missing" in every field.

A Jagged is a ragged matrix: row i is values[offsets[i]:offsets[i + 1]]. Histories are stored oldest first, so the most
recent event of a row is the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    """Ragged rows: row i = values[offsets[i]:offsets[i + 1]].

    Args:
        values: the values of all rows, concatenated.
        offsets: int64 [rows + 1].

    Example:
        >>> Jagged.from_rows([[1, 2], [], [3]]).lengths.tolist()
        [2, 0, 1]
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if self.offsets.dim() != 1 or self.offsets.numel() < 1 or self.offsets.dtype != torch.int64:
            raise ValueError(
                f"Jagged offsets must be int64 [rows + 1], got {self.offsets.dtype} {tuple(self.offsets.shape)}; "
                "an empty Jagged has offsets [0]"
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> Jagged:
        """Build from plain lists, for tests and examples."""
        lengths = torch.tensor([0, *(len(row) for row in rows)], dtype=torch.int64)
        values = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
        return cls(values, lengths.cumsum(0))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Length of every row, int64 [rows]."""
        return self.offsets[1:] - self.offsets[:-1]

    def row(self, index: int) -> Tensor:
        """Return the values of one row (a view)."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Jagged:
        """Copy to a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def padded(self, length: int, *, pad: int = 0) -> Tensor:
        """Return a dense [rows, length] tensor: the last `length` values of every row, then padding on the right."""
        if length < 1:
            raise ValueError(f"padded length must be at least 1, got {length}")
        kept = self.lengths.clamp(max=length)
        out = self.values.new_full((self.rows, length), pad)
        column = torch.arange(length, device=self.values.device).expand(self.rows, length)
        mask = column < kept[:, None]
        source = (self.offsets[1:] - kept)[:, None] + column
        out[mask] = self.values[source[mask]]
        return out

    def map(self, move: Callable[[Tensor], Tensor]) -> Jagged:
        """Apply a function that keeps values, such as a copy, to both tensors."""
        return Jagged(move(self.values), move(self.offsets))


@dataclass(frozen=True)
class Batch:
    """Examples as tensors; see loka.data.schema for what each column means.

    Args:
        dense: float32 [B, n_dense].
        categorical: int64 [B, n_categorical]; id 0 is "unknown or missing" in every field.
        sequences: ragged histories by name, oldest first, ids in the vocabulary of the field they share.
        labels: float32 [B, n_labels], the targets.
        group: int64 [B], the group that GAUC averages over, usually the user.

    Example:
        >>> next(load("complete-journey").train.batches(1024, shuffle=True, seed=0)).labels.shape
        torch.Size([1024, 1])
    """

    dense: Tensor
    categorical: Tensor
    sequences: dict[str, Jagged]
    labels: Tensor
    group: Tensor

    def __post_init__(self) -> None:
        sizes = {
            "dense": self.dense.shape[0],
            "categorical": self.categorical.shape[0],
            "labels": self.labels.shape[0],
            "group": self.group.shape[0],
            **{name: jagged.rows for name, jagged in self.sequences.items()},
        }
        if any(size != self.size for size in sizes.values()):  # not via a set: symbolic sizes are not hashable
            raise ValueError(f"the parts of a Batch disagree on the number of examples: {sizes}")

    @property
    def size(self) -> int:
        """Number of examples."""
        return self.categorical.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Copy every tensor to a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory, so that a later `.to("cuda", non_blocking=True)` overlaps with compute."""
        return self._map(Tensor.pin_memory)

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            dense=move(self.dense),
            categorical=move(self.categorical),
            sequences={name: jagged.map(move) for name, jagged in self.sequences.items()},
            labels=move(self.labels),
            group=move(self.group),
        )
