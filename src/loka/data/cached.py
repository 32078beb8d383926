"""Read a cached ranking data set. Needs numpy and torch, but no preprocessing library."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loka.data.cache import Manifest
from loka.data.columns import map_column, read_ranges
from loka.data.faults import DataError
from loka.data.ranking import RankingData, Split
from loka.data.rows import Array, Rows, Windows
from loka.data.schema import Schema

_RESIDENT = 64 << 20
"""Sequence values above this size are dropped from memory after every window, so that the map cannot grow"""


class CachedSource:
    """Examples of one split in a cache folder. Holds no open file, so it can be pickled into worker processes."""

    def __init__(self, folder: Path, manifest: Manifest, schema: Schema, split: str) -> None:
        self._folder = folder
        self._split = split
        self._rows = manifest.rows[split]
        self._columns = manifest.columns
        self._names = (schema.dense, tuple(f.name for f in schema.categorical), schema.labels)
        self._sequences = tuple(s.name for s in schema.sequences)
        self._values: dict[str, Array] = {}
        self._fingerprint = f"{manifest.name}/{split}/{self._rows}/{self._crc():08x}"

    def __len__(self) -> int:
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_values": {}}

    def fingerprint(self) -> str:
        """A string of name, split, size and checksum of the columns."""
        return self._fingerprint

    def read(self, ranges: Sequence[tuple[int, int]]) -> Rows:
        """Read ranges of every column."""
        dense, categorical, labels = self._names
        return Rows(
            dense=self._matrix("dense", dense, ranges, np.float32),
            categorical=self._matrix("categorical", categorical, ranges, np.int32),
            labels=self._matrix("label", labels, ranges, np.float32),
            group=self._column("group", ranges),
            sequences={name: self._windows(name, ranges) for name in self._sequences},
        )

    def _column(self, name: str, ranges: Sequence[tuple[int, int]]) -> Array:
        return read_ranges(self._folder, self._columns[f"{self._split}/{name}"], ranges)

    def _matrix(self, kind: str, names: Sequence[str], ranges: Sequence[tuple[int, int]], dtype: type) -> Array:
        # Row-major: one strided write per column here makes every later row gather a single contiguous copy.
        out: Array = np.empty((sum(stop - start for start, stop in ranges), len(names)), dtype)
        for index, name in enumerate(names):
            out[:, index] = self._column(f"{kind}.{name}", ranges)
        return out

    def _windows(self, name: str, ranges: Sequence[tuple[int, int]]) -> Windows:
        start = self._column(f"sequence.{name}.start", ranges)
        length = self._column(f"sequence.{name}.length", ranges)
        return Windows(self._map(name), start, length)

    def _map(self, name: str) -> Array:
        values = self._values.get(name)
        if values is None:
            values = map_column(self._folder, self._columns[f"values/{name}"])
            self._values[name] = values
        elif values.nbytes > _RESIDENT and isinstance(values, np.memmap):
            _drop_pages(values)
        return values

    def _crc(self) -> int:
        crcs = [c.crc32 for p, c in sorted(self._columns.items()) if p.startswith((f"{self._split}/", "values/"))]
        mixed = 0
        for crc in crcs:
            mixed = (mixed * 1_000_003 ^ crc) & 0xFFFFFFFF
        return mixed


def open_ranking(folder: Path, manifest: Manifest) -> RankingData:
    """Make a RankingData over a checked cache."""
    if manifest.kind != "ranking" or manifest.schema is None:
        raise DataError(f"{folder}: a cache of kind {manifest.kind!r}, expected 'ranking'")
    schema = manifest.schema
    missing = [s for s in ("train", "valid", "test") if s not in manifest.rows]
    if missing:
        raise DataError(f"{folder}: damaged cache, the splits {missing} are missing; rebuild it with rebuild=True")
    train, valid, test = (
        Split(s, schema, CachedSource(folder, manifest, schema, s)) for s in ("train", "valid", "test")
    )
    info: dict[str, Any] = {
        "folder": str(folder),
        "options": manifest.options,
        "source": [{"name": s.name, "bytes": s.bytes, "sha256": s.sha256} for s in manifest.source],
        "total_rows": manifest.total_rows,
        "bad_rows": manifest.bad_rows,
        "bad_examples": list(manifest.bad_examples),
        "facts": manifest.facts,
    }
    return RankingData(manifest.name, schema, train, valid, test, info)


def _drop_pages(values: np.memmap[Any, Any]) -> None:
    # numpy keeps the mmap object in `_mmap`; in implementations without it, the kernel still reclaims under pressure.
    mapped = getattr(values, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)
