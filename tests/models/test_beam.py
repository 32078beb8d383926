from itertools import product

import pytest
import torch

from loka.data.batch import Jagged
from loka.models.beam import search
from loka.models.onerec import OneRec, OneRecConfig, semantic_id_loss
from loka.semantic_ids.trie import build_trie

from .checks import randomize

BOOKS = (4, 3, 5)
HISTORY = Jagged(torch.tensor([[0, 0, 0], [3, 2, 4], [1, 2, 1]]), torch.tensor([0, 2, 2, 3]))


@pytest.fixture
def model():
    config = OneRecConfig(codebooks=BOOKS, d=8, layers=2, heads=2, g_kv=1, d_ff=8, context=4, short=2)
    return randomize(OneRec(config)).eval()


def score_all(model, ids):
    """log p of every id for every request, through the whole forward."""
    columns = []
    for row in ids:
        logits = model(HISTORY, row.expand(3, 3))
        columns.append(sum(level.log_softmax(1)[:, row[p]] for p, level in enumerate(logits)))
    return torch.stack(columns, 1)


def test_wide_enough_search_is_exhaustive(model):
    ids = torch.tensor(list(product(*(range(size) for size in BOOKS))))
    every = score_all(model, ids)
    found = search(model, model.encode(HISTORY), beams=60)
    scores, order = every.sort(1, descending=True)
    torch.testing.assert_close(found.scores, scores)
    assert found.codes[:, :5].equal(ids[order][:, :5])


def test_only_valid_ids_compete(model):
    ids = torch.tensor([[0, 0, 1], [0, 2, 3], [3, 1, 0], [3, 1, 4], [2, 2, 2]])
    trie = build_trie(ids, BOOKS, torch.tensor([10, 11, 12, 13, 14]))
    found = search(model, model.encode(HISTORY), beams=8, valid=trie)
    scores, order = score_all(model, ids).sort(1, descending=True)
    torch.testing.assert_close(found.scores[:, :5], scores)
    assert found.items[:, :5].equal(order + 10)
    assert found.items[:, 5:].eq(-1).all()
    assert found.scores[:, 5:].eq(float("-inf")).all()


def test_narrow_search_keeps_the_best_prefixes(model):
    found = search(model, model.encode(HISTORY), beams=2)
    assert found.codes.shape == (3, 2, 3)
    for b in range(3):
        for w in range(2):
            expected = score_all(model, found.codes[b, w : w + 1])[b, 0]
            torch.testing.assert_close(found.scores[b, w], expected)
    assert (found.scores[:, 0] >= found.scores[:, 1]).all()


def test_no_beams(model):
    with pytest.raises(ValueError, match="at least one beam"):
        search(model, model.encode(HISTORY), beams=0)


def test_valid_probabilities_are_those_of_the_items(model):
    ids = torch.tensor([[0, 0, 1], [0, 2, 3], [3, 1, 0], [3, 1, 4], [2, 2, 2]])
    trie = build_trie(ids, BOOKS, torch.arange(5))
    found = search(model, model.encode(HISTORY), beams=8, valid=trie, normalize="valid")
    torch.testing.assert_close(found.scores[:, :5].exp().sum(1), torch.ones(3))
    assert found.items[:, 5:].eq(-1).all()
    assert not found.scores.isnan().any()
    for item in range(5):
        codes = ids[item].expand(3, 3)
        logits = model(HISTORY, codes)
        place = (found.items == item).nonzero()[:, 1]
        mine = found.scores.gather(1, place[:, None])
        for b in range(3):
            one = semantic_id_loss(tuple(t[b : b + 1] for t in logits), codes[:1], trie.follow(codes[:1]))
            torch.testing.assert_close(mine[b, 0], -3 * one)


def test_a_normalisation_without_its_ids(model):
    with pytest.raises(ValueError, match="no valid ids were given"):
        search(model, model.encode(HISTORY), beams=2, normalize="valid")
    with pytest.raises(ValueError, match="normalize='all'"):
        search(model, model.encode(HISTORY), beams=2, normalize="all")


def test_loss_over_valid_codes_leaves_the_others_alone(model):
    ids = torch.tensor([[0, 0, 1], [0, 2, 3], [3, 1, 0], [3, 1, 4], [2, 2, 2]])
    trie = build_trie(ids, BOOKS, torch.arange(5))
    codes = ids[[0, 3, 4]]
    logits = tuple(t.detach().requires_grad_() for t in model(HISTORY, codes))
    semantic_id_loss(logits, codes, trie.follow(codes)).backward()
    for level, mask in zip(logits, trie.follow(codes), strict=True):
        assert level.grad[~mask].eq(0).all()
        assert level.grad.isfinite().all()
    assert logits[0].grad.abs().max() > 0
    assert logits[2].grad[2].eq(0).all(), "an only child needs no learning"
