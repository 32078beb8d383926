import pytest
import torch

from loka.training import Callback, CallbackState, TrainConfig, Trainer
from loka.training.ranks import Ranks

from .toy import make_data, make_model

FAST = {"steps": 6, "batch_size": 50, "device": "cpu", "log_every": 3, "evaluate_every": 3}


class Recorder(Callback):
    def __init__(self, name="recorder"):
        self.events, self._name = [], name
        self.total = torch.zeros(2)
        self.resumed = None

    @property
    def name(self):
        return self._name

    def on_start(self, trainer):
        self.events.append(("start", trainer.step))

    def on_step_begin(self, trainer):
        self.events.append(("begin", trainer.step))

    def on_step_end(self, trainer, log):
        self.total += 1
        self.events.append(("end", trainer.step, None if log is None else log.step))

    def on_evaluate(self, trainer, metrics):
        self.events.append(("evaluate", trainer.step, sorted(metrics)))

    def on_checkpoint(self, trainer):
        self.events.append(("checkpoint", trainer.step))
        return CallbackState({"total": self.total}, {"events": len(self.events)})

    def on_resume(self, trainer, state):
        self.resumed = state
        self.total = state.tensors["total"].clone()

    def on_end(self, trainer, result):
        self.events.append(("finish", result.steps))


def test_every_moment_comes_in_order(tmp_path):
    recorder = Recorder()
    config = TrainConfig(**{**FAST, "steps": 3, "log_every": 2})
    Trainer(make_model(), make_data(), config, callbacks=[recorder], out=tmp_path).fit()
    assert recorder.events == [
        ("start", 0),
        ("begin", 0),
        ("end", 1, None),
        ("begin", 1),
        ("end", 2, 2),
        ("begin", 2),
        ("end", 3, 3),
        ("evaluate", 3, ["auc", "log_loss", "loss", "ne"]),
        ("checkpoint", 3),
        ("finish", 3),
    ]


def test_log_lines_carry_the_numbers():
    lines = []

    class Collect(Callback):
        def on_step_end(self, trainer, log):
            lines.extend([] if log is None else [log])

    Trainer(make_model(), make_data(), TrainConfig(**FAST), callbacks=[Collect()]).fit()
    assert [(line.step, line.examples, line.learning_rate) for line in lines] == [(3, 150, 1e-3), (6, 300, 1e-3)]
    assert all(0.3 < line.loss < 1.5 and line.ne > 0.5 and line.examples_per_s > 0 for line in lines)
    assert lines[0].seconds < lines[1].seconds


def test_state_comes_back_after_a_resume(tmp_path):
    config = TrainConfig(**FAST)
    Trainer(make_model(), make_data(), config, callbacks=[Recorder()], out=tmp_path).fit()
    other = Recorder()
    longer = TrainConfig(**{**FAST, "steps": 8})
    Trainer(make_model(), make_data(), longer, callbacks=[other, Callback()], out=tmp_path).fit(resume=True)
    assert other.resumed.tensors["total"].tolist() == [6.0, 6.0]
    assert other.resumed.values == {"events": 17}  # start, 6 x 2 steps, 2 evaluations, 2 checkpoints
    assert other.total.tolist() == [8.0, 8.0]
    assert other.events[0] == ("start", 6)


def test_a_checkpointed_tensor_is_a_copy(tmp_path):
    """The recorder goes on changing its tensor while the checkpoint is written."""
    from loka.training import find_checkpoints, read_checkpoint

    config = TrainConfig(**{**FAST, "evaluate_every": 0, "checkpoint_every": 2, "keep": 9})
    Trainer(make_model(), make_data(), config, callbacks=[Recorder()], out=tmp_path).fit()
    found = [read_checkpoint(path) for path in find_checkpoints(tmp_path / "checkpoints")]
    assert [snapshot.tensors["extra"]["callback/recorder/total"][0].item() for snapshot in found] == [2.0, 4.0, 6.0]


def test_two_callbacks_of_one_name_are_refused():
    with pytest.raises(ValueError, match="names must differ"):
        Trainer(make_model(), make_data(), TrainConfig(**FAST), callbacks=[Recorder(), Recorder()])


def test_other_ranks_run_only_what_asks_for_it(monkeypatch):
    monkeypatch.setattr(Ranks, "find", lambda: Ranks(1, 2))
    every = Recorder("every")
    every.every_rank = True
    trainer = Trainer(make_model(), make_data(), TrainConfig(**FAST), callbacks=[Recorder(), every])
    assert trainer.callbacks == [every]


def test_a_failing_run_tells_its_callbacks_instead_of_ending():
    told = []

    class Fail(Callback):
        def on_step_begin(self, trainer):
            if trainer.step == 2:
                raise KeyboardInterrupt

        def on_error(self, trainer, error):
            told.append((trainer.step, type(error)))

    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        Trainer(make_model(), make_data(), TrainConfig(**FAST), callbacks=[Fail(), recorder]).fit()
    assert told == [(2, KeyboardInterrupt)]
    assert "finish" not in [event[0] for event in recorder.events]
