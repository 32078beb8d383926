import json
import os

import pytest
import torch

from loka.training import DamagedCheckpointError, Snapshot, find_checkpoints, read_best, read_checkpoint
from loka.training import checkpoint as module
from loka.training.checkpoint import prune, remove_leftovers, write_best, write_checkpoint


def make_snapshot(step=3):
    tensors = {
        "model": {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(5)},
        "optimizer": {"w:step": torch.tensor(2.0)},
        "extra": {},
    }
    return Snapshot(step, tensors, {"config": {"steps": 9}, "monitor": {"best": None, "stale": 0}})


def test_round_trip(tmp_path):
    path = write_checkpoint(tmp_path, make_snapshot())
    assert sorted(file.name for file in path.iterdir()) == [
        "extra.safetensors",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    back = read_checkpoint(path)
    assert (back.step, back.state) == (3, make_snapshot().state)
    assert torch.equal(back.tensors["model"]["w"], torch.arange(6.0).reshape(2, 3))
    assert back.tensors["extra"] == {}
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_groups_asked_for_are_read(tmp_path):
    path = write_checkpoint(tmp_path, make_snapshot())
    (path / "optimizer.safetensors").unlink()
    assert list(read_checkpoint(path, groups=("model",)).tensors) == ["model"]
    with pytest.raises(DamagedCheckpointError, match="lists no file"):
        read_checkpoint(path, groups=("adapters",))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "delete"])
def test_damage_is_named(tmp_path, name, damage):
    path = write_checkpoint(tmp_path, make_snapshot())
    file = path / name
    data = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(data[: len(data) // 2])
    else:
        position = data.index(b"9") if name == "state.json" else len(data) - 1
        data[position] ^= 1
        file.write_bytes(data)
    with pytest.raises(DamagedCheckpointError, match=name):
        read_checkpoint(path)


def test_another_schema_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SCHEMA", 99)
    path = write_checkpoint(tmp_path, make_snapshot())
    monkeypatch.undo()
    with pytest.raises(ValueError, match="schema 99"):
        read_checkpoint(path)


def test_a_crash_while_writing_leaves_nothing_that_looks_complete(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, make_snapshot(1))

    def fail(path):
        raise OSError("disk full")

    monkeypatch.setattr(module, "_flush", fail)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path, make_snapshot(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_every_file_is_flushed_before_the_rename(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, module._move_into_place
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("fsync"), real_fsync(handle)))
    monkeypatch.setattr(module, "_move_into_place", lambda a, b: (events.append("rename"), real_rename(a, b)))
    write_checkpoint(tmp_path, make_snapshot())
    assert events == ["fsync"] * 5 + ["rename", "fsync"]  # 4 files and their folder, then the parent


def test_writing_a_step_again_replaces_it(tmp_path):
    path = write_checkpoint(tmp_path, make_snapshot())
    (path / "model.safetensors").write_bytes(b"damaged")
    write_checkpoint(tmp_path, make_snapshot())
    assert read_checkpoint(path).step == 3
    assert list(tmp_path.iterdir()) == [path]


def test_prune_keeps_the_newest_and_the_protected(tmp_path):
    for step in range(1, 6):
        write_checkpoint(tmp_path, make_snapshot(step))
    prune(tmp_path, keep=2, protect=2)
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000002", "step-00000004", "step-00000005"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".writing-step-00000009-77").mkdir()
    (tmp_path / ".writing-step-00000009-77" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".writing-best-77").write_text("half")
    assert find_checkpoints(tmp_path) == []
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_best_pointer(tmp_path):
    with pytest.raises(ValueError, match="no best checkpoint"):
        read_best(tmp_path)
    write_best(tmp_path, {"step": 12, "metric": "ne", "value": 0.8})
    assert read_best(tmp_path) == tmp_path / "step-00000012"
    assert json.loads((tmp_path / "best.json").read_text())["metric"] == "ne"
