import json
import math
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from forked import finish, start
from loka.training import (
    Callback,
    DamagedCheckpointError,
    JsonlLog,
    TrainConfig,
    Trainer,
    find_checkpoints,
    load_weights,
    read_checkpoint,
    seed_everything,
)
from loka.training.snapshot import find_nonfinite

from .child import CONFIG, go_on, train_slowly
from .toy import assert_same_bits, make_data, make_model, weights_of

FAST = {"steps": 12, "batch_size": 32, "device": "cpu", "checkpoint_every": 4, "keep": 9, "evaluate_every": 6}


class Stop(Exception):  # noqa: N818
    pass


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, trainer):
        if trainer.step == self.step:
            raise Stop


class Noise(Callback):
    """Uses every generator that a snapshot promises to restore."""

    def __init__(self):
        self.drawn = []

    def on_step_end(self, trainer, log):
        self.drawn.append((trainer.step, random.random(), float(np.random.rand()), float(torch.rand(()))))


def last_logged_step(folder):
    log = Path(folder) / "log.jsonl"
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def run_whole(folder):
    """The same run in this process, on one thread like the children."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        callbacks = [JsonlLog(folder / "log.jsonl")]
        Trainer(make_model(), make_data(), TrainConfig(**CONFIG), callbacks=callbacks, out=folder).fit()
    finally:
        torch.set_num_threads(threads)


def test_a_run_killed_with_sigkill_and_resumed_ends_with_the_same_bits(tmp_path):
    killed = start(train_slowly, str(tmp_path / "killed"), said=tmp_path / "said")
    deadline = time.monotonic() + 200
    while last_logged_step(tmp_path / "killed") < 25:
        assert killed.exitcode is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    assert finish(killed, 60) == -signal.SIGKILL
    found = find_checkpoints(tmp_path / "killed" / "checkpoints")
    assert found
    assert 0 < int(found[-1].name[-8:]) < CONFIG["steps"]
    resumed = start(go_on, str(tmp_path / "killed"), said=tmp_path / "said")
    run_whole(tmp_path / "whole")
    assert finish(resumed, 200) == 0, (tmp_path / "said").read_text()
    ends = [read_checkpoint(tmp_path / name / "checkpoints" / "step-00000060") for name in ("killed", "whole")]
    for group in ("model", "optimizer", "extra"):
        assert_same_bits(ends[0].tensors[group], ends[1].tensors[group])
    states = [{**end.state, "counters": {**end.state["counters"], "train_seconds": 0}} for end in ends]
    assert states[0] == states[1]
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("killed", "whole")]
    losses = [
        [(line["step"], line.get("loss"), line.get("evaluation")) for line in map(json.loads, log)] for log in logs
    ]
    assert losses[0] == losses[1]


def test_resuming_restores_every_generator(tmp_path):
    config = TrainConfig(**FAST)
    whole = Noise()
    Trainer(make_model(), make_data(), config, callbacks=[whole], out=tmp_path / "whole").fit()
    with pytest.raises(Stop):
        Trainer(make_model(), make_data(), config, callbacks=[Noise(), StopAt(10)], out=tmp_path / "cut").fit()
    random.seed(99)
    np.random.seed(99)
    rest = Noise()
    result = Trainer(make_model(seed=5), make_data(), config, callbacks=[rest], out=tmp_path / "cut").fit(resume=True)
    assert result.resumed_from == 8
    assert rest.drawn == whole.drawn[8:]


def test_resuming_without_a_checkpoint_starts_at_the_beginning(tmp_path):
    models = [make_model(), make_model()]
    Trainer(models[0], make_data(), TrainConfig(**FAST), out=tmp_path / "a").fit()
    result = Trainer(models[1], make_data(), TrainConfig(**FAST), out=tmp_path / "b").fit(resume=True)
    assert result.resumed_from is None
    assert_same_bits(weights_of(models[0]), weights_of(models[1]))


def test_a_finished_run_resumes_to_itself(tmp_path):
    first = Trainer(make_model(), make_data(), TrainConfig(**FAST), out=tmp_path)
    before = first.fit()
    again = Trainer(make_model(seed=3), make_data(), TrainConfig(**FAST), out=tmp_path)
    after = again.fit(resume=True)
    assert_same_bits(weights_of(first.module), weights_of(again.module))
    assert (after.steps, after.examples, after.metrics, after.best) == (12, 384, before.metrics, before.best)


def test_resuming_with_other_settings_is_refused_by_name(tmp_path):
    Trainer(make_model(), make_data(), TrainConfig(**FAST), out=tmp_path).fit()
    other = TrainConfig(**FAST, learning_rate=0.5)
    with pytest.raises(ValueError, match=r"learning_rate: 0\.001 -> 0\.5"):
        Trainer(make_model(), make_data(), other, out=tmp_path).fit(resume=True)


def test_resuming_needs_a_folder():
    with pytest.raises(ValueError, match="out="):
        Trainer(make_model(), make_data(), TrainConfig(steps=1, device="cpu")).fit(resume=True)


def test_a_damaged_newest_checkpoint_is_an_error_unless_the_fallback_is_allowed(tmp_path):
    config, whole = TrainConfig(**FAST), make_model()
    Trainer(whole, make_data(), config, out=tmp_path).fit()
    newest = tmp_path / "checkpoints" / "step-00000012" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-3])
    with pytest.raises(DamagedCheckpointError, match=r"step-00000012: optimizer\.safetensors.*fallback"):
        Trainer(make_model(), make_data(), config, out=tmp_path).fit(resume=True)
    model = make_model()
    result = Trainer(model, make_data(), config, out=tmp_path).fit(resume=True, fallback=True)
    assert result.resumed_from == 8
    assert "step-00000012" in result.damaged[0]
    assert_same_bits(weights_of(model), weights_of(whole))


def test_no_readable_checkpoint_at_all_is_an_error_even_with_fallback(tmp_path):
    Trainer(make_model(), make_data(), TrainConfig(**FAST), out=tmp_path).fit()
    for path in find_checkpoints(tmp_path / "checkpoints"):
        (path / "state.json").write_text("{")
    with pytest.raises(DamagedCheckpointError, match="no checkpoint"):
        Trainer(make_model(), make_data(), TrainConfig(**FAST), out=tmp_path).fit(resume=True, fallback=True)


def test_weights_of_another_model_are_refused(tmp_path):
    Trainer(make_model(), make_data(), TrainConfig(**FAST), out=tmp_path).fit()
    with pytest.raises(ValueError, match="do not fit"):
        load_weights(make_model(labels=3), tmp_path / "checkpoints" / "step-00000012")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_parameter_that_is_not_finite_is_found(value):
    model = make_model()
    assert find_nonfinite(model) == []
    with torch.no_grad():
        model.table.weight[3, 1] = value
        model.core[4].bias[0] = value
    assert find_nonfinite(model) == ["table.weight", "core.4.bias"]


def test_seeding_covers_all_generators():
    draws = []
    for _ in range(2):
        seed_everything(5)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert draws[0] == draws[1]
