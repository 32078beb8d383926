"""Intervals of paired losses: what shares an example, a batch or a rounding step is not counted as independent."""

import pytest
import torch

from loka.probe.paired import compare_losses, gather, has_drifted


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_values_of_one_example_are_one_unit() -> None:
    """32 tokens that err together say what one says."""
    each = 1e-3 * noise(4, 50)
    alone = gather(list(1 + each)).change_from(gather([torch.ones(50)] * 4))
    tokens = [(1 + row)[:, None].expand(50, 32) for row in each]
    together = gather(tokens).change_from(gather([torch.ones(50, 32)] * 4))
    assert together.value == pytest.approx(alone.value)
    assert together.high == pytest.approx(alone.high)
    assert gather(tokens).mean == pytest.approx(float((1 + each).mean()))


def test_batches_are_the_unit_where_they_differ() -> None:
    base = gather([torch.ones(100)] * 8)
    spread = 1e-3 * noise(8, 100)
    alike = gather(list(1 + spread)).change_from(base)
    assert alike.high - alike.value == pytest.approx(1.96 * float(spread.std()) / 800**0.5, rel=0.02)
    spread[3] += 0.02  # one batch in which a row has taken the scale from all others
    hurt = gather(list(1 + spread)).change_from(base)
    assert hurt.value == pytest.approx(alike.value + 0.0025)
    assert hurt.low < 0.0 < 0.008 < hurt.high, "one of eight: it may be none, or a quarter"


def test_batches_that_differ_by_chance_are_left_alone() -> None:
    base = gather([torch.ones(100)] * 8)
    widths = [gather(list(1 + noise(8, 100, seed=seed))).change_from(base) for seed in range(50)]
    usual = 1.96 / 800**0.5
    assert sum(change.high - change.value > 1.3 * usual for change in widths) <= 1


def test_a_loss_in_sixteen_bits_is_known_to_its_steps() -> None:
    """Sixteen equal means in bfloat16 do not say that nothing changed: each moves in steps of 0.4 %."""
    parts = [torch.tensor(0.498, dtype=torch.bfloat16)] * 16
    change = gather(parts).change_from(gather(parts))
    assert change.value == 0.0
    assert 0.0005 < change.high < 0.002
    true = 0.498 * (1 + 0.02 * noise(16))
    moved = gather(list((1.0004 * true).bfloat16())).change_from(gather(list(true.bfloat16())))
    assert moved.low < 0.0004 < moved.high
    many = gather([0.5 + torch.rand(4096).bfloat16()] * 4)
    assert many.change_from(many).high < 1e-4, "over many examples the steps average out"
    assert gather([torch.ones(3)] * 2).change_from(gather([torch.ones(3)] * 2)).high == 0.0


def test_one_group_is_one_pair() -> None:
    change = compare_losses(torch.tensor([1.1, 1.1]), torch.ones(2), torch.zeros(2, dtype=torch.int64))
    assert (change.low, change.high) == pytest.approx((-0.1, 0.1))


def test_copies_of_a_batch_are_one_batch() -> None:
    each = 1 + 0.1 * noise(2, 50)
    low = each + 1e-3 * noise(2, 50, seed=1)
    once = gather(list(low)).change_from(gather(list(each)))
    often = gather([*low] * 10).change_from(gather([*each] * 10))
    assert often.value == pytest.approx(once.value)
    assert often.high == pytest.approx(once.high)


def test_runs_that_differ_by_nothing_or_little_have_not_drifted() -> None:
    base = gather(list(1 + 0.1 * noise(4, 50)))
    assert has_drifted(base, base, 2e-4) is None
    assert has_drifted(gather(list(base.values.view(4, 50) + 1e-4 * noise(4, 50, seed=1))), base, 2e-4) is None
    assert has_drifted(gather(list(base.values.view(4, 50) + 0.1 * noise(4, 50, seed=1))), base, 2e-4) is not None
    assert has_drifted(gather(list(1.001 * base.values.view(4, 50))), base, 2e-4) is not None
    steps = gather(list(base.values.bfloat16().view(4, 50).mean(1)))
    assert has_drifted(steps, steps, 2e-4) is None, "steps of a short type are no drift"


def test_a_task_that_changes_is_named_beside_a_sum_that_does_not() -> None:
    base = torch.stack([1 + 0.1 * noise(200).abs(), 0.01 + 1e-3 * noise(200, seed=1).abs()], 1)
    low = base * torch.tensor([1.0, 1.01], dtype=torch.float64)
    found = gather([low[:100], low[100:]])
    (number, (share, change)), *others = found.changed_columns(gather([base[:100], base[100:]]), 1e-3).items()
    assert (number, others) == (1, [])
    assert share == pytest.approx(0.01, rel=0.1)
    assert change.value == pytest.approx(0.01)
    assert found.change_from(gather([base[:100], base[100:]])).high < 1e-3
    assert gather([torch.ones(4, 100)]).columns == 1, "a sequence is no list of tasks"
