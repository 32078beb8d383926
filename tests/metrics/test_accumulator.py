"""Every metric: streaming equals one shot, merging equals streaming, state survives a round trip, processes agree exactly."""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from comms.ranks import on_ranks
from loka.metrics import (
    AUC,
    GAUC,
    BeamOverlap,
    LogLoss,
    Metric,
    NormalizedEntropy,
    TopK,
    all_reduce,
)

Feed = Callable[[Any, int], None]


def draw(part: int, size: int = 400) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(part)
    logits = torch.randn(size, generator=generator)
    return {
        "logits": logits,
        "other": logits + torch.randn(size, generator=generator),
        "labels": (torch.rand(size, generator=generator) < torch.sigmoid(logits)).float(),
        "group": torch.randint(20, (size,), generator=generator),
        "scores": torch.randn(size, 30, generator=generator),
        "target": torch.randint(30, (size,), generator=generator),
        "beams": torch.rand(size, 30, generator=generator).argsort(1)[:, :8],
        "other_beams": torch.rand(size, 30, generator=generator).argsort(1)[:, :8],
    }


def feed_binary(metric: Any, part: int) -> None:
    batch = draw(part)
    metric.update(batch["logits"], batch["labels"])


def feed_grouped(metric: Any, part: int) -> None:
    batch = draw(part)
    metric.update(batch["logits"], batch["labels"], batch["group"])


def feed_topk(metric: Any, part: int) -> None:
    batch = draw(part)
    metric.update_scores(batch["scores"], batch["target"])


def feed_beams(metric: Any, part: int) -> None:
    batch = draw(part)
    metric.update(batch["beams"], batch["other_beams"])


CASES: list[tuple[Metric[Any], Feed]] = [
    (LogLoss(), feed_binary),
    (NormalizedEntropy(), feed_binary),
    (AUC(), feed_binary),
    (GAUC(), feed_grouped),
    (TopK((1, 5, 10)), feed_topk),
    (BeamOverlap((2, 8)), feed_beams),
]
each_metric = pytest.mark.parametrize(("blank", "feed"), CASES, ids=[type(metric).__name__ for metric, _ in CASES])


def flatten(result: Any) -> list[float]:
    if isinstance(result, int | float):
        return [float(result)]
    if isinstance(result, dict):
        return [number for value in result.values() for number in flatten(value)]
    if isinstance(result, tuple | list):
        return [number for value in result for number in flatten(value)]
    return flatten(dataclasses.asdict(result))


def same_state(first: Metric[Any], second: Metric[Any]) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@each_metric
def test_merge_equals_streaming(blank: Metric[Any], feed: Feed) -> None:
    streamed, left, right = (copy.deepcopy(blank) for _ in range(3))
    for part in range(3):
        feed(streamed, part)
        feed(left if part < 2 else right, part)
    left.merge(right)
    assert flatten(left.compute()) == pytest.approx(flatten(streamed.compute()), rel=1e-13)
    feed(left, 7)  # a merged metric goes on
    assert flatten(left.compute()) != flatten(streamed.compute())


@each_metric
def test_state_survives_safetensors(blank: Metric[Any], feed: Feed, tmp_path: Path) -> None:
    metric, restored = copy.deepcopy(blank), copy.deepcopy(blank)
    feed(metric, 0)
    save_file(metric.state_dict(), tmp_path / "state.safetensors")
    restored.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert flatten(restored.compute()) == flatten(metric.compute())
    feed(metric, 1)
    feed(restored, 1)
    assert same_state(metric, restored)


@each_metric
def test_reset_forgets(blank: Metric[Any], feed: Feed) -> None:
    metric, fresh = copy.deepcopy(blank), copy.deepcopy(blank)
    feed(metric, 3)
    metric.reset()
    feed(metric, 0)
    feed(fresh, 0)
    assert same_state(metric, fresh)


@each_metric
def test_snapshot_does_not_follow_later_updates(blank: Metric[Any], feed: Feed) -> None:
    metric = copy.deepcopy(blank)
    feed(metric, 0)
    before = {name: tensor.clone() for name, tensor in metric.state_dict().items()}
    snapshot = metric.state_dict()
    feed(metric, 1)
    assert all(torch.equal(snapshot[name], before[name]) for name in before)


def test_empty_metrics_are_nan() -> None:
    for blank, _ in CASES:
        numbers = flatten(copy.deepcopy(blank).compute())
        assert any(math.isnan(number) for number in numbers), type(blank).__name__
        assert all(math.isnan(number) or number == 0 for number in numbers)  # zeros are counts


def test_empty_batches_change_nothing() -> None:
    metric = AUC()
    feed_binary(metric, 0)
    value = metric.compute()
    metric.update(torch.empty(0), torch.empty(0))
    assert metric.compute() == value


def test_mismatched_configurations_refuse() -> None:
    with pytest.raises(ValueError, match="configure both"):
        TopK((1,)).merge(TopK((2,)))
    with pytest.raises(ValueError, match="configure both alike"):
        TopK((1,)).load_state_dict(TopK((2,)).state_dict())
    with pytest.raises(ValueError, match="not a LogLoss"):
        LogLoss().load_state_dict(AUC().state_dict())


def test_all_reduce_without_a_group_raises() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        all_reduce(LogLoss())


def reduce_on_rank() -> None:
    rank = dist.get_rank()
    for blank, feed in CASES:
        local = copy.deepcopy(blank)
        if rank != 1:  # rank 1 saw nothing: ragged and empty states must travel too
            for part in range(rank + 1):
                feed(local, 10 * rank + part)
        before = copy.deepcopy(local)
        total = all_reduce(local)
        assert same_state(local, before), "the local metric must not change"
        expected = copy.deepcopy(blank)
        for other in (0, 2):
            shard = copy.deepcopy(blank)
            for part in range(other + 1):
                feed(shard, 10 * other + part)
            expected.merge(shard)
        assert same_state(total, expected), type(blank).__name__


def test_all_reduce_is_bit_exact() -> None:
    on_ranks(3, "metrics.test_accumulator", "reduce_on_rank")
