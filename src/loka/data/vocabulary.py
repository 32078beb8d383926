"""Vocabularies map the values of a column to ids 1..n. They are fitted on training data only; other values are id 0.

Values are ordered by decreasing count, ties by value, so the most frequent value has id 1 and the same data always
gives the same ids. A minimum count keeps rare values, which cannot be learned, out of the embedding tables.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loka.data.rows import Array

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Vocabulary:
    """Known values of a column; the id of values[i] is i + 1."""

    values: Array

    @classmethod
    def fit(cls, column: pl.Series, *, min_count: int = 1) -> Vocabulary:
        """Collect the non-missing values that occur at least `min_count` times."""
        import polars as pl

        name = column.name or "value"
        counts = column.rename(name).drop_nulls().value_counts(name="__count").filter(pl.col("__count") >= min_count)
        return cls(counts.sort(["__count", name], descending=[True, False])[name].to_numpy())

    @property
    def cardinality(self) -> int:
        """Number of ids, including 0 for unknown values."""
        return len(self.values) + 1

    def encode(self, column: pl.Series) -> Array:
        """Return int32 ids; missing and unseen values are 0."""
        import polars as pl

        known = pl.DataFrame({"value": pl.Series(self.values, dtype=column.dtype)}).with_row_index("id", offset=1)
        joined = column.rename("value").to_frame().join(known, on="value", how="left", maintain_order="left")
        return joined["id"].fill_null(0).cast(pl.Int32).to_numpy()

    def to_json(self) -> bytes:
        """Return the values as a JSON list, for the cache."""
        return json.dumps(
            [v.item() if isinstance(v, np.generic) else v for v in self.values], ensure_ascii=False
        ).encode()
