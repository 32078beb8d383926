import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from loka.data import load
from loka.data.ranking import Split
from loka.data.rows import Rows, Windows
from loka.data.schema import Field, Schema, SequenceField
from loka.data.stream import WINDOW, BatchStream, Order

SCHEMA = Schema(("x",), (Field("row", 1 << 30),), (SequenceField("tail", 10, 3),), ("y",))
LARGE = 3 * WINDOW + 12_345


class Counting:
    """A source whose every column is the row number; remembers the largest read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.largest = 0

    def __len__(self) -> int:
        return self.rows

    def fingerprint(self) -> str:
        return f"counting/{self.rows}"

    def read(self, ranges: Sequence[tuple[int, int]]) -> Rows:
        assert all(0 <= start < stop <= self.rows for start, stop in ranges)
        index = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        self.largest = max(self.largest, len(index))
        tail = Windows(np.arange(10, dtype=np.int32), index % 7, index % 4)
        column = index[:, None]
        return Rows(column.astype(np.float32), column, (column % 2).astype(np.float32), index, {"tail": tail})


def rows_of(stream: BatchStream) -> list[int]:
    return torch.cat([batch.group for batch in stream]).tolist()


def make_split(rows: int) -> Split:
    return Split("train", SCHEMA, Counting(rows))


@pytest.mark.parametrize("rows", [1, 999, 4096, 4097, LARGE])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_example_once(rows: int, shuffle: bool) -> None:
    seen = rows_of(make_split(rows).batches(1000, shuffle=shuffle, seed=3))
    assert sorted(seen) == list(range(rows))
    if not shuffle:
        assert seen == list(range(rows))


def test_order_depends_on_seed_and_epoch_only() -> None:
    split = make_split(LARGE)
    first = rows_of(split.batches(4096, shuffle=True, seed=1))
    assert first == rows_of(split.batches(4096, shuffle=True, seed=1))
    assert first == rows_of(split.batches(777, shuffle=True, seed=1))
    assert first != rows_of(split.batches(4096, shuffle=True, seed=2))
    assert first != rows_of(split.batches(4096, shuffle=True, seed=1, epoch=1))


def test_shuffle_mixes_far_rows() -> None:
    batch = next(make_split(LARGE).batches(2048, shuffle=True, seed=0))
    spread = batch.group.float()
    assert spread.max() - spread.min() > LARGE * 0.6
    assert len(torch.unique(batch.group // 4096)) == 16


def test_columns_stay_together() -> None:
    for batch in make_split(5000).batches(512, shuffle=True, seed=0):
        assert torch.equal(batch.categorical[:, 0], batch.group)
        assert torch.equal(batch.dense[:, 0].long(), batch.group)
        tail = batch.sequences["tail"]
        assert tail.lengths.tolist() == (batch.group % 4).tolist()
        assert tail.row(0).tolist() == [(int(batch.group[0]) % 7) + k for k in range(int(batch.group[0]) % 4)]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_share_the_work(world: int) -> None:
    split = make_split(20_003)
    parts = [rows_of(split.batches(64, shuffle=True, seed=5, rank=r, world=world)) for r in range(world)]
    assert sorted(row for part in parts for row in part) == list(range(20_003))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    streams = [split.batches(64, shuffle=True, seed=5, rank=r, world=world, drop_last=True) for r in range(world)]
    assert len({len(stream) for stream in streams}) == 1
    for stream in streams:
        assert [batch.size for batch in stream] == [64] * len(stream)


@pytest.mark.parametrize("stop_after", [0, 1, 21, 22, 43, 52])
def test_resume_is_exact(stop_after: int) -> None:
    split = make_split(LARGE)
    whole = split.batches(3000, shuffle=True, seed=9)
    for _ in range(stop_after):
        next(whole)
    state = whole.state_dict()
    rest = [batch.group.tolist() for batch in whole]
    again = make_split(LARGE).batches(3000, shuffle=True, seed=9)
    again.load_state_dict(state)
    assert [batch.group.tolist() for batch in again] == rest
    assert len(again) == -(-LARGE // 3000)


def test_a_state_of_another_stream_is_refused() -> None:
    split = make_split(5000)
    state = split.batches(100, shuffle=True, seed=1).state_dict()
    with pytest.raises(ValueError, match="seed: saved 1, here 2"):
        split.batches(100, shuffle=True, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="data: saved"):
        make_split(5001).batches(100, shuffle=True, seed=1).load_state_dict({**state, "examples": 5001})
    with pytest.raises(ValueError, match="position"):
        split.batches(100, shuffle=True, seed=1).load_state_dict({**state, "position": 9999})
    with pytest.raises(ValueError, match="lacks"):
        split.batches(100, shuffle=True, seed=1).load_state_dict({"position": 3})


def test_arguments_are_validated() -> None:
    split = make_split(10)
    with pytest.raises(ValueError, match="batch_size"):
        split.batches(0, shuffle=False, seed=0)
    with pytest.raises(ValueError, match="rank"):
        split.batches(1, shuffle=False, seed=0, rank=2, world=2)
    with pytest.raises(ValueError, match="seed"):
        Order(10, True, -1)


def test_at_most_one_window_is_read_at_a_time() -> None:
    source = Counting(LARGE)
    for _ in Split("train", SCHEMA, source).batches(100_000, shuffle=True, seed=0):
        pass
    assert source.largest <= WINDOW


def test_batches_own_their_memory() -> None:
    stream = make_split(5000).batches(100, shuffle=False, seed=0)
    first = next(stream)
    first.dense.zero_()
    first.categorical.zero_()
    assert next(stream).categorical[0, 0] == 100
    again = make_split(5000).batches(100, shuffle=False, seed=0)
    assert next(again).categorical[5, 0] == 5


def test_streaming_a_cache_needs_little_memory(tmp_path: Path) -> None:
    data = load("synthetic", rows=500_000, dense=8, categorical=8, max_history=4, cached=True, root=tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.npy"))
    tracemalloc.start()
    try:
        for _ in data.train.batches(4096, shuffle=True, seed=0):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 40e6
    assert peak < size / 3
