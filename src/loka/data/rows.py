"""Rows in numpy, between a source (a cache on disk, a generator) and a Batch.

`Source.read(ranges)` returns Rows. Ragged columns stay lazy: Windows hold (start, length) pairs into a shared array of
values, so shuffling moves two integers per example, and values are gathered once, when a batch is made. Histories of
one user overlap almost entirely; as windows they are stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from loka.data.batch import Batch, Jagged

Array = npt.NDArray[Any]


def find_sorted(keys: Array, wanted: Array) -> tuple[Array, Array]:
    """Return a position in sorted keys for every wanted value, and whether the value is there."""
    if not len(keys):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return index, keys[index] == wanted


@dataclass(frozen=True)
class Windows:
    """Ragged rows as windows into shared values: row i = values[start[i]:start[i] + length[i]]."""

    values: Array
    start: Array
    length: Array

    def take(self, index: Array | slice) -> Windows:
        """Select rows."""
        return Windows(self.values, self.start[index], self.length[index])

    def gather(self) -> tuple[Array, Array]:
        """Return (int64 values, int64 offsets) of all rows, with one vectorized gather."""
        length = self.length.astype(np.int64, copy=False)
        offsets = np.zeros(len(length) + 1, np.int64)
        np.cumsum(length, out=offsets[1:])
        index = np.repeat(self.start - offsets[:-1], length)
        index += np.arange(offsets[-1], dtype=np.int64)
        return np.take(self.values, index).astype(np.int64, copy=False), offsets


@dataclass(frozen=True)
class Rows:
    """A block of examples, row-major."""

    dense: Array
    categorical: Array
    labels: Array
    group: Array
    sequences: dict[str, Windows]

    def __len__(self) -> int:
        return len(self.group)

    def take(self, index: Array | slice) -> Rows:
        """Select rows; a slice makes views, an index array copies."""
        return Rows(
            self.dense[index],
            self.categorical[index],
            self.labels[index],
            self.group[index],
            {name: windows.take(index) for name, windows in self.sequences.items()},
        )


class Source(Protocol):
    """Produces examples by position. Reading is a pure function of the ranges."""

    def __len__(self) -> int: ...

    def read(self, ranges: Sequence[tuple[int, int]]) -> Rows:
        """Return the examples of all [start, stop) ranges, one after another."""
        ...

    def fingerprint(self) -> str:
        """A string that identifies the exact data, so that a saved stream position is not applied to other data."""
        ...


def make_batch(pieces: Sequence[Rows]) -> Batch:
    """Join pieces (usually one) into a Batch of tensors that own their memory."""
    names = pieces[0].sequences.keys()
    return Batch(
        dense=torch.from_numpy(_join([p.dense for p in pieces], np.float32)),
        categorical=torch.from_numpy(_join([p.categorical for p in pieces], np.int64)),
        sequences={name: _join_windows([p.sequences[name] for p in pieces]) for name in names},
        labels=torch.from_numpy(_join([p.labels for p in pieces], np.float32)),
        group=torch.from_numpy(_join([p.group for p in pieces], np.int64)),
    )


def _join(arrays: list[Array], dtype: type) -> Array:
    # Always a copy: a batch must not keep alive, or share memory with, the 65,536-row window it was cut from.
    if len(arrays) == 1:
        return np.array(arrays[0], dtype=dtype, order="C", copy=True)
    return np.concatenate(arrays).astype(dtype, copy=False)


def _join_windows(parts: list[Windows]) -> Jagged:
    gathered = [part.gather() for part in parts]
    values = np.concatenate([v for v, _ in gathered]) if len(gathered) > 1 else gathered[0][0]
    if len(gathered) == 1:
        return Jagged(torch.from_numpy(values), torch.from_numpy(gathered[0][1]))
    offsets = [gathered[0][1]]
    for _, more in gathered[1:]:
        offsets.append(more[1:] + offsets[-1][-1])
    return Jagged(torch.from_numpy(values), torch.from_numpy(np.concatenate(offsets)))
