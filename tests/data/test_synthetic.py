from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.scripts import script
from loka.data import Batch, load
from loka.data.synthetic import Options, SyntheticSource

fit_baseline = script("logistic_baseline").fit_baseline


def first(rows: int, **options: object) -> Batch:
    return next(load("synthetic", rows=rows, **options).train.batches(rows, shuffle=False, seed=0))


def test_any_range_can_be_generated_alone() -> None:
    source = SyntheticSource(Options(rows=20_000, categorical=5), "train")
    whole = source.read([(0, 20_000)])
    part = source.read([(4000, 4200), (12_288, 12_289), (3, 9000)])
    index = np.concatenate([np.arange(4000, 4200), np.arange(12_288, 12_289), np.arange(3, 9000)])
    for name in ("dense", "categorical", "labels", "group"):
        assert np.array_equal(getattr(part, name), getattr(whole, name)[index])
    one, two = whole.sequences["history"].take(index).gather(), part.sequences["history"].gather()
    assert np.array_equal(one[0], two[0])
    assert np.array_equal(one[1], two[1])


def test_a_huge_log_costs_nothing_until_it_is_read() -> None:
    data = load("synthetic", rows=10**12, categorical=3, cardinality=1000)
    assert len(data.train) == 10**12
    tail = data.train.source.read([(10**12 - 10, 10**12)])
    assert len(tail) == 10


def test_splits_differ_and_ids_fit() -> None:
    data = load("synthetic", rows=5000, categorical=6, cardinality=500)
    batches = [next(s.batches(1000, shuffle=False, seed=0)) for s in (data.train, data.valid, data.test)]
    assert not torch.equal(batches[0].categorical, batches[1].categorical)
    assert not torch.equal(batches[1].categorical, batches[2].categorical)
    sizes = torch.tensor([field.cardinality for field in data.schema.categorical])
    for batch in batches:
        assert batch.categorical.min() >= 0
        assert (batch.categorical < sizes).all()
        assert batch.sequences["history"].values.max() < data.schema.field("item").cardinality
        assert batch.sequences["history"].lengths.max() <= 20


def test_ids_follow_the_power_law() -> None:
    item = first(200_000, categorical=2, cardinality=100_000, alpha=1.2, dense=0, max_history=0).categorical[:, 1]
    counts = torch.bincount(item, minlength=100_001)[1:].float()
    ranks = torch.tensor([1.0, 10.0, 100.0])
    # Around rank r, counts per id over a band of ids: the slope in log-log is -alpha.
    bands = torch.stack([counts[int(r) - 1 : int(2 * r) - 1].mean() for r in ranks])
    slope = (bands[2].log() - bands[1].log()) / (ranks[2].log() - ranks[1].log())
    assert slope.item() == pytest.approx(-1.2, abs=0.15)
    assert 0.005 < (item == 0).float().mean() < 0.02


def test_dense_features_have_heavy_tails() -> None:
    x = first(50_000, categorical=2).dense.double()
    kurtosis = ((x - x.mean(0)) ** 4).mean(0) / x.var(0) ** 2
    assert (kurtosis > 10).all()


def test_labels_can_be_learned() -> None:
    data = load("synthetic", rows=30_000, categorical=6, cardinality=200, seed=2)
    result = fit_baseline(data)
    assert 0.60 < result.auc < 0.95
    assert result.log_loss < result.entropy
    wrong = first(30_000, categorical=6, cardinality=200, seed=3)
    assert not torch.equal(wrong.labels, first(30_000, categorical=6, cardinality=200, seed=2).labels)


def test_stress_puts_the_range_inside_groups() -> None:
    calm = first(40_960, categorical=2, dense=13, stress=False).dense
    hard = first(40_960, categorical=2, dense=13, stress=True, bias_growth=0.0).dense
    assert torch.isfinite(hard).all()
    rows = hard[:4096].abs().median(1).values.log()
    assert rows.std() > 3.5, "lognormal row scales"
    assert calm[:4096].abs().median(1).values.log().std() < 1.0
    channels = (hard[:4096].abs() / hard[:4096].abs().median(1, keepdim=True).values).median(0).values
    assert (channels > 100).sum() == 2, "outlier channels"
    hard = first(40_960, categorical=2, dense=13, stress=True).dense
    early, late = hard[:4096].median(0).values.abs(), hard[-4096:].median(0).values.abs()
    quiet = channels < 100
    assert late[quiet].median() > 20 * early[quiet].median(), "biases that diverge"


def test_the_cache_holds_the_same_log(tmp_path: Path) -> None:
    options = {"rows": 70_000, "categorical": 3, "dense": 2, "cardinality": 50}
    generated = load("synthetic", **options)
    cached = load("synthetic", cached=True, root=tmp_path, **options)
    assert cached.schema == generated.schema
    for one, two in zip(
        generated.train.batches(9000, shuffle=True, seed=4),
        cached.train.batches(9000, shuffle=True, seed=4),
        strict=True,
    ):
        for name in ("dense", "categorical", "labels", "group"):
            assert torch.equal(getattr(one, name), getattr(two, name))
        assert torch.equal(one.sequences["history"].values, two.sequences["history"].values)
        assert torch.equal(one.sequences["history"].offsets, two.sequences["history"].offsets)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows >= 1"),
        ({"alpha": 1.0}, "alpha"),
        ({"categorical": 1}, "categorical"),
        ({"stress": True, "sigma": 1.0}, "sigma >= 4"),
        ({"stress": True, "dense": 1}, "outlier channels"),
    ],
)
def test_options_are_validated(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("synthetic", **options)
