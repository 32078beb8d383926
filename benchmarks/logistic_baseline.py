"""The floor under every model: one-hot logistic regression on a ranking data set.

Every categorical field becomes one-hot columns, every sequence with a vocabulary of its own (genres, say) a bag of its ids, every
dense feature is standardised with the mean and deviation of the training split; with `bins`, it also gets one-hot columns of as many
quantile bins, which lets the model bend. L2-regularised logistic regression has one
optimum, so the number it returns depends on the data and on C alone. A model that does not beat it is broken.

Histories that share a field's table are left out on purpose: as bags they would add the table's whole vocabulary once more, and
the point of the floor is to be plain. It needs scikit-learn and holds the one-hot matrix in memory, so it is for the data
sets of this room, not for a full click log; `max_examples` caps the training rows.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from loka.data.ranking import RankingData, Split
from loka.data.rows import Array
from loka.data.schema import Schema

__all__ = ["Baseline", "fit_baseline"]

_CHUNK = 65_536


@dataclass(frozen=True)
class Baseline:
    """Quality of the baseline on the test split."""

    data: str
    label: str
    train_examples: int
    test_examples: int
    columns: int
    positive_rate: float
    """On the test split"""
    auc: float
    log_loss: float
    entropy: float
    """Log loss of always predicting the test split's positive rate"""
    converged: bool
    """Whether the optimum was reached within max_iterations"""


def fit_baseline(
    data: RankingData,
    *,
    label: str | None = None,
    dense: bool = True,
    bins: int = 0,
    C: float = 0.1,
    max_iterations: int = 500,
    max_examples: int | None = None,
) -> Baseline:
    """Fit on train, score on test. `dense=False` leaves the dense features out; `bins` adds them as quantile bins too."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss, roc_auc_score

    label = label or data.schema.labels[0]
    if label not in data.schema.labels:
        raise ValueError(f"no label {label!r} in {data.name}; known: {list(data.schema.labels)}")
    column = data.schema.labels.index(label)
    design = _Design(data.schema, dense, bins)
    train, target = design.matrix(data.train, column, max_examples, fit=True)
    test, truth = design.matrix(data.test, column, None, fit=False)
    for name, part in (("train", target), ("test", truth)):
        if len(np.unique(part)) != 2:
            raise ValueError(f"{data.name}: the {name} split has only one class of {label!r}; AUC is not defined")
    # C is per example in scikit-learn's objective (a sum, not a mean), so it does not have to follow the data's size.
    model = LogisticRegression(C=C, max_iter=max_iterations, tol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # said by `converged` instead
        model.fit(train, target)
    predicted = model.predict_proba(test)[:, 1]
    rate = float(truth.mean())
    return Baseline(
        data=data.name,
        label=label,
        train_examples=len(target),
        test_examples=len(truth),
        columns=train.shape[1],
        positive_rate=rate,
        auc=float(roc_auc_score(truth, predicted)),
        log_loss=float(log_loss(truth, predicted)),
        converged=bool(model.n_iter_[0] < max_iterations),
        entropy=float(-(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))),
    )


class _Design:
    """Turn batches into one sparse matrix."""

    def __init__(self, schema: Schema, dense: bool, bins: int) -> None:
        sizes = [f.cardinality for f in schema.categorical]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self._bags: dict[str, int] = {}
        width = int(self._starts[-1])
        for sequence in schema.sequences:
            if sequence.shares is None:
                self._bags[sequence.name] = width
                width += sequence.cardinality
        self._onehot = width
        self._dense = dense and bool(schema.dense)
        self._bins = bins
        self._edges: list[Array] = []
        self._mean: Array = np.zeros(len(schema.dense))
        self._scale: Array = np.ones(len(schema.dense))

    def matrix(self, split: Split, label: int, limit: int | None, *, fit: bool) -> tuple[Any, Array]:
        from scipy import sparse  # type: ignore[import-untyped]

        blocks, dense, labels, seen = [], [], [], 0
        for batch in split.batches(_CHUNK, shuffle=limit is not None, seed=0):
            ids = [batch.categorical.numpy() + self._starts[:-1]]
            rows = [np.repeat(np.arange(batch.size), ids[0].shape[1])]
            flat = [ids[0].ravel()]
            for name, start in self._bags.items():
                jagged = batch.sequences[name]
                flat.append(jagged.values.numpy() + start)
                rows.append(np.repeat(np.arange(batch.size), jagged.lengths.numpy()))
            index, row = np.concatenate(flat), np.concatenate(rows)
            ones = np.ones(len(index), np.float32)
            blocks.append(sparse.csr_matrix((ones, (row, index)), shape=(batch.size, self._onehot)))
            dense.append(batch.dense.numpy())
            labels.append(batch.labels[:, label].numpy())
            seen += batch.size
            if limit is not None and seen >= limit:
                break
        onehot, target = sparse.vstack(blocks, format="csr")[:limit], np.concatenate(labels)[:limit]
        if not self._dense:
            return onehot, target
        values = np.concatenate(dense)[:limit].astype(np.float64)
        if fit:
            self._mean, deviation = values.mean(0), values.std(0)
            self._scale = np.where(deviation > 0, deviation, 1.0)
            cuts = np.linspace(0, 1, self._bins + 1)[1:-1]
            self._edges = [np.unique(np.quantile(column, cuts)) for column in values.T] if self._bins else []
        blocks = [onehot, sparse.csr_matrix(((values - self._mean) / self._scale).astype(np.float32))]
        for column, edges in zip(values.T, self._edges, strict=False):
            bin_ = np.searchsorted(edges, column, side="right")
            ones, shape = np.ones(len(bin_), np.float32), (len(bin_), len(edges) + 1)
            blocks.append(sparse.csr_matrix((ones, (np.arange(len(bin_)), bin_)), shape=shape))
        return sparse.hstack(blocks, format="csr"), target
