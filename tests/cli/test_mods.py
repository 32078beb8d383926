"""`loka mods` and `loka train --mods`, over synthetic data."""

import json

import pytest
import typer
from typer.testing import CliRunner

from loka import records
from loka.cli.mods import app
from loka.cli.train import train

DATA = ["--data", "synthetic", "--data-option", "rows=6000", "--data-option", "cardinality=200"]
DATA += ["--data-option", "categorical=6", "--data-option", "dense=4", "--data-option", "max_history=3"]
TRAIN = [
    *DATA,
    "--model",
    "wukong",
    "--batch-size",
    "128",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--set",
    "activation=silu",
]


def invoke(command, *options):
    return CliRunner().invoke(command, list(map(str, options)))


@pytest.fixture
def run():
    command = typer.Typer()
    command.command()(train)
    return lambda *options: invoke(command, *TRAIN, *options)


def test_list_names_every_mod_with_its_class():
    done = invoke(app, "list", "--json")
    rows = {row["mod"]: row["effect"] for row in json.loads(done.stdout)}
    assert rows["align_shapes"] == "exact"
    assert rows["no_bias"] == "architecture"
    assert "drop the biases" in invoke(app, "list").stdout


def test_apply_prints_what_would_change_and_why_not(tmp_path):
    done = invoke(app, "apply", *DATA, "--model", "wukong:tiny", "--out", tmp_path / "mods.json")
    assert done.exit_code == 0, done.output
    assert "left core.head.last: a prediction layer keeps its bias" in done.stdout
    summary = records.load(tmp_path / "mods.json", records.ModSummary)
    assert summary.mods == ["no_bias", "block_norm", "hard_swish"]
    assert invoke(app, "apply", *DATA, "--mods", "magic").exception is not None


def test_a_trained_model_is_modified_and_fine_tuned_and_what_came_back_is_reported(run, tmp_path):
    done = run("--steps", 60, "--learning-rate", 3e-3, "--evaluate-every", 0, "--out", tmp_path / "a")
    assert done.exit_code == 0, done.stderr
    start = tmp_path / "a" / "checkpoints" / "step-00000060"
    options = ("--from", start, "--mods", "no_bias,block_norm,hard_swish", "--steps", 40, "--learning-rate", 3e-3)
    done = run(*options, "--evaluate-every", 0, "--out", tmp_path / "b")
    assert done.exit_code == 0, done.stderr
    summary = records.load(tmp_path / "b" / "mods.json", records.ModSummary)
    loss = next(r for r in summary.recovery if r.metric == "log_loss")
    trained = records.load(tmp_path / "a" / "run.json", records.Run).metrics["log_loss"]
    assert loss.before == pytest.approx(trained, abs=1e-6), "before its mods it is the model that was trained"
    assert loss.after_mods > loss.before
    assert loss.after_training < loss.after_mods, "the fine-tune wins something back"
    assert "recovery  log_loss" in done.stdout
    assert json.loads((tmp_path / "b" / "model.json").read_text())["mods"] == "no_bias,block_norm,hard_swish"
    again = run(
        "--from", tmp_path / "b" / "checkpoints" / "step-00000040", "--mods", "no_bias,block_norm,hard_swish",
        "--steps", 1, "--learning-rate", 1e-12, "--embedding-learning-rate", 1e-12, "--evaluate-every", 0, "--json",
    )  # fmt: skip
    assert again.exit_code == 0, again.stderr
    modified = records.from_json(again.stdout, records.Run).metrics["log_loss"]
    assert modified == pytest.approx(loss.after_training, abs=1e-4), "a checkpoint of the modified model loads as it is"


def test_a_modified_run_resumes(run, tmp_path):
    common = ("--mods", "block_norm", "--evaluate-every", 0, "--out", tmp_path / "a")
    assert run(*common, "--steps", 3).exit_code == 0
    done = run(*common, "--steps", 5, "--resume")
    assert done.exit_code == 0, done.stderr
    assert "mods: " in done.stderr


def test_exact_mods_cost_a_trained_model_nothing(run, tmp_path):
    assert run("--steps", 10, "--evaluate-every", 0, "--out", tmp_path / "a").exit_code == 0
    start = tmp_path / "a" / "checkpoints" / "step-00000010"
    done = run("--from", start, "--mods", "align_shapes", "--steps", 1, "--evaluate-every", 0, "--out", tmp_path / "b")
    assert done.exit_code == 0, done.stderr
    for found in records.load(tmp_path / "b" / "mods.json", records.ModSummary).recovery:
        assert found.after_mods == pytest.approx(found.before, abs=1e-6)


def test_unknown_mods_are_refused(run):
    done = run("--mods", "magic", "--steps", 1)
    assert isinstance(done.exception, ValueError)
    assert "no mod 'magic'" in str(done.exception)
