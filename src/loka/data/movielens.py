"""MovieLens 1M: a million ratings of 3,706 movies by 6,040 users, 2000-2003 (GroupLens; research, no redistribution).

**Task.** Will this user like this movie? label `liked` = rating >= 4. Every rating is an example; there are no sampled
negatives, so the question is about taste, not about which movies a user gets to see.

**Split by time, globally.** The last 10 % of the ratings are test, the last 10 % of the rest validation. Each cut falls
on a timestamp: ratings of the same second stay on one side, so no test rating is older than a training rating.

**Features.** User, movie, demographics, release decade, weekday and hour; genres as a bag; the movies the user liked
before, oldest first, as `history`; counts, shares of likes and idle times of user and movie. All of the past means
strictly earlier seconds: MovieLens users rate dozens of movies within one second, and none of those sees another.
Shares of likes are smoothed with five imaginary ratings at one half, a constant, so they carry nothing from the future
either.

**Baseline** (benchmarks/logistic_baseline.py, test split): one-hot logistic regression reaches AUC 0.776, without the
dense features 0.757.

The official archive has three files with `::` between the parts, in Latin-1. They are read from ml-1m.zip or unpacked.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loka.data.cache import CacheWriter
from loka.data.faults import BadRows, DataError
from loka.data.history import Past
from loka.data.progress import Progress
from loka.data.rows import Array, find_sorted
from loka.data.schema import Field, Schema, SequenceField
from loka.data.sequences import write_sequences
from loka.data.tables import explain_bad, split_lines
from loka.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    import polars as pl

_DAY = 86_400
_LIKED = 4
_EPOCH = 788_918_400
"""1995 began then; MovieLens did not exist earlier, so an older time is a damaged one"""
_PARTS = ("ratings", "users", "movies")
_MAX_GENRES = 8
_USER_FIELDS = ("gender", "age", "occupation", "zip")
_DENSE = ("user_ratings", "user_like_share", "user_idle_days", "movie_ratings", "movie_like_share", "movie_idle_days")


@dataclass(frozen=True)
class Options:
    """Options of the ranking cache; each choice has its own cache."""

    max_history: int = 50

    def __post_init__(self) -> None:
        if self.max_history < 1:
            raise ValueError(f"max_history must be at least 1, got {self.max_history}")


@dataclass(frozen=True)
class SequenceOptions:
    """Options of the sequence cache; each choice has its own cache."""

    min_rating: int = 1  # keep ratings of at least this; 1 keeps all, as is usual

    def __post_init__(self) -> None:
        if not 1 <= self.min_rating <= 5:
            raise ValueError(f"min_rating must lie in [1, 5], got {self.min_rating}")


def find_files(source: Path | None) -> dict[str, Path]:
    """Locate ml-1m.zip, or the three .dat files, in a folder or in its subfolder ml-1m."""
    if source is None:
        raise DataError("ml-1m: needs a source folder")
    if source.is_file():
        return {"archive": source}
    for folder in (source, source / "ml-1m"):
        files = {name: folder / f"{name}.dat" for name in _PARTS}
        if all(path.is_file() for path in files.values()):
            return files
    if (source / "ml-1m.zip").is_file():
        return {"archive": source / "ml-1m.zip"}
    raise DataError(f"ml-1m: {source} holds neither ml-1m.zip nor ratings.dat, users.dat and movies.dat")


def build(files: dict[str, Path], options: Options, writer: CacheWriter, progress: Progress) -> None:
    """Preprocess the ratings into ranking examples."""
    import polars as pl

    progress("reading ratings", 0, 3)
    tables = read_tables(files, writer.bad)
    progress("computing features", 1, 3)
    ratings = tables["ratings"].sort("time", "user", "movie")
    time = ratings["time"].to_numpy()
    cuts = _cut_by_time(time)
    in_train = pl.Series(time < cuts["valid"])
    columns = ratings.join(tables["users"], on="user", how="left", maintain_order="left")
    columns = columns.join(tables["movies"], on="movie", how="left", maintain_order="left")
    columns = columns.with_columns(pl.lit(time // _DAY % 7).alias("weekday"), pl.lit(time % _DAY // 3600).alias("hour"))
    names = ("user", "movie", *_USER_FIELDS, "decade", "weekday", "hour")
    vocabularies = {name: Vocabulary.fit(columns[name].filter(in_train)) for name in names}
    ids = {name: vocabulary.encode(columns[name]) for name, vocabulary in vocabularies.items()}
    dense, history, liked_movies = _past_features(ratings, ids["movie"], options.max_history)
    genres, genre_windows, genre_count = _genre_bags(tables["movies"], columns, in_train)
    writer.append("values/history", liked_movies, np.int32)
    writer.append("values/genres", genres, np.int32)
    writer.schema = Schema(
        dense=_DENSE,
        categorical=tuple(Field(name, vocabulary.cardinality) for name, vocabulary in vocabularies.items()),
        sequences=(
            SequenceField("history", vocabularies["movie"].cardinality, options.max_history, shares="movie"),
            SequenceField("genres", genre_count, _MAX_GENRES),
        ),
        labels=("liked",),
    )
    progress("writing", 2, 3)
    liked = (ratings["rating"].to_numpy() >= _LIKED).astype(np.float32)
    sequences = {"history": history, "genres": genre_windows}
    user = ratings["user"].to_numpy()
    edges = [0, *(int(np.searchsorted(time, cuts[s])) for s in ("valid", "test")), len(time)]
    for split, low, high in zip(("train", "valid", "test"), edges[:-1], edges[1:], strict=True):
        part = slice(low, high)
        writer.append_rows(
            split,
            dense={name: values[part] for name, values in dense.items()},
            categorical={name: values[part] for name, values in ids.items()},
            labels={"liked": liked[part]},
            group=user[part],
            sequences={name: (start[part], length[part]) for name, (start, length) in sequences.items()},
        )
    for name, vocabulary in vocabularies.items():
        writer.add_asset(f"vocabulary.{name}.json", vocabulary.to_json())
    writer.facts |= {"split_starts": {"train": int(time[0]), **cuts}}
    progress("done", 3, 3)


def build_sequences(files: dict[str, Path], options: SequenceOptions, writer: CacheWriter, progress: Progress) -> None:
    """Write each user's ratings in order of time, ties in the order of the file."""
    import polars as pl

    progress("reading ratings", 0, 2)
    tables = read_tables(files, writer.bad)
    ratings = tables["ratings"].filter(pl.col("rating") >= options.min_rating)
    ratings = ratings.sort("user", "time", maintain_order=True)
    progress("writing", 1, 2)
    movies = ratings.select("movie").unique().sort("movie").with_row_index("item", offset=1)
    movies = movies.join(tables["movies"], on="movie", how="left", maintain_order="left")
    ordered = ratings.join(movies.select("movie", "item"), on="movie", how="left", maintain_order="left")
    titles = movies["title"].fill_null("").to_list()
    write_sequences(
        writer,
        users=ratings["user"].rank("dense").to_numpy().astype(np.int64) - 1,
        items=ordered["item"].to_numpy().astype(np.int64),
        times=ratings["time"].to_numpy(),
        item_keys=[str(movie) for movie in movies["movie"]],
        titles=titles,
        texts=[f"{t} ({', '.join(g or [])})" for t, g in zip(titles, movies["genres"].to_list(), strict=True)],
    )
    progress("done", 2, 2)


def read_tables(files: dict[str, Path], bad: BadRows) -> dict[str, pl.DataFrame]:
    """Parse the three files; ratings keep the order of the file."""
    import polars as pl

    def parse(name: str, columns: tuple[str, ...], *typed: pl.Expr, encoding: str = "utf-8") -> pl.DataFrame:
        text = _read(files, name)
        raw = split_lines(text, "::", columns, encoding=encoding)
        parsed = raw.select(typed)
        good = explain_bad(raw, parsed, f"{name}.dat", bad, len(columns), ended=text.endswith(b"\n"))
        bad.check(f"ml-1m {name}.dat")
        return parsed.filter(good)

    def whole(name: str, low: int, high: int = (1 << 31) - 1) -> pl.Expr:
        value = pl.col(name).cast(pl.Int64, strict=False)
        return pl.when(value.is_between(low, high)).then(value).alias(name)

    ids = {name: pl.col(name).cast(pl.Int64, strict=False) for name in ("user", "movie")}
    limits = {"user": (1,), "movie": (1,), "rating": (1, 5), "time": (_EPOCH,)}
    ratings = parse("ratings", tuple(limits), *(whole(name, *limit) for name, limit in limits.items()))
    # The first three digits of a zip code are the region; whole codes are nearly one per user.
    region, plain = pl.col("zip").str.slice(0, 3), [pl.col(name) for name in _USER_FIELDS[:3]]
    users = parse("users", ("user", *_USER_FIELDS), ids["user"], *plain, region)
    genres = pl.col("genres").str.split("|")
    movies = parse("movies", ("movie", "title", "genres"), ids["movie"], pl.col("title"), genres, encoding="latin-1")
    movies = movies.with_columns(pl.col("title").str.extract(r"\((\d{3})\d\)\s*$").alias("decade"))
    unique = {"users": users.unique("user", keep="first"), "movies": movies.unique("movie", keep="first")}
    return {"ratings": ratings, **unique}


def _cut_by_time(time: Array) -> dict[str, int]:
    """Return the first second of validation and test; `time` is sorted."""
    test = int(time[int(len(time) * 0.9)])
    before = int(np.searchsorted(time, test))
    valid = int(time[int(before * 0.9)])
    if not time[0] < valid < test:
        raise DataError(f"ml-1m: {len(time)} ratings with times {time[0]}..{time[-1]} cannot be split by time")
    return {"valid": valid, "test": test}


def _past_features(
    ratings: pl.DataFrame, movie_ids: Array, max_history: int
) -> tuple[dict[str, Array], tuple[Array, Array], Array]:
    """Return the dense features, the history windows, and the values they point into."""
    time = ratings["time"].to_numpy()
    liked = (ratings["rating"].to_numpy() >= _LIKED).astype(np.float64)
    dense: dict[str, Array] = {}
    for name in ("user", "movie"):
        keys = ratings[name].to_numpy()
        past = Past(keys, time)
        past.add_sum("liked", liked)
        count = past.count(keys, time)
        dense[f"{name}_ratings"] = np.log1p(count)
        dense[f"{name}_like_share"] = (past.total("liked", keys, time) + 2.5) / (count + 5.0)
        dense[f"{name}_idle_days"] = np.log1p(past.elapsed(keys, time, never=1500 * _DAY) / _DAY)
    kept = np.flatnonzero(liked)
    user = ratings["user"].to_numpy()
    past = Past(user[kept], time[kept])
    return (
        {name: dense[name] for name in _DENSE},
        past.windows(user, time, max_length=max_history),
        movie_ids[kept][past.order],
    )


def _genre_bags(
    movies: pl.DataFrame, columns: pl.DataFrame, in_train: pl.Series
) -> tuple[Array, tuple[Array, Array], int]:
    """Return genre ids of all movies end to end, each rating's window into them, and the cardinality."""
    lists = (
        movies.select("movie", "genres")
        .sort("movie")
        .with_columns(movies.sort("movie")["genres"].list.head(_MAX_GENRES))
    )
    vocabulary = Vocabulary.fit(columns["genres"].filter(in_train).explode().rename("genre"))
    values = vocabulary.encode(lists["genres"].explode())
    length = lists["genres"].list.len().to_numpy().astype(np.int64)
    start = np.cumsum(length) - length
    row, known = find_sorted(lists["movie"].to_numpy(), columns["movie"].to_numpy())
    return values, (np.where(known, start[row], 0), np.where(known, length[row], 0)), vocabulary.cardinality


def _read(files: dict[str, Path], name: str) -> bytes:
    if "archive" not in files:
        return files[name].read_bytes()
    path = files["archive"]
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(f"ml-1m/{name}.dat")
    except KeyError:
        raise DataError(f"{path}: the archive has no ml-1m/{name}.dat; is it the MovieLens 1M archive?") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path}: not readable as a zip archive ({error}); download it again") from None
