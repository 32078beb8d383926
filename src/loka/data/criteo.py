"""Criteo's click-log format: label, 13 integers, 26 hashed categories, tab-separated, missing values empty.

**Split.** Files named train, dev / valid and test are taken as such. A single file is cut by position, 80 / 10 / 10:
the published logs are chronological, so that is a split by time. There is no user: `group` is 0 throughout, and GAUC
equals AUC.

**Integers** become sign(x) log(1 + |x|), missing ones 0. **Categories** are 32-bit hashes in hexadecimal.
`encoding="vocabulary"` gives ids to those seen at least `min_count` times in training, everything else is id 0;
`encoding="hash"` maps every value of a field into `buckets` ids with a multiplicative hash: one pass less and a fixed
table size, at the price of collisions.

Files are read in blocks of 16 MB, so memory does not grow with them (with a vocabulary, it grows with the distinct
values). Plain or gzip files. Criteo's own logs may be used under Criteo's terms; nothing of them is redistributed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loka.data.cache import CacheWriter
from loka.data.faults import BadRows, DataError
from loka.data.progress import Progress
from loka.data.rows import Array, find_sorted
from loka.data.schema import Field, Schema
from loka.data.tables import explain_bad, open_unpacked, split_lines

if TYPE_CHECKING:
    import polars as pl

_INTEGERS = tuple(f"integer_{index}" for index in range(1, 14))
_CATEGORIES = tuple(f"category_{index}" for index in range(1, 27))
_COLUMNS = ("click", *_INTEGERS, *_CATEGORIES)
_BLOCK = 16 << 20
_SPLIT_WORDS = {"train": ("train",), "valid": ("dev", "valid", "val"), "test": ("test",)}
_SUFFIXES = (".tsv", ".txt", ".tsv.gz", ".txt.gz")
_MISSING = -1


@dataclass(frozen=True)
class Options:
    """Options of the cache; each choice has its own cache."""

    encoding: str = "vocabulary"
    min_count: int = 2
    buckets: int = 100_000  # cardinality of every field with encoding="hash", including id 0 for missing values

    def __post_init__(self) -> None:
        if self.encoding not in ("vocabulary", "hash"):
            raise ValueError(f"encoding must be 'vocabulary' or 'hash', got {self.encoding!r}")
        if self.min_count < 1 or not 2 <= self.buckets < 1 << 31:
            raise ValueError(
                f"min_count >= 1 and 2 <= buckets < 2^31 are needed, got {self.min_count} and {self.buckets}"
            )


def find_files(source: Path | None) -> dict[str, Path]:
    """Locate train / valid / test files, or a single log, in a folder; or take a file as the single log."""
    if source is None:
        raise DataError("criteo: needs a source folder or file")
    if source.is_file():
        return {"all": source}
    logs = sorted(path for path in source.iterdir() if path.name.endswith(_SUFFIXES) and path.is_file())
    files = {}
    for split, words in _SPLIT_WORDS.items():
        found = [path for path in logs if any(word in path.name.lower() for word in words)]
        if len(found) > 1:
            raise DataError(f"criteo: several {split} files in {source}: {[p.name for p in found]}; keep one")
        if found:
            files[split] = found[0]
    if len(files) == 3:
        return files
    if len(logs) == 1:
        return {"all": logs[0]}
    raise DataError(
        f"criteo: {source} should hold one log, or one file each for train, dev and test, named so; found "
        f"{[path.name for path in logs]}. Pass a file as source to use it alone (the published test file has no labels)"
    )


def build(files: dict[str, Path], options: Options, writer: CacheWriter, progress: Progress) -> None:
    """Preprocess the logs: with a vocabulary in two passes, with hashing in one."""
    parts = _parts(files)
    vocabularies: list[Array] | None = None
    if options.encoding == "vocabulary":
        vocabularies = _fit(*parts["train"], options.min_count, progress)
        sizes = [len(values) + 1 for values in vocabularies]
    else:
        sizes = [options.buckets] * len(_CATEGORIES)
    fields = tuple(Field(name, size) for name, size in zip(_CATEGORIES, sizes, strict=True))
    writer.schema = Schema(_INTEGERS, fields, (), ("click",))
    for split, (path, first, last) in parts.items():
        for frame, line in _read_blocks(path, first, last, writer.bad):
            codes = [frame[name].to_numpy() for name in _CATEGORIES]
            ids = [_encode(c, i, options, vocabularies) for i, c in enumerate(codes)]
            integers = {name: frame[name].to_numpy() for name in _INTEGERS}
            writer.append_rows(
                split,
                dense={name: np.sign(x) * np.log1p(np.abs(x)) for name, x in integers.items()},
                categorical=dict(zip(_CATEGORIES, ids, strict=True)),
                labels={"click": frame["click"].to_numpy()},
                group=np.zeros(frame.height, np.int64),
            )
            progress(f"encoding {split}", line, None)
        writer.bad.check(f"criteo {path.name}")
    for name, values in zip(_CATEGORIES, vocabularies or (), strict=False):
        writer.append(f"vocabulary/{name}", values, np.int64)


def _parts(files: dict[str, Path]) -> dict[str, tuple[Path, int, int | None]]:
    """Return (file, first line, line after the last) per split."""
    if "all" not in files:
        return {split: (files[split], 0, None) for split in ("train", "valid", "test")}
    path = files["all"]
    lines = sum(block.count(b"\n") + (not block.endswith(b"\n")) for block in _blocks(path))
    if lines < 10:
        raise DataError(f"criteo: {path} has {lines} lines, too few to cut into train, valid and test")
    valid, test = lines * 8 // 10, lines * 9 // 10
    return {"train": (path, 0, valid), "valid": (path, valid, test), "test": (path, test, None)}


def _fit(path: Path, first: int, last: int | None, min_count: int, progress: Progress) -> list[Array]:
    """Count the values of every field over the training lines. Bad lines are reported in the second pass."""
    import polars as pl

    counts: list[pl.DataFrame | None] = [None] * len(_CATEGORIES)
    for frame, line in _read_blocks(path, first, last, BadRows(limit=1.0)):
        for index, name in enumerate(_CATEGORIES):
            more = frame[name].rename("value").value_counts(name="count")
            seen = counts[index]
            both = more if seen is None else pl.concat([seen, more]).group_by("value").agg(pl.col("count").sum())
            counts[index] = both
        progress("counting values", line, None)
    if any(seen is None for seen in counts):
        raise DataError(f"criteo: {path} has no usable training line")
    kept = [c.filter((pl.col("count") >= min_count) & (pl.col("value") != _MISSING)) for c in counts if c is not None]
    return [np.sort(c["value"].to_numpy()) for c in kept]


def _encode(codes: Array, field: int, options: Options, vocabularies: list[Array] | None) -> Array:
    if vocabularies is None:
        return _hash(codes, field, options.buckets)
    index, known = find_sorted(vocabularies[field], codes)
    return np.where(known, index + 1, 0)


def _hash(codes: Array, field: int, buckets: int) -> Array:
    """Mix (value, field) with two rounds of multiply and shift; missing stays 0, values land in 1..buckets-1."""
    mixed = codes.astype(np.uint64) + np.uint64((field + 1) << 32)
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(32)
    return np.where(codes == _MISSING, 0, (mixed % np.uint64(buckets - 1)).astype(np.int64) + 1)


def _read_blocks(path: Path, first: int, last: int | None, bad: BadRows) -> Iterator[tuple[pl.DataFrame, int]]:
    """Yield typed frames of the good lines in [first, last), with the number of lines read so far."""
    line = 0
    for block in _blocks(path):
        count = block.count(b"\n") + (not block.endswith(b"\n"))
        begin, end = max(first - line, 0), count if last is None else min(last - line, count)
        if begin < end:
            yield _parse(block, begin, end, line, path.name, bad), line + end
        line += count


def _parse(block: bytes, begin: int, end: int, offset: int, name: str, bad: BadRows) -> pl.DataFrame:
    import polars as pl

    raw = split_lines(block, "\t", _COLUMNS).with_columns(pl.col("__line") + offset)
    raw = raw.filter(pl.col("__line").is_between(offset + begin + 1, offset + end))
    whole = [pl.col(c).cast(pl.Int64, strict=False) for c in _INTEGERS]
    parsed = raw.select(
        pl.when(pl.col("click").is_in(["0", "1"])).then(pl.col("click").cast(pl.Float32, strict=False)).alias("click"),
        *(pl.when(pl.col(c) == "").then(0).otherwise(v).alias(c) for c, v in zip(_INTEGERS, whole, strict=True)),
        *(pl.when(pl.col(c) == "").then(_MISSING).otherwise(_hexadecimal(c)).alias(c) for c in _CATEGORIES),
    )
    return parsed.filter(explain_bad(raw, parsed, name, bad, len(_COLUMNS), ended=block.endswith(b"\n")))


def _hexadecimal(column: str) -> pl.Expr:
    """Parse up to eight hexadecimal digits; anything else (a sign, a word) is null."""
    import polars as pl

    digits = pl.col(column)
    return pl.when(digits.str.contains("^[0-9a-fA-F]{1,8}$")).then(digits.str.to_integer(base=16, strict=False))


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield pieces of a file that end at line ends, except perhaps the last."""
    with open_unpacked(path) as file:
        while piece := file.read(_BLOCK):
            yield piece + file.readline()
