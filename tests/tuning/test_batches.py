"""Batches that are no new data: they are cut, noted or refused."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from tests.tuning.small import make_batches, make_trained, tune

from loka.tuning.batches import keep_batches


def test_an_iterable_that_starts_over_is_cut_there() -> None:
    given = make_batches(6)
    kept, (note,) = keep_batches(cycle(given))
    assert kept == given
    assert "only the first 6 batches" in note
    again = [(x.clone(), {"labels": y.clone(), "day": 3}) for _ in range(3) for x, y in given]
    assert len(keep_batches(again)[0]) == 6


def test_what_only_looks_alike_is_kept() -> None:
    mask = torch.ones(4)
    for given in ([{"text": str(i), "mask": mask} for i in range(4)], [object()] * 4, list(range(4))):
        assert keep_batches(given) == (given, [])
    assert len(keep_batches(b for b in make_batches(1) * 100)[0]) == 64


def test_one_batch_given_twice_is_noted() -> None:
    model, _ = make_trained()
    tuned = tune(model, make_batches(1) * 4)
    assert any("batches 0 and 1 are the same" in note for note in tuned.record.notes)


def test_tensors_that_an_iterator_fills_again_are_refused() -> None:
    def refill() -> Iterator[Any]:
        x, y = make_batches(1)[0]
        for a, b in make_batches(4):
            yield x.copy_(a), y.copy_(b)

    with pytest.raises(ValueError, match="batch 0 was overwritten"):
        keep_batches(refill())


def test_tensors_with_a_graph_are_refused() -> None:
    given = [(x.requires_grad_(), y) for x, y in make_batches(2)]
    assert keep_batches(given) == (given, [])
    with pytest.raises(ValueError, match="batch 0 has a tensor that was computed with gradients"):
        keep_batches([(2 * x, y) for x, y in given])
