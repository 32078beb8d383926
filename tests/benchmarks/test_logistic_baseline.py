import numpy as np
import pytest

from loka.data import load

from .scripts import script

fit_baseline = script("logistic_baseline").fit_baseline


def test_matches_a_direct_fit() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    data = load("synthetic", rows=4000, categorical=3, cardinality=20, dense=3, max_history=0)
    train = next(data.train.batches(4000, shuffle=False, seed=0))
    test = next(data.test.batches(1000, shuffle=False, seed=0))
    encoder, scaler = OneHotEncoder(handle_unknown="ignore", sparse_output=False), StandardScaler()
    x = np.hstack([encoder.fit_transform(train.categorical), scaler.fit_transform(train.dense)])
    y = np.hstack([encoder.transform(test.categorical), scaler.transform(test.dense)])
    model = LogisticRegression(C=0.1, max_iter=500).fit(x, train.labels[:, 0].numpy())
    expected = roc_auc_score(test.labels[:, 0].numpy(), model.predict_proba(y)[:, 1])
    result = fit_baseline(data)
    assert result.auc == pytest.approx(expected, abs=2e-3)
    assert result.converged
    assert result.columns == 21 + 21 + 11 + 3
    assert fit_baseline(data, bins=4).columns > result.columns
    assert fit_baseline(data, dense=False).columns == result.columns - 3
    assert fit_baseline(data, max_examples=500).train_examples == 500
    assert not fit_baseline(data, max_iterations=2).converged


def test_wrong_requests_are_refused() -> None:
    data = load("synthetic", rows=2000, categorical=2)
    with pytest.raises(ValueError, match=r"no label 'like'.*click"):
        fit_baseline(data, label="like")
