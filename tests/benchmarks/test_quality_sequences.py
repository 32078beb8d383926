"""The sequence part of the quality benchmark on a toy set: static batches are the ragged ones, and a run leaves what the record needs."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import quality
import quality_sequences as sequences

from loka.data.batch import Jagged
from loka.models.hstu import next_item_loss
from loka.models.onerec import semantic_id_loss

N = 30
SMALL = {"d": 16, "layers": 1, "heads": 2, "dropout": 0.0}
HSTU = sequences.Recipe(6, 16, length=5, evaluations=2, model=SMALL | {"d_qk": 4, "d_v": 4})
ONEREC = sequences.Recipe(6, 16, length=5, evaluations=2, model=SMALL | {"d_ff": 16, "g_kv": 2, "short": 2})


@pytest.fixture
def root(tmp_path):
    """Histories in which every item is followed by the next one, with times."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, 80)
    starts = rng.integers(0, N, 80)
    items = np.concatenate([(start + np.arange(n)) % N + 1 for start, n in zip(starts, lengths, strict=True)])
    codes = np.zeros((N + 1, 2), np.int64)
    codes[1:] = np.stack([np.arange(N) // 6, np.arange(N) % 6], 1)
    np.savez(
        tmp_path / "sequences-toy.npz",
        items=items.astype(np.uint8), lengths=lengths.astype(np.uint8), n_items=np.array(N), codes=codes.astype(np.uint8),
        steps=rng.integers(0, 100, len(items)), first_times=rng.integers(0, 9, 80),
    )  # fmt: skip
    sequences.read_events.cache_clear()
    return tmp_path


def test_static_gather_is_the_ragged_one_with_room_behind_it():
    begin, end = torch.tensor([3, 7, 7, 0]), torch.tensor([5, 7, 10, 1])
    at, offsets = sequences.gather_static(begin, end, 9)
    assert at.tolist() == [3, 4, 7, 8, 9, 0, -1, -1, -1]
    assert offsets.tolist() == [0, 2, 2, 5, 6]
    at, offsets = sequences.gather_static(begin, end, 4)
    assert at.tolist() == [3, 4, 7, 8]
    assert offsets.tolist() == [0, 2, 2, 4, 4]


def test_hstu_static_loss_is_the_ragged_loss(root):
    events = sequences.read_events(root, "toy", "cpu")
    task = sequences.NextItem(events, replace(HSTU, length=12), "reference")
    users = task.examples[:16]
    begin, end = events.first[users], task.ends[users]
    history, at = events.windows(begin, end, 12, int((end - begin).sum()))
    expected = next_item_loss(task.model(history, events.times[at]), history)
    torch.testing.assert_close(task.loss(users), expected)
    assert task.capacity >= int((end - begin).sum())


def test_a_window_of_a_long_history_may_lie_anywhere_in_its_training_part(root):
    events = sequences.read_events(root, "toy", "cpu")
    task = sequences.NextItem(events, replace(HSTU, length=3), "reference")
    seen = set()
    user = task.examples[(task.ends - events.first)[task.examples].argmax()].expand(16)
    task.model.forward = lambda history, times: seen.update(history.values.tolist()) or torch.zeros(len(times), N + 1)
    for _ in range(20):
        task.loss(user)
    own = events.items[events.first[user[0]] : task.ends[user[0]]].tolist()
    assert seen - {0} == set(own)


def test_onerec_static_loss_is_the_ragged_loss(root):
    events = sequences.read_events(root, "toy", "cpu")
    task = sequences.NextId(events, ONEREC)
    some = task.examples[:16]
    target = task.targets[some]
    begin = torch.maximum(task.first[some], target - 5)
    history, _ = events.windows(begin, target, 5, int((target - begin).sum()))
    goal = events.codes[events.items[target]]
    logits = task.model(Jagged(task.described[history.values], history.offsets), goal)
    torch.testing.assert_close(task.loss(some), semantic_id_loss(logits, goal, task.trie.follow(goal)))
    held_out = {int(t) for split in ("valid", "test") for t in events.held_out(split)[1]}
    assert not held_out & set(task.targets.tolist())


@pytest.mark.parametrize(("family", "recipe"), [("hstu", HSTU), ("onerec", ONEREC)])
def test_a_run_reports_and_one_without_time_says_so(root, family, recipe, monkeypatch):
    long = replace(recipe, steps=150, learning_rate=1e-2, batch=32)
    result = sequences.run(root, family, "toy", 0, "cpu", deadline=math.inf, recipe=long)
    assert result["hr10"] > 0.8
    assert (result["cut_short"], result["steps"], result["forward"]) == (False, 150, "eager: no GPU")
    cut = sequences.run(root, family, "toy", 0, "cpu", deadline=0.0, recipe=recipe)
    assert (cut["cut_short"], cut["steps"]) == (True, 1)
    with pytest.raises(ValueError, match="a batch of 10000"):
        sequences.run(root, family, "toy", 0, "cpu", deadline=math.inf, recipe=replace(recipe, batch=10000))


def test_baselines_count_followers(root):
    bars = sequences.measure_baselines(root, "toy", "cpu")
    assert bars["markov"] > 0.9 > bars["popularity"]


def test_first_seeds_come_first_and_an_old_record_keeps_its_other_cells():
    jobs = quality.list_jobs("hstu,onerec,interformer")
    assert len(jobs) == 8
    assert all(len(quality.share_seeds(job, 3)) == 3 for job in jobs)
    assert len(quality.share_seeds(("wukong", "ml-1m"), 3)) == 1, "its recipes compete"
    report = {name: [] for name in quality.LISTS} | {"baselines": {"sequences": {}}}
    cells = [("hstu", "ml-1m", False), ("wukong", "ml-1m", False), ("dlrm", "ml-1m", True)]
    earlier = {
        "runs": [{"model": m, "data": d, "cut_short": cut} for m, d, cut in cells],
        "skipped": [{"model": "hstu", "data": "ml-1m", "seed": 1}],
        "baselines": {"sequences": {"ml-1m": {"markov": 0.1}}},
    }
    quality.keep_others(report, earlier, jobs)
    assert [run["model"] for run in report["runs"]] == ["wukong"]
    assert [run["model"] for run in report["cut_short"]] == ["dlrm"]
    assert report["skipped"] == []


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "recipe"), [("hstu", HSTU), ("onerec", ONEREC)])
def test_a_captured_step_has_the_loss_and_the_gradients_of_an_eager_one(root, family, recipe):
    events = sequences.read_events(root, "toy", "cuda")
    wide = replace(recipe, length=12)  # no history is longer, so there is nothing random about a window
    attention = sequences.choose_attention("cuda")[0]
    task = sequences.NextItem(events, wide, attention) if family == "hstu" else sequences.NextId(events, wide)
    task.model.to("cuda")
    stepper = sequences.Stepper(task, wide, "cuda")
    assert stepper.how == "CUDA graph"
    for first in (0, 16):
        examples = task.examples[first : first + 16]
        replayed = stepper(examples).item()
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in task.model.parameters()]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = task.loss(examples)
        expected = torch.autograd.grad(loss, list(task.model.parameters()), allow_unused=True)
        assert replayed == pytest.approx(loss.item(), rel=1e-3)
        for a, b in zip(gradients, expected, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=0.05, atol=1e-3)
