import threading
import time

import pytest

from loka.training import checkpoint as module
from loka.training import find_checkpoints
from loka.training.checkpoint import Saver

from .test_checkpoint import make_snapshot


def test_saving_does_not_block_and_only_one_write_is_in_flight(tmp_path, monkeypatch):
    release, started, real = threading.Event(), [], module.write_checkpoint

    def slow(folder, snapshot):
        started.append(snapshot.step)
        assert release.wait(10)
        return real(folder, snapshot)

    monkeypatch.setattr(module, "write_checkpoint", slow)
    saver = Saver(tmp_path, keep=5)
    saver.save(make_snapshot(1))  # returns although nothing has been written
    assert find_checkpoints(tmp_path) == []
    second = threading.Thread(target=saver.save, args=(make_snapshot(2),))
    second.start()
    time.sleep(0.05)
    assert started == [1]
    release.set()
    second.join()
    saver.wait()
    assert started == [1, 2]
    assert len(find_checkpoints(tmp_path)) == 2
    assert saver.last == tmp_path / "step-00000002"


def test_an_error_of_the_thread_surfaces_at_the_next_save(tmp_path, monkeypatch):
    def fail(folder, snapshot):
        raise OSError("disk full")

    monkeypatch.setattr(module, "write_checkpoint", fail)
    saver = Saver(tmp_path, keep=1)
    saver.save(make_snapshot(1))
    with pytest.raises(RuntimeError, match="disk full"):
        saver.save(make_snapshot(2))
    saver.wait()  # reported once


def test_the_best_step_survives_pruning(tmp_path):
    saver = Saver(tmp_path, keep=1)
    for step in range(1, 5):
        snapshot = make_snapshot(step)
        snapshot.state["monitor"]["best"] = {"step": min(step, 2), "metric": "ne", "value": 0.5}
        saver.save(snapshot)
    saver.wait()
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-00000002", "step-00000004"]
    assert module.Path(tmp_path / "best.json").exists()


def test_a_write_is_still_pending_after_an_interrupted_wait(tmp_path, monkeypatch):
    saver = Saver(tmp_path, keep=1)
    saver.save(make_snapshot(1))
    pending = saver._pending
    with monkeypatch.context() as patch:
        patch.setattr(pending, "exception", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.wait()
    assert saver._pending is pending
    saver.wait()
    assert saver._pending is None
    assert len(find_checkpoints(tmp_path)) == 1


def interrupt():
    raise KeyboardInterrupt
