import importlib.util
import io
import json

import pytest

from loka.training import JsonlLog, Progress, TensorBoard, TrainConfig, Trainer

from .toy import make_data, make_model

FAST = {"batch_size": 50, "device": "cpu", "log_every": 2, "evaluate_every": 4}


def run(callbacks, steps=4, resume=False, **keywords):
    config = TrainConfig(**FAST, steps=steps)
    return Trainer(make_model(), make_data(), config, callbacks=callbacks, **keywords).fit(resume=resume)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_a_line_per_log_step_and_per_evaluation(tmp_path):
    run([JsonlLog(tmp_path / "a" / "log.jsonl")])
    lines = read(tmp_path / "a" / "log.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 4]
    assert set(lines[0]) == {"step", "loss", "ne", "lr", "examples", "examples_per_s", "seconds"}
    assert set(lines[2]) == {"step", "evaluation"}
    assert 0 < lines[2]["evaluation"]["ne"] < 2


def test_a_resumed_log_reads_as_if_nothing_had_happened(tmp_path):
    log = tmp_path / "log.jsonl"
    run([JsonlLog(log)], out=tmp_path)
    with log.open("a") as file:  # what a killed run wrote beyond its checkpoint, and a torn line
        file.write('{"step": 6, "loss": 1.0}\n{"step": 8, "lo')
    run([JsonlLog(log)], steps=8, resume=True, out=tmp_path)
    assert [line["step"] for line in read(log)] == [2, 4, 4, 6, 8, 8]
    assert all("lr" in line for line in read(log) if "evaluation" not in line)


def test_a_fresh_run_starts_a_fresh_log(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    run([JsonlLog(tmp_path / "log.jsonl")])
    assert [line["step"] for line in read(tmp_path / "log.jsonl")] == [2, 4, 4]


def test_a_failing_run_leaves_its_error_in_the_log(tmp_path):
    def fail(model):
        raise ValueError("no such split")

    config = TrainConfig(**FAST, steps=4)
    log = JsonlLog(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="no such split"):
        Trainer(make_model(), make_data(), config, callbacks=[log], evaluate_fn=fail).fit()
    assert read(tmp_path / "log.jsonl")[-1] == {"step": 4, "error": "ValueError: no such split"}


def test_nan_becomes_null(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl")
    trainer = Trainer(make_model(), make_data(), TrainConfig(**FAST, steps=1))
    log.on_start(trainer)
    log.on_evaluate(trainer, {"ne": float("nan"), "loss": 1.0})
    assert read(tmp_path / "log.jsonl") == [{"step": 0, "evaluation": {"ne": None, "loss": 1.0}}]


def test_progress_shows_loss_ne_speed_and_validation():
    from rich.console import Console

    out = io.StringIO()
    run([Progress(Console(file=out, width=80, force_terminal=True))])
    text = out.getvalue()
    for part in ("loss 0.", "NE ", "ex/s", "valid ne", "4/4"):
        assert part in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text  # nothing is cut off


def test_progress_of_a_model_without_ne_does_not_name_it():
    from types import SimpleNamespace as Of

    from rich.console import Console

    out = io.StringIO()
    bar = Progress(Console(file=out, width=80))
    trainer = Of(step=1, config=Of(steps=1))
    bar.on_start(trainer)
    bar.on_step_end(trainer, Of(loss=2.5, ne=None, examples_per_s=1000.0))
    assert "loss 2.5000  1,000 ex/s" in out.getvalue()


def test_a_log_gets_a_line_while_the_run_goes_on():
    """A bar that is drawn at the end only would leave the log of a long run empty."""
    from rich.console import Console

    class Seen(Progress):
        def on_step_end(self, trainer, log):
            super().on_step_end(trainer, log)
            after.append(out.getvalue().count("\n"))

    out, after = io.StringIO(), []
    run([Seen(Console(file=out, width=20))])
    assert after == [0, 1, 1, 2]
    first, second, third = out.getvalue().splitlines()
    assert first.startswith("train 2/4  loss 0.")
    assert first.endswith("ex/s")
    assert second.startswith("train 4/4  loss 0.")
    assert third.startswith("train 4/4  valid ne ")


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_tensorboard_that_is_not_installed_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match=r"loka\[tensorboard\]"):
        TensorBoard(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_tensorboard_writes_scalars(tmp_path):
    run([TensorBoard(tmp_path)])
    assert any(path.name.startswith("events") for path in tmp_path.iterdir())
