"""Turn purchase lines into ranking examples: candidates, and what was known about them when the basket began.

The task, the pools of negatives and the split are described in loka.data.completejourney. This file implements them
with numpy on purchase lines sorted by time. All features of the past come from loka.data.history, which never counts an
event at time t itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from loka.data.history import Past
from loka.data.rows import Array, find_sorted
from loka.data.schema import Field, Schema, SequenceField
from loka.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    import polars as pl

SIZES: dict[str, dict[str, int | None]] = {
    "small": {"train": 80_000, "valid": 12_000, "test": 30_000},
    "medium": {"train": 320_000, "valid": 40_000, "test": None},
    "full": {"train": None, "valid": None, "test": None},
}
"""Positives sampled per split; None: all"""

FIRST_WEEK = {"train": 9, "valid": 45, "test": 49}
_RETRIES = 4
_DAY = 86_400
PRODUCT_FIELDS = ("department", "product_category", "product_type", "manufacturer_id", "brand", "package_size")
HOUSEHOLD_FIELDS = (
    "age",
    "income",
    "home_ownership",
    "marital_status",
    "household_size",
    "household_comp",
    "kids_count",
)
_DENSE = (
    "household_baskets", "household_lines", "household_idle_days", "product_lines", "product_idle_days", "pair_lines",
    "pair_idle_days", "category_lines", "category_idle_days", "pair_share",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of the ranking cache; each choice has its own cache."""

    size: str = "small"
    negatives: int = 3
    max_history: int = 50
    min_count: int = 10  # purchase lines in the training period that a product needs to get an id of its own
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
    time: Array  # seconds since 1970, of the basket
    households: pl.DataFrame
    products: pl.DataFrame

    @cached_property
    def past(self) -> dict[str, Past]:
        """The lines by household, by product, and all together, for the sampler and the features."""
        return {
            "household": Past(self.household, self.time),
            "product": Past(self.product, self.time),
            "all": Past(np.zeros_like(self.time), self.time),
        }

    @cached_property
    def debut(self) -> Array:
        """Index of the first line of every product, which is also the earliest, as lines are sorted by time."""
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
    """Examples without features: the purchase line they belong to, the candidate product, and the label."""

    line: Array
    product: Array
    label: Array


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
    """Draw one product per line uniformly from its range of the pool, avoiding products of the line's basket."""
    first, last = ranges
    product = np.full(len(line), -1, np.int64)
    open_ = np.flatnonzero(last > first)
    for _ in range(_RETRIES):
        pick = first[open_] + (rng.random(len(open_)) * (last - first)[open_]).astype(np.int64)
        drawn = pool[pick]
        code = events.basket[line[open_]] * len(events.products) + drawn
        _, hit = find_sorted(events.bought, code)
        product[open_[~hit]] = drawn[~hit]
        open_ = open_[hit]
    kept = product >= 0
    return Candidates(line[kept], product[kept], np.zeros(int(kept.sum()), np.float32))


class Features:
    """Computes the features of candidates from what was known when the basket began."""

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
        for key, fields in (("product", PRODUCT_FIELDS), ("household", HOUSEHOLD_FIELDS)):
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


def _dense_ids(codes: Array) -> tuple[Array, Array]:
    keys, ids = np.unique(codes, return_inverse=True)
    return keys, ids


def _find(keys: Array, codes: Array) -> Array:
    """Return the position of each code in sorted keys; codes that never occur get a key without events."""
    index, found = find_sorted(keys, codes)
    return np.where(found, index, len(keys))
