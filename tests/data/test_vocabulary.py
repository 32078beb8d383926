import json

import polars as pl

from loka.data.vocabulary import Vocabulary


def test_ids_follow_frequency_then_value() -> None:
    vocabulary = Vocabulary.fit(pl.Series(["b", "a", "c", "b", None, "c", "d"]), min_count=1)
    assert vocabulary.values.tolist() == ["b", "c", "a", "d"]
    assert vocabulary.cardinality == 5
    assert vocabulary.encode(pl.Series(["a", "zzz", None, "b"])).tolist() == [3, 0, 0, 1]
    assert json.loads(vocabulary.to_json()) == ["b", "c", "a", "d"]


def test_rare_values_have_no_id() -> None:
    vocabulary = Vocabulary.fit(pl.Series([5, 5, 5, 9, 9, 1]), min_count=2)
    assert vocabulary.encode(pl.Series([1, 5, 9, 7])).tolist() == [0, 1, 2, 0]
    assert json.loads(vocabulary.to_json()) == [5, 9]


def test_nothing_known() -> None:
    vocabulary = Vocabulary.fit(pl.Series([None, None], dtype=pl.String))
    assert vocabulary.cardinality == 1
    assert vocabulary.encode(pl.Series(["a"])).tolist() == [0]
