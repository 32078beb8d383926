"""The reservoir is a uniform sample of rows, and keeps x and dy together."""

import torch

from loka.probe.reservoir import MAX_BYTES, MIN_ROWS, Reservoir


def make(rows: int, widths: tuple[int, int] = (2, 3), seed: int = 0) -> Reservoir:
    return Reservoir(rows, widths, torch.device("cpu"), torch.Generator().manual_seed(seed))


def numbered(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(first, first + count, dtype=torch.float32)
    return ids[:, None].repeat(1, 2), -ids[:, None].repeat(1, 3)


def test_keeps_everything_while_there_is_room() -> None:
    reservoir = make(10)
    reservoir.offer(*numbered(0, 4))
    reservoir.offer(*numbered(4, 3))
    assert reservoir.x[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_x_and_dy_stay_rows_of_the_same_example() -> None:
    reservoir = make(16)
    for first in range(0, 400, 25):
        reservoir.offer(*numbered(first, 25))
    assert reservoir.kept == 16
    assert reservoir.dy is not None
    assert torch.equal(reservoir.x[:, 0], -reservoir.dy[:, 0])


def test_every_row_has_the_same_chance() -> None:
    trials, rows, kept = 600, 60, 12
    counts = torch.zeros(rows)
    for seed in range(trials):
        reservoir = make(kept, seed=seed)
        for first in range(0, rows, 20):
            reservoir.offer(*numbered(first, 20))
        counts[reservoir.x[:, 0].long()] += 1
    expected = trials * kept / rows
    chi_squared = float(((counts - expected) ** 2 / expected).sum() / (1 - kept / rows))
    assert chi_squared < 98.3  # 99.9 % quantile with 59 degrees of freedom


def test_rows_with_gradients_replace_rows_without() -> None:
    reservoir = make(8)
    x, dy = numbered(0, 5)
    reservoir.offer(x, None)
    assert reservoir.kept == 5
    assert reservoir.dy is None
    reservoir.offer(x + 100, dy)
    assert reservoir.x[:, 0].tolist() == [100, 101, 102, 103, 104]
    reservoir.offer(x, None)
    assert reservoir.kept == 5


def test_wide_sites_keep_fewer_rows() -> None:
    assert make(10_000, (4096, 4096)).capacity == MAX_BYTES // (4 * 8192)
    assert make(10_000, (90_000, 90_000)).capacity == MIN_ROWS


def test_state_survives() -> None:
    before = make(6)
    before.offer(*numbered(0, 50))
    after = make(6)
    after.load_state_dict(before.state_dict())
    assert torch.equal(after.x, before.x)
    assert (after.seen, after.has_dy) == (50, True)


def test_a_merged_reservoir_is_a_sample_of_both() -> None:
    trials, counts, kept = 600, torch.zeros(60), 12
    for seed in range(trials):
        first, second = make(kept, seed=seed), make(kept, seed=seed + trials)
        first.offer(*numbered(0, 40))
        second.offer(*numbered(40, 20))
        first.merge(second)
        assert first.seen == 60
        assert first.dy is not None
        assert torch.equal(first.x[:, 0], -first.dy[:, 0])
        counts[first.x[:, 0].long()] += 1
    expected = trials * kept / 60
    chi_squared = float(((counts - expected) ** 2 / expected).sum() / (1 - kept / 60))
    assert chi_squared < 98.3  # 99.9 % quantile with 59 degrees of freedom


def test_merging_keeps_all_that_fits_and_prefers_gradients() -> None:
    first, second = make(16), make(16)
    first.offer(*numbered(0, 5))
    second.offer(*numbered(5, 4))
    first.merge(second)
    assert sorted(first.x[:, 0].tolist()) == list(range(9))
    without = make(16)
    without.offer(numbered(20, 3)[0], None)
    first.merge(without)
    assert first.kept == 9
    without.merge(first)
    assert sorted(without.x[:, 0].tolist()) == list(range(9))
    first.merge(make(16))
    assert first.kept == 9
