"""Top-K metrics against scikit-learn's NDCG, plain loops, and enumeration of every order of ties."""

import itertools
import math

import pytest
import torch
from sklearn.metrics import ndcg_score

from loka.metrics import TopK
from loka.metrics.topk import rank_target

KS = (1, 3, 10)


@pytest.mark.parametrize("ties", [False, True])
def test_full_catalogue_ndcg_matches_sklearn(ties: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200, 40, generator=generator, dtype=torch.float64)
    if ties:
        scores = (scores * 2).round()
    target = torch.randint(40, (200,), generator=generator)
    relevance = torch.nn.functional.one_hot(target, 40)
    metric = TopK(KS)
    metric.update_scores(scores[:70], target[:70])
    metric.update_scores(scores[70:], target[70:])
    result = metric.compute()
    for k in KS:
        assert result.ndcg[k] == pytest.approx(ndcg_score(relevance, scores, k=k), rel=1e-12)
    assert result.hit_rate == result.recall
    assert result.queries == 200


def test_ties_are_the_mean_over_all_orders() -> None:
    scores, target = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]), 2
    metric = TopK((1, 2, 3))
    metric.update_scores(scores, torch.tensor([target]))
    result = metric.compute()
    orders = [[0, *middle, 4] for middle in itertools.permutations([1, 2, 3])]
    positions = [order.index(target) for order in orders]
    for k in (1, 2, 3):
        assert result.hit_rate[k] == pytest.approx(sum(p < k for p in positions) / 6)
        expected = sum(1 / math.log2(p + 2) for p in positions if p < k) / 6
        assert result.ndcg[k] == pytest.approx(expected)
    assert result.mrr == pytest.approx(sum(1 / (p + 1) for p in positions) / 6)


def test_constant_scores_get_chance_and_not_one() -> None:
    metric = TopK((10,))
    metric.update_scores(torch.zeros(3, 100), torch.tensor([0, 50, 99]))
    assert metric.compute().hit_rate[10] == pytest.approx(0.1)


def test_lists_match_a_loop() -> None:
    generator = torch.Generator().manual_seed(3)
    lists = torch.rand(150, 30, generator=generator).argsort(1)[:, :12]
    targets = torch.rand(150, 30, generator=generator).argsort(1)[:, :5]
    sizes = torch.randint(0, 6, (150,), generator=generator)
    targets[torch.arange(5)[None, :] >= sizes[:, None]] = -1
    lists[::7, 11:] = -1
    metric = TopK(KS)
    metric.update(lists[:100], targets[:100])
    metric.update(lists[100:], targets[100:])
    result = metric.compute()
    sums = {name: dict.fromkeys(KS, 0.0) for name in ("hit", "recall", "ndcg")}
    reciprocal, queries = 0.0, 0
    for row, relevant in zip(lists.tolist(), targets.tolist(), strict=True):
        wanted = {item for item in relevant if item >= 0}
        if not wanted:
            continue
        queries += 1
        ranks = [position for position, item in enumerate(row) if item in wanted]
        reciprocal += 1 / (1 + ranks[0]) if ranks else 0.0
        for k in KS:
            found = [position for position in ranks if position < k]
            sums["hit"][k] += bool(found)
            sums["recall"][k] += len(found) / len(wanted)
            ideal = sum(1 / math.log2(position + 2) for position in range(min(k, len(wanted))))
            sums["ndcg"][k] += sum(1 / math.log2(position + 2) for position in found) / ideal
    assert (result.queries, result.without_target) == (queries, 150 - queries)
    assert result.without_target > 0
    assert result.mrr == pytest.approx(reciprocal / queries)
    for k in KS:
        assert result.hit_rate[k] == pytest.approx(sums["hit"][k] / queries)
        assert result.recall[k] == pytest.approx(sums["recall"][k] / queries)
        assert result.ndcg[k] == pytest.approx(sums["ndcg"][k] / queries)


def test_lists_and_scores_agree_without_ties() -> None:
    generator = torch.Generator().manual_seed(4)
    scores, target = torch.randn(80, 25, generator=generator), torch.randint(25, (80,), generator=generator)
    by_scores, by_lists = TopK(KS), TopK(KS)
    by_scores.update_scores(scores, target)
    by_lists.update(scores.argsort(1, descending=True), target[:, None])
    first, second = by_scores.compute(), by_lists.compute()
    assert first.hit_rate == pytest.approx(second.hit_rate)
    assert first.ndcg == pytest.approx(second.ndcg)
    assert first.mrr == pytest.approx(second.mrr)


def test_excluded_items_do_not_rank() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 3.0]])
    exclude = torch.tensor([[True, False, False, True]])
    better, tied = rank_target(scores, torch.tensor([2]), exclude=exclude)
    assert (better.tolist(), tied.tolist()) == ([1], [1])
    with pytest.raises(ValueError, match="removes the target"):
        rank_target(scores, torch.tensor([0]), exclude=exclude)


def test_infinite_scores_rank_and_nan_raises() -> None:
    better, _ = rank_target(torch.tensor([[math.inf, 0.0, -math.inf]]), torch.tensor([2]))
    assert better.tolist() == [2]
    with pytest.raises(ValueError, match="1 of 3 scores are NaN"):
        TopK((1,)).update_scores(torch.tensor([[0.0, math.nan, 1.0]]), torch.tensor([0]))


def test_empty_batches() -> None:
    metric = TopK((2,))
    metric.update_scores(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    metric.update(torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, 1, dtype=torch.int64))
    metric.update(torch.arange(5)[None], torch.tensor([[-1]]))
    result = metric.compute()
    assert math.isnan(result.mrr)
    assert (result.queries, result.without_target) == (0, 1)


def test_impossible_requests_raise() -> None:
    with pytest.raises(ValueError, match="exceeds the catalogue of 5"):
        TopK((10,)).update_scores(torch.zeros(1, 5), torch.tensor([0]))
    with pytest.raises(ValueError, match="exceeds the recommended list of 3"):
        TopK((10,)).update(torch.tensor([[1, 2, 3]]), torch.tensor([[1]]))
    with pytest.raises(ValueError, match="repeat an item"):
        TopK((1,)).update(torch.tensor([[1, 1, 3]]), torch.tensor([[1]]))
    with pytest.raises(ValueError, match=r"expected \[0, 5\)"):
        TopK((1,)).update_scores(torch.zeros(1, 5), torch.tensor([5]))
    with pytest.raises(ValueError, match="ties with itself"):
        TopK((1,)).update_ranks(torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="distinct positive"):
        TopK((0,))
