import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loka.data import Batch, Jagged


def make_batch(rows: int = 3) -> Batch:
    return Batch(
        dense=torch.zeros(rows, 2),
        categorical=torch.ones(rows, 4, dtype=torch.int64),
        sequences={"history": Jagged.from_rows([[1], [], [2, 3]][:rows])},
        labels=torch.ones(rows, 1),
        group=torch.arange(rows),
    )


def test_size_and_device() -> None:
    batch = make_batch().to("cpu")
    assert batch.size == 3
    assert batch.sequences["history"].lengths.tolist() == [1, 0, 2]


def test_parts_must_agree() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match=r"disagree.*'group': 2"):
        Batch(batch.dense, batch.categorical, batch.sequences, batch.labels, torch.arange(2))


def test_jagged_wants_int64_offsets() -> None:
    with pytest.raises(ValueError, match="int64"):
        Jagged(torch.arange(3), torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="int64"):
        Jagged(torch.arange(3), torch.empty(0, dtype=torch.int64))


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), max_size=6), st.integers(1, 8))
def test_padding_keeps_the_latest(rows: list[list[int]], length: int) -> None:
    jagged = Jagged.from_rows(rows)
    assert [jagged.row(i).tolist() for i in range(jagged.rows)] == rows
    expected = [row[-length:] + [0] * (length - len(row[-length:])) for row in rows]
    padded = jagged.padded(length)
    assert padded.shape == (len(rows), length)
    assert padded.tolist() == expected
