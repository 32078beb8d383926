"""One column on disk: a plain .npy file, written in pieces, readable by `np.load(..., mmap_mode="r")`.

The number of rows is unknown until the last piece, so the header has a fixed size of 128 bytes and is written again at
the end. Columns are read with plain file reads and not through a memory map: mapped pages count as resident memory
until the kernel reclaims them, so a stream over a large map seems to need unbounded memory, and really does under an
address-space limit.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loka.data.faults import DataError
from loka.data.rows import Array

_HEADER = 128
_MAGIC = b"\x93NUMPY\x01\x00"
_VERIFY_BYTES = 1 << 22


@dataclass(frozen=True)
class Column:
    """The manifest's entry for one column file."""

    path: str
    dtype: str
    rows: int
    crc32: int  # checksum of the payload, header excluded


class ColumnWriter:
    """Append arrays of one dtype to a new file."""

    def __init__(self, folder: Path, path: str, dtype: npt.DTypeLike) -> None:
        self._path = path
        self._dtype = np.dtype(dtype)
        self._rows = 0
        self._crc = 0
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        self._file = target.open("xb")
        self._file.write(_header(self._dtype, 0))

    def append(self, values: Array) -> None:
        """Write more rows. Raises if the dtype cannot hold a value."""
        if values.ndim != 1:
            raise ValueError(f"column {self._path}: expected one dimension, got shape {values.shape}")
        cast = np.ascontiguousarray(values, dtype=self._dtype)
        if self._dtype.kind in "iu" and not np.array_equal(cast, values):
            raise ValueError(f"column {self._path}: values do not fit in {self._dtype} without loss")
        payload = cast.data.cast("B") if len(cast) else b""
        self._crc = zlib.crc32(payload, self._crc)
        self._file.write(payload)
        self._rows += len(cast)

    def close(self) -> Column:
        """Write the final header and return the manifest's entry."""
        self._file.seek(0)
        self._file.write(_header(self._dtype, self._rows))
        self._file.close()
        return Column(self._path, self._dtype.str, self._rows, self._crc)

    def abandon(self) -> None:
        """Close the file without finishing it."""
        self._file.close()


def read_ranges(folder: Path, column: Column, ranges: Sequence[tuple[int, int]]) -> Array:
    """Read several [start, stop) ranges of a column into one new array."""
    out = np.empty(sum(stop - start for start, stop in ranges), column.dtype)
    view = out.data.cast("B") if len(out) else memoryview(b"")
    size = out.itemsize
    done = 0
    with (folder / column.path).open("rb", buffering=0) as file:
        for start, stop in ranges:
            file.seek(_HEADER + start * size)
            end = done + (stop - start) * size
            while done < end:
                got = file.readinto(view[done:end])
                if not got:
                    raise DataError(f"{folder / column.path}: ends early; the cache changed while it was being read")
                done += got
    return out


def map_column(folder: Path, column: Column) -> Array:
    """Map a column read-only, for random access."""
    if column.rows == 0:
        return np.empty(0, column.dtype)
    return np.memmap(folder / column.path, dtype=column.dtype, mode="r", offset=_HEADER, shape=(column.rows,))


def check_column(folder: Path, column: Column, *, payload: bool) -> None:
    """Raise DataError if the file is missing, of the wrong size or type, or (with `payload`) has other content."""
    path = folder / column.path
    expected = _HEADER + column.rows * np.dtype(column.dtype).itemsize
    if not path.is_file():
        raise DataError(f"{path}: missing")
    if path.stat().st_size != expected:
        raise DataError(f"{path}: {path.stat().st_size} bytes, expected {expected}")
    with path.open("rb") as file:
        if file.read(_HEADER) != _header(np.dtype(column.dtype), column.rows):
            raise DataError(f"{path}: the header does not say {column.dtype} x {column.rows} rows")
        if not payload:
            return
        crc = 0
        while piece := file.read(_VERIFY_BYTES):
            crc = zlib.crc32(piece, crc)
    if crc != column.crc32:
        raise DataError(
            f"{path}: checksum {crc:08x}, expected {column.crc32:08x}: the content changed after it was written"
        )


def _header(dtype: np.dtype[np.generic], rows: int) -> bytes:
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({rows},), }}".encode()
    room = _HEADER - len(_MAGIC) - 2
    return _MAGIC + room.to_bytes(2, "little") + text.ljust(room - 1) + b"\n"
