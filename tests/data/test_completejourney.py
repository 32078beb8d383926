from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks.scripts import script
from loka.data import DataError, load, load_sequences
from loka.data.baskets import Candidates, Events, Features, Options, sample_candidates
from loka.data.completejourney import find_files, read_events
from loka.data.faults import BadRows

from . import raw

fit_baseline = script("logistic_baseline").fit_baseline

OPTIONS = Options(min_count=1, max_history=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raw.write_journey(tmp_path_factory.mktemp("journey") / "raw")


@pytest.fixture(scope="module")
def events(folder: Path) -> Events:
    return read_events(find_files(folder), BadRows())


def test_splits_follow_time(events: Events) -> None:
    starts = events.starts()
    edges = [*starts.values(), int(events.time.max()) + 1]
    for index, split in enumerate(("train", "valid", "test")):
        times = events.time[sample_candidates(events, split, OPTIONS).line]
        assert edges[index] <= times.min()
        assert times.max() < edges[index + 1]


def test_labels_and_negatives_are_what_they_claim(events: Events) -> None:
    part = sample_candidates(events, "train", OPTIONS)
    bought = {(b, p) for b, p in zip(events.basket.tolist(), events.product.tolist(), strict=True)}
    debut = {p: int(events.time[events.product == p].min()) for p in set(events.product.tolist())}
    for line, product, label in zip(part.line, part.product, part.label, strict=True):
        assert ((int(events.basket[line]), int(product)) in bought) == bool(label)
        assert debut[int(product)] < events.time[line], "a candidate was sold before"
    assert 0.2 < part.label.mean() < 0.35


def test_sampling_is_deterministic(events: Events) -> None:
    one, two = (sample_candidates(events, "valid", OPTIONS) for _ in range(2))
    assert np.array_equal(one.product, two.product)
    other = sample_candidates(events, "valid", replace(OPTIONS, seed=1))
    assert len(other.product) != len(one.product) or not np.array_equal(other.product, one.product)


def test_features_are_of_the_past_only(events: Events) -> None:
    """Recompute counts, idle times and histories from the lines, slowly."""
    features = Features(events, OPTIONS)
    sampled = sample_candidates(events, "valid", OPTIONS)
    part = Candidates(sampled.line[::5], sampled.product[::5], sampled.label[::5])
    columns = features.compute(part)
    dense = columns["dense"]
    start, length = columns["sequences"]["history"]
    product_ids = {v: i + 1 for i, v in enumerate(features.vocabularies["product"].values.tolist())}
    for i, (line, product) in enumerate(zip(part.line, part.product, strict=True)):
        time, household = events.time[line], events.household[line]
        before = events.time < time
        mine = before & (events.household == household)
        pair = mine & (events.product == product)
        assert dense["pair_lines"][i] == pytest.approx(np.log1p(pair.sum()))
        assert dense["product_lines"][i] == pytest.approx(np.log1p((before & (events.product == product)).sum()))
        assert dense["household_baskets"][i] == pytest.approx(np.log1p(len(set(events.basket[mine]))))
        idle = (time - events.time[pair].max()) / 86_400 if pair.any() else 366
        assert dense["pair_idle_days"][i] == pytest.approx(np.log1p(idle))
        history = features.history_values[start[i] : start[i] + length[i]].tolist()
        assert history == [product_ids.get(p, 0) for p in events.product[mine].tolist()[-8:]]


def test_the_future_changes_nothing(events: Events) -> None:
    sampled = sample_candidates(events, "valid", OPTIONS)
    cut = events.starts()["test"]
    past = events.time < cut
    names = ("household", "product", "category", "basket", "store", "time")
    truncated = replace(events, **{name: getattr(events, name)[past] for name in names})
    full, short = (Features(e, OPTIONS).compute(sampled) for e in (events, truncated))
    for kind in ("dense", "categorical"):
        for name, values in full[kind].items():
            assert np.array_equal(values, short[kind][name]), name
    assert np.array_equal(full["sequences"]["history"][1], short["sequences"]["history"][1])


def test_vocabularies_know_only_the_training_weeks(events: Events) -> None:
    known = Features(events, OPTIONS).vocabularies["product"].values
    assert set(known) == set(events.product[events.time < events.starts()["valid"]])


def test_damaged_tables_are_named(folder: Path, tmp_path: Path) -> None:
    broken = raw.write_journey(tmp_path / "raw")
    path = broken / "transactions.parquet"
    pl.read_parquet(path).drop("basket_id").write_parquet(path)
    with pytest.raises(DataError, match=r"transactions\.parquet: columns \['basket_id'\] are missing"):
        load("complete-journey", root=tmp_path, source=broken)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"transactions\.parquet: not readable as Parquet"):
        load("complete-journey", root=tmp_path, source=broken)
    path.unlink()
    with pytest.raises(DataError, match=r"lacks \['transactions\.parquet'\]"):
        load("complete-journey", root=tmp_path, source=broken)
    good = pl.read_parquet(folder / "transactions.parquet")
    missing = pl.when(pl.int_range(pl.len()) == 7).then(None).otherwise(pl.col("product_id")).alias("product_id")
    good.with_columns(missing).write_parquet(path)
    with pytest.raises(DataError, match=r"transactions\.parquet:8: no product_id"):
        load("complete-journey", root=tmp_path, source=broken, max_bad=0.0)


def test_sequences_hold_out_the_next_basket(folder: Path, tmp_path: Path, events: Events) -> None:
    data = load_sequences("complete-journey", root=tmp_path, source=folder, min_count=1)
    assert data.times is not None
    assert data.baskets is not None
    cut = data.split_times
    assert cut is not None
    for split, moment in ((data.valid, cut[0]), (data.test, cut[1])):
        assert len(split) > 5
        batch = next(split.batches(len(split), shuffle=False, seed=0, max_length=10_000))
        assert batch.times is not None
        for row, user in enumerate(batch.users.tolist()):
            first, last = data.items.offsets[user : user + 2].tolist()
            times, baskets = data.times[first:last], data.baskets[first:last]
            items = data.items.values[first:last]
            begin = int((times < moment).sum())
            assert batch.history.row(row).tolist() == items[:begin].tolist()
            assert batch.targets.row(row).tolist() == items[baskets == baskets[begin]].tolist()
            assert batch.times.row(row).max() < moment <= times[begin]
    train = next(data.train.batches(len(data.train), shuffle=False, seed=0, max_length=10_000))
    assert train.times is not None
    assert train.times.values.max() < cut[0]
    assert train.targets.values.numel() == 0


@pytest.mark.slow
def test_the_real_data_carries_signal_that_is_not_trivial(tmp_path: Path) -> None:
    data = load("complete-journey", root=tmp_path)
    assert (len(data.train), len(data.valid), len(data.test)) == (319_699, 47_985, 119_981)
    assert data.info["bad_rows"] == 0
    result = fit_baseline(data, max_examples=60_000, max_iterations=60, C=0.02)
    assert 0.65 < result.auc < 0.80
    assert result.log_loss < result.entropy
