"""data: real recommendation data sets with leak-free splits, a columnar cache and deterministic streams.

    data = loka.data.load("complete-journey")
    for batch in data.train.batches(1024, shuffle=True, seed=0):
        ...

There is one module per data set (completejourney, movielens, census, criteo, amazon, synthetic). `catalog` lists them
and `loader` opens them; `cache` and `columns` are the disk format; `stream` defines the order; `history` computes
features of the past; `faults` defines errors. Preprocessing needs polars (extra "data"), reading a cache does not.
"""

from loka.data.batch import Batch, Jagged
from loka.data.catalog import CATALOG
from loka.data.faults import DataError
from loka.data.loader import load, load_sequences
from loka.data.ranking import RankingData
from loka.data.schema import Field, Schema, SequenceField
from loka.data.sequences import SequenceData

__all__ = [
    "CATALOG", "Batch", "DataError", "Field", "Jagged", "RankingData", "Schema", "SequenceData", "SequenceField",
    "load", "load_sequences",
]  # fmt: skip
