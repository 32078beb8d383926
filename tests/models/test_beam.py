from itertools import product

import pytest
import torch

from loka.data.batch import Jagged
from loka.models.beam import search
from loka.models.onerec import OneRec, OneRecConfig
from loka.semantic_ids import build_trie

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
