"""Open a data set.

`load` and `load_sequences` open the cache if there is one. Otherwise they build it from the raw files: those in
`source`, those that `loka data get` has downloaded to the root, or those inside an installed package. They never
download, because a function that trains a model should not access the network. Only `fetch_raw` downloads.

The root is `root=`, else $LOKA_DATA, else $XDG_CACHE_HOME/loka, else ~/.cache/loka. It contains raw/<name>/ for raw
files, and <name>/ranking-<options>/ and <name>/sequences-<options>/ for caches, one folder per choice of options.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loka.data.cache import BUILDING, CacheWriter, Manifest, describe_source, open_cache
from loka.data.cached import open_ranking
from loka.data.catalog import Entry, data_root, find_entry
from loka.data.faults import MAX_BAD, BadRows, DataError
from loka.data.progress import Progress, silent
from loka.data.ranking import RankingData
from loka.records.options import check_options

if TYPE_CHECKING:
    from loka.data.sequences import SequenceData


def load(
    name: str,
    *,
    root: str | Path | None = None,
    source: str | Path | None = None,
    rebuild: bool = False,
    verify: bool = True,
    max_bad: float = MAX_BAD,
    progress: Progress = silent,
    **options: Any,
) -> RankingData:
    """Open a ranking data set, building its cache on first use.

    Args:
        name: a name that `loka data` lists.
        root: folder of raw data and caches; None is the default.
        source: folder or file with the raw data.
        rebuild: replace an existing cache.
        verify: check the checksum of every column, about a second per gigabyte.
        max_bad: largest accepted share of bad raw rows.
        progress: called with (stage, done, total).
        options: options of the data set, see `Options` in its module.

    Returns:
        A schema and three splits.

    Raises:
        ValueError: the data set is unknown, or a file is missing or damaged.

    Example:
        >>> data = load("complete-journey")
        >>> batch = next(data.train.batches(1024, shuffle=True, seed=0))
    """
    build = _Build.of(name, "ranking", options)
    if build.entry.generated and not build.chosen.cached:
        if source is not None:
            raise ValueError(f"{name} is generated; it takes no source")
        return build.module.open_synthetic(build.chosen)  # type: ignore[no-any-return]
    return open_ranking(*_open_or_build(build, root, source, rebuild, verify, max_bad, progress))


def load_sequences(
    name: str,
    *,
    root: str | Path | None = None,
    source: str | Path | None = None,
    rebuild: bool = False,
    verify: bool = True,
    max_bad: float = MAX_BAD,
    progress: Progress = silent,
    **options: Any,
) -> SequenceData:
    """Open a sequence data set, building its cache on first use.

    Args:
        name: a name that `loka data` lists.
        root: as for `load`, like all that follow.
        source: raw data.
        rebuild: replace the cache.
        verify: check checksums.
        max_bad: accepted share of bad rows.
        progress: called with (stage, done, total).
        options: see `SequenceOptions` in the data set's module.

    Returns:
        The users' histories in three splits.

    Example:
        >>> data = load_sequences("ml-1m")
    """
    from loka.data.sequences import open_sequences

    build = _Build.of(name, "sequences", options)
    return open_sequences(*_open_or_build(build, root, source, rebuild, verify, max_bad, progress))


def is_cached(name: str, kind: str, *, root: str | Path | None = None, **options: Any) -> bool:
    """Return True if there is a cache for these options. It may still be damaged, which `load` detects."""
    return cache_folder(data_root(root), name, kind, _Build.of(name, kind, options).options).exists()


def cache_folder(root: Path, name: str, kind: str, options: Mapping[str, Any]) -> Path:
    """Return the folder of the cache for these options."""
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:12]
    return root / name / f"{kind}-{digest}"


@dataclass(frozen=True)
class _Build:
    entry: Entry
    kind: str
    module: Any  # of the data set
    chosen: Any  # its options

    @classmethod
    def of(cls, name: str, kind: str, given: dict[str, Any]) -> _Build:
        entry = find_entry(name, kind)
        module = import_module(entry.module)
        options = module.Options if kind == "ranking" else module.SequenceOptions
        known = {f.name: f.default for f in fields(options)}
        if unknown := sorted(given.keys() - known.keys()):
            raise ValueError(f"{name} has no option {unknown}; it has {known}")
        check_options(options, given, name)
        return cls(entry, kind, module, options(**given))

    @property
    def options(self) -> dict[str, Any]:
        return asdict(self.chosen)

    def find_files(self, root: Path, source: str | Path | None) -> dict[str, Path]:
        if self.entry.generated:
            if source is not None:
                raise ValueError(f"{self.entry.name} is generated; it takes no source")
            return {}
        if source is not None:
            path = Path(source).expanduser()
            if not path.exists():
                raise DataError(f"{self.entry.name}: source {path} does not exist")
            return self.module.find_files(path)  # type: ignore[no-any-return]
        if self.entry.embedded:
            return self.module.find_files(None)  # type: ignore[no-any-return]
        raw = root / "raw" / self.entry.name
        if not raw.is_dir() or all(path.suffix == ".part" for path in raw.iterdir()):
            way = f"loka data get {self.entry.name}" + ("" if self.entry.remotes else " --source FOLDER")
            raise DataError(
                f"{self.entry.name}: no cache and no raw files under {root}. Run `{way}`, or pass source=FOLDER. "
                f"The publisher: {self.entry.publisher} (terms: {self.entry.terms})"
            )
        return self.module.find_files(raw)  # type: ignore[no-any-return]


def _open_or_build(
    build: _Build,
    root: str | Path | None,
    source: str | Path | None,
    rebuild: bool,
    verify: bool,
    max_bad: float,
    progress: Progress,
) -> tuple[Path, Manifest]:
    base = data_root(root)
    folder = cache_folder(base, build.entry.name, build.kind, build.options)
    bad = BadRows(limit=max_bad)
    if rebuild or not folder.exists():
        files = build.find_files(base, source)
        _run_build(build, folder, files, bad, progress, rebuild=rebuild)
    elif source is not None:
        manifest = open_cache(folder, verify=verify)
        if describe_source(build.find_files(base, source)) != manifest.source:
            raise DataError(
                f"{build.entry.name}: the cache {folder} was built from other files than those in {source}; pass "
                "rebuild=True to replace it, or another root= to keep both"
            )
    manifest = open_cache(folder, verify=verify)
    bad.total, bad.bad = manifest.total_rows, manifest.bad_rows
    if bad.bad > bad.limit * bad.total:
        raise DataError(
            f"{folder}: this cache was built with {bad.bad} bad rows of {bad.total}, more than max_bad={max_bad}; first: "
            f"{manifest.bad_examples[0] if manifest.bad_examples else 'none kept'}"
        )
    return folder, manifest


def _run_build(
    build: _Build, folder: Path, files: dict[str, Path], bad: BadRows, progress: Progress, *, rebuild: bool
) -> None:
    if not build.entry.generated:
        try:
            from polars.exceptions import PanicException, PolarsError
        except ImportError:
            raise DataError("preprocessing raw data needs polars; pip install 'loka[data]'") from None
        failures: tuple[type[BaseException], ...] = (PolarsError, PanicException)
    else:
        failures = ()
    described = describe_source(files)
    writer = CacheWriter(
        folder, name=build.entry.name, kind=build.kind, options=build.options, source=described, replace=rebuild
    )
    writer.bad = bad
    try:
        with writer:
            run = build.module.build if build.kind == "ranking" else build.module.build_sequences
            run(files, build.chosen, writer, progress)
    except failures as error:  # what polars cannot read is a fault of the raw files
        names = [str(path) for path in files.values()]
        raise DataError(f"{build.entry.name}: the raw files {names} cannot be processed: {error}") from error


def fetch_raw(name: str, *, root: str | Path | None = None, progress: Progress = silent) -> Path:
    """Download the raw files of a data set from its publisher and return their folder."""
    from loka.data.download import download

    entry = find_entry(name)
    if not entry.remotes:
        raise DataError(
            f"{name}: the publisher offers no direct download ({entry.publisher}); get the files there and pass their folder "
            "with --source FOLDER (in Python: source=FOLDER)"
        )
    folder = data_root(root) / "raw" / name
    for remote in entry.remotes:
        download(remote.url, folder / remote.filename, sha256=remote.sha256, size=remote.bytes, progress=progress)
    return folder


def list_caches(name: str, *, root: str | Path | None = None, verify: bool = False) -> dict[Path, Manifest | DataError]:
    """Return every cache folder of a data set with its manifest, or with the error if it is damaged."""
    folder = data_root(root) / find_entry(name).name
    found: dict[Path, Manifest | DataError] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if BUILDING in path.name:
            found[path] = DataError(
                f"{path}: an unfinished build, of a process that still runs or was killed; then delete it"
            )
            continue
        try:
            found[path] = open_cache(path, verify=verify)
        except DataError as error:
            found[path] = error
    return found
