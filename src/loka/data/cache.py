"""The columnar cache: raw files are preprocessed once, training reads plain columns.

Layout of one cache folder (everything in it is listed in the manifest with size and checksum):

    manifest.json                       schema, counts, options, source checksums, bad rows, version
    train/dense.<name>.npy              one file per column and split
    train/categorical.<name>.npy
    train/sequence.<name>.start.npy     windows into ...
    train/sequence.<name>.length.npy
    values/<name>.npy                   ... the shared values of a sequence
    assets/<name>                       small files carried along (vocabularies, item texts)

A build writes to a temporary folder next to the target and renames it at the end, so a folder without `.building-` in
its name is complete. Two processes may build the same cache at once: the first to finish wins, the other drops its
copy. If a cache is damaged nevertheless, an error names it; it is replaced only if the caller asks for a rebuild.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from loka.data.columns import Column, ColumnWriter, check_column
from loka.data.download import sha256_of
from loka.data.faults import BadRows, DataError
from loka.data.rows import Array
from loka.data.schema import Schema

VERSION = 1
"""Raised whenever the layout or the meaning of a cached file changes; other versions are refused"""
BUILDING = ".building-"
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SourceFile:
    """A raw file the cache was built from."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of manifest.json."""

    version: int
    name: str
    kind: str  # 'ranking' or 'sequences'
    options: dict[str, Any]
    source: tuple[SourceFile, ...]
    rows: dict[str, int]  # rows per split
    schema: Schema | None
    columns: dict[str, Column]
    assets: dict[str, Column]  # small files: dtype 'bytes', rows = size
    total_rows: int
    bad_rows: int
    bad_examples: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)  # facts from the builder: time bounds, vocabulary sizes


class CacheWriter:
    """Writes a cache folder: a context manager that commits on success and leaves nothing behind on failure."""

    def __init__(
        self,
        target: Path,
        *,
        name: str,
        kind: str,
        options: Mapping[str, Any],
        source: tuple[SourceFile, ...] = (),
        replace: bool = False,
    ) -> None:
        self._target = target
        self._replace = replace
        self._name = name
        self._kind = kind
        self._options = dict(options)
        self._source = source
        self._writers: dict[str, ColumnWriter] = {}
        self._assets: dict[str, Column] = {}
        self._rows: dict[str, int] = {}
        self.schema: Schema | None = None
        self.bad = BadRows()
        self.facts: dict[str, Any] = {}
        target.parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{target.name}{BUILDING}", dir=target.parent))

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._commit()
        except BaseException:
            self._discard()
            raise

    def append(self, path: str, values: Array, dtype: npt.DTypeLike) -> None:
        """Append rows to the column file `path` (without suffix), creating it on first use."""
        if path not in self._writers:
            self._writers[path] = ColumnWriter(self.folder, f"{path}.npy", dtype)
        self._writers[path].append(values)

    def append_rows(
        self,
        split: str,
        *,
        dense: Mapping[str, Array],
        categorical: Mapping[str, Array],
        labels: Mapping[str, Array],
        group: Array,
        sequences: Mapping[str, tuple[Array, Array]] | None = None,
    ) -> None:
        """Append examples of a ranking split; sequences are (start, length) windows into values/<name>."""
        columns: dict[str, tuple[Array, npt.DTypeLike]] = {"group": (group, np.int64)}
        columns |= {f"dense.{name}": (values, np.float32) for name, values in dense.items()}
        columns |= {f"categorical.{name}": (values, np.int32) for name, values in categorical.items()}
        columns |= {f"label.{name}": (values, np.float32) for name, values in labels.items()}
        for name, (start, length) in (sequences or {}).items():
            columns[f"sequence.{name}.start"] = (start, np.int64)
            columns[f"sequence.{name}.length"] = (length, np.int32)
        for name, (values, dtype) in columns.items():
            if len(values) != len(group):
                raise ValueError(f"{split}/{name}: {len(values)} rows, but group has {len(group)}")
            self.append(f"{split}/{name}", values, dtype)
        self._rows[split] = self._rows.get(split, 0) + len(group)

    def add_asset(self, name: str, content: bytes) -> None:
        """Store a small file next to the columns."""
        path = self.folder / "assets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self._assets[name] = Column(f"assets/{name}", "bytes", len(content), zlib.crc32(content))

    def _commit(self) -> None:
        columns = {path: writer.close() for path, writer in self._writers.items()}
        manifest = Manifest(
            version=VERSION,
            name=self._name,
            kind=self._kind,
            options=self._options,
            source=self._source,
            rows=self._rows,
            schema=self.schema,
            columns=columns,
            assets=self._assets,
            total_rows=self.bad.total,
            bad_rows=self.bad.bad,
            bad_examples=tuple(str(example) for example in self.bad.examples),
            facts=self.facts,
        )
        body = asdict(manifest)
        text = json.dumps({"sha256": _digest(body), **body}, indent=1, ensure_ascii=False)
        (self.folder / _MANIFEST).write_text(text + "\n", encoding="utf-8")
        self.folder.chmod(0o755)
        _move_into_place(self.folder, self._target, replace=self._replace)

    def _discard(self) -> None:
        for writer in self._writers.values():
            writer.abandon()
        shutil.rmtree(self.folder, ignore_errors=True)


def _move_into_place(new: Path, target: Path, *, replace: bool) -> None:
    """Rename a finished folder to its target; with `replace`, an older one is moved aside first and deleted last."""
    old: Path | None = None
    if replace and target.exists():
        old = Path(tempfile.mkdtemp(prefix=f"{target.name}{BUILDING}", dir=target.parent))
        target.rename(old / "old")
    try:
        new.rename(target)
    except OSError:
        if not (target / _MANIFEST).is_file():
            raise
        # another process built the same cache in the meantime; it is identical, and may be in use already
        shutil.rmtree(new)
    if old is not None:
        shutil.rmtree(old)


def open_cache(folder: Path, *, verify: bool) -> Manifest:
    """Read and check the manifest; with `verify`, also the checksum of every file. Raises DataError on damage."""
    path = folder / _MANIFEST
    hint = "rebuild it with rebuild=True (on the command line: loka data get NAME --rebuild)"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{folder}: not a complete cache, {_MANIFEST} is missing; {hint}") from None
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: not readable as JSON ({error}); {hint}") from None
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        raise DataError(f"{path}: cache version {version!r}, this release reads {VERSION}; {hint}")
    stated = document.pop("sha256", None)
    if stated != _digest(document):
        raise DataError(f"damaged cache: {path} was changed after it was written (its own checksum differs); {hint}")
    try:
        manifest = msgspec.convert(document, Manifest, strict=True)
        for column in (*manifest.columns.values(), *manifest.assets.values()):
            if column.dtype == "bytes":
                _check_asset(folder, column, payload=verify)
            else:
                check_column(folder, column, payload=verify)
    except (ValueError, TypeError) as error:  # msgspec's ValidationError, a bad dtype and DataError are ValueErrors
        raise DataError(f"damaged cache: {error} (manifest: {path}); {hint}") from None
    return manifest


def describe_source(files: Mapping[str, Path]) -> tuple[SourceFile, ...]:
    """Checksum the raw files, in the order of their names."""
    return tuple(SourceFile(name, path.stat().st_size, sha256_of(path)) for name, path in sorted(files.items()))


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _check_asset(folder: Path, asset: Column, *, payload: bool) -> None:
    path = folder / asset.path
    if not path.is_file() or path.stat().st_size != asset.rows:
        raise DataError(f"{path}: missing or not {asset.rows} bytes long")
    if payload and zlib.crc32(path.read_bytes()) != asset.crc32:
        raise DataError(f"{path}: the content changed after it was written")
