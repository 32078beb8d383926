import json

import pytest
import torch

from loka.training.stream import EpochStream

from .toy import make_data


def ids(batch):
    return batch.ids[:, 0].tolist()


def test_epochs_follow_each_other_in_new_orders_with_one_shape():
    stream = EpochStream(make_data(400).train, 70, seed=1)  # 300 examples: 4 batches, 20 dropped
    batches = [next(stream) for _ in range(8)]
    assert {batch.size for batch in batches} == {70}
    assert stream.epoch == 1
    assert ids(batches[0]) != ids(batches[4])


@pytest.mark.parametrize("consumed", [0, 3, 4, 9])
def test_a_restored_stream_goes_on_with_the_same_batches(consumed):
    split = make_data(400).train
    stream = EpochStream(split, 70, seed=1)
    for _ in range(consumed):
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    expected = [ids(next(stream)) for _ in range(6)]
    restored = EpochStream(split, 70, seed=1)
    restored.load_state_dict(state)
    assert [ids(next(restored)) for _ in range(6)] == expected


def test_ranks_share_an_epoch_without_overlap():
    split = make_data(400).train
    parts = [EpochStream(split, 10, seed=1, rank=rank, world=3) for rank in range(3)]
    rows = torch.cat([next(part).dense for part in parts for _ in range(10)])
    assert len(torch.unique(rows, dim=0)) == 300


def test_less_than_one_batch_is_an_error_and_not_an_endless_loop():
    with pytest.raises(ValueError, match="less than one full batch of 500"):
        next(EpochStream(make_data(400).train, 500, seed=0))
