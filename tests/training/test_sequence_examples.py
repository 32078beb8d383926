import itertools

import numpy as np
import pytest
import torch

from loka.data.batch import Jagged
from loka.data.sequences import SequenceData
from loka.training.sequence_examples import cut_histories, cut_prefixes, cut_targets


def make_data(times=True):
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [3, 1], [2], [4, 4, 5, 6]]
    values = torch.tensor([item for row in rows for item in row])
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    stamps = torch.arange(len(values)) * 10 if times else None
    return rows, SequenceData("toy", Jagged(values, offsets), 9, times=stamps)


def read(examples):
    """(history, target) of every example."""
    batch = examples.cut(np.arange(len(examples)))
    offsets = batch.history.offsets.tolist()
    histories = [batch.history.values[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    return list(zip(histories, batch.target.tolist(), strict=True))


def test_three_ways_to_cut_never_show_what_is_held_out():
    rows, data = make_data()
    assert read(cut_histories(data.train, 10)) == [([1, 2, 3, 4], 0), ([4, 4], 0)]
    assert read(cut_histories(data.train, 3)) == [([2, 3, 4], 0), ([4, 4], 0)]
    assert read(cut_prefixes(data.train, 2)) == [([1], 2), ([1, 2], 3), ([2, 3], 4), ([4], 4)]
    assert read(cut_targets(data.valid, 10)) == [(r[:-2], r[-2]) for r in rows if len(r) > 2]
    assert read(cut_targets(data.test, 2)) == [(r[:-1][-2:], r[-1]) for r in rows if len(r) > 1]


def test_times_are_those_of_the_items_and_of_the_request():
    _, data = make_data()
    batch = cut_prefixes(data.train, 2).cut(np.array([2]))
    assert batch.times.tolist() == [10, 20]
    assert batch.asked.tolist() == [30]
    assert cut_histories(data.train, 2).cut(np.array([0])).asked is None
    bare = cut_prefixes(make_data(times=False)[1].train, 2).cut(np.array([0, 1])).to("cpu")
    assert bare.times is None
    assert bare.asked is None
    assert bare.size == 2


def open_stream(examples, **changes):
    options = {"shuffle": True, "seed": 1, "drop_last": False, "rank": 0, "world": 1, "epoch": 0}
    return examples.batches(2, **options | changes)


def test_an_epoch_shows_every_example_once_in_an_order_of_its_own():
    examples = cut_prefixes(make_data()[1].train, 5)
    epochs = [[b.history.values.tolist() for b in open_stream(examples, epoch=e)] for e in (0, 0, 1)]
    assert epochs[0] == epochs[1]
    assert sorted(v for row in epochs[0] for v in row) == sorted(v for row in epochs[2] for v in row)
    ranks = [[t for b in open_stream(examples, rank=r, world=2) for t in b.target.tolist()] for r in (0, 1)]
    assert sorted(ranks[0] + ranks[1]) == [2, 3, 4, 4]
    assert [b.size for b in open_stream(examples, world=3, rank=0, drop_last=True)] == []


def test_a_stream_continues_where_it_was():
    examples = cut_prefixes(make_data()[1].train, 5)
    stream = open_stream(examples)
    next(stream)
    state = stream.state_dict()
    rest = [b.target.tolist() for b in stream]
    again = open_stream(examples)
    again.load_state_dict(state)
    assert [b.target.tolist() for b in again] == rest
    with pytest.raises(ValueError, match="seed: saved 1, here 2"):
        open_stream(examples, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="rank"):
        open_stream(examples, rank=2, world=2)


def test_of_a_basket_the_first_item_is_the_next_one():
    _, data = make_data()
    by_time = SequenceData("toy", data.items, 9, times=data.times, baskets=torch.arange(16) // 2, split_times=(20, 40))
    _, goals = by_time.test.targets
    assert goals.max() == 2  # two items at once
    found = cut_targets(by_time.test, 5)
    start, count = by_time.test.history
    kept = goals > 0
    assert (found.end == (start + count)[kept]).all()
