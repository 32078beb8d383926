"""Beam-set overlap against Python sets."""

import math

import pytest
import torch

from loka.metrics import BeamOverlap


def test_matches_sets_of_ids() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(-2, 25, (60, 12), generator=generator)  # padding and repeats included
    second = torch.randint(-2, 25, (60, 14), generator=generator)
    first[5], second[5] = -1, -1
    metric = BeamOverlap((1, 4, 12))
    metric.update(first[:20], second[:20])
    metric.update(first[20:], second[20:])
    result = metric.compute()
    for n in (1, 4, 12):
        overlap, jaccard, queries = 0.0, 0.0, 0
        for a, b in zip(first.tolist(), second.tolist(), strict=True):
            left, right = ({item for item in row[:n] if item >= 0} for row in (a, b))
            if not left and not right:
                continue
            queries += 1
            overlap += len(left & right) / max(len(left), len(right))
            jaccard += len(left & right) / len(left | right)
        assert result.overlap[n] == pytest.approx(overlap / queries)
        assert result.jaccard[n] == pytest.approx(jaccard / queries)
        assert (result.queries[n], result.empty[n]) == (queries, 60 - queries)


def test_tuples_of_codes_compare_as_tuples() -> None:
    reference = torch.tensor([[[0, 1], [1, 0], [2, 2]]])
    candidate = torch.tensor([[[1, 0], [0, 0], [2, -1]]])  # the last is padding
    metric = BeamOverlap((3,))
    metric.update(reference, candidate)
    result = metric.compute()
    assert result.overlap[3] == pytest.approx(1 / 3)
    assert result.jaccard[3] == pytest.approx(1 / 4)


def test_order_does_not_matter_and_identity_is_one() -> None:
    beams = torch.rand(8, 50, generator=torch.Generator().manual_seed(1)).argsort(1)
    metric = BeamOverlap((50,))
    metric.update(beams, beams.flip(1))
    assert metric.compute().overlap[50] == 1.0


def test_nothing_is_nan() -> None:
    metric = BeamOverlap((2,))
    metric.update(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64))
    metric.update(torch.full((1, 3), -1), torch.full((1, 3), -1))
    result = metric.compute()
    assert math.isnan(result.overlap[2])
    assert result.empty[2] == 1


def test_impossible_requests_raise() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="exceeds the beam width 4"):
        BeamOverlap((5,)).update(ids, ids)
    with pytest.raises(ValueError, match="differ in B or levels"):
        BeamOverlap((1,)).update(ids, ids[:1])
    with pytest.raises(ValueError, match="integer"):
        BeamOverlap((1,)).update(ids.float(), ids)
    with pytest.raises(ValueError, match="expected"):
        BeamOverlap((1,)).update(ids[0], ids[0])
    with pytest.raises(ValueError, match="distinct positive"):
        BeamOverlap(())
