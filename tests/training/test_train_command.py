"""`loka train` and the real rooms under it: synthetic data, rankers, metrics, records."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from loka import records
from loka.cli.train import parse_options, train
from loka.data import load
from loka.models import build_ranker
from loka.training import TrainConfig, Trainer, read_checkpoint, seed_everything

from .toy import assert_same_bits

DATA = {"rows": 4000, "cardinality": 200, "categorical": 6, "dense": 4, "max_history": 5}
OPTIONS = [
    "--model",
    "dlrm",
    "--data",
    "synthetic",
    "--batch-size",
    "128",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--seed",
    "3",
]
OPTIONS += [part for name, value in DATA.items() for part in ("--data-option", f"{name}={value}")]


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(train)
    threads = torch.get_num_threads()
    yield lambda *options: CliRunner().invoke(app, [*OPTIONS, *map(str, options)])
    torch.set_num_threads(threads)


def test_a_run_prints_a_record_and_leaves_its_files(invoke, tmp_path):
    done = invoke("--steps", 60, "--evaluate-every", 20, "--log-every", 20, "--out", tmp_path / "x", "--json")
    assert done.exit_code == 0, done.stderr
    run = records.from_json(done.stdout, records.Run)
    assert (run.model, run.data, run.steps, run.examples, run.seed) == ("dlrm tiny", "synthetic", 60, 60 * 128, 3)
    assert [point.step for point in run.curve] == [20, 40, 60]
    assert run.metrics["auc"] > 0.5
    assert run == records.load(tmp_path / "x" / "run.json", records.Run)
    assert "compiled: nothing (auto:" in done.stderr
    assert json.loads((tmp_path / "x" / "model.json").read_text())["data_options"] == DATA
    result = json.loads((tmp_path / "x" / "result.json").read_text())
    assert result["best"]["metric"] == "ne"
    assert len((tmp_path / "x" / "log.jsonl").read_text().splitlines()) == 6


def test_a_run_in_low_precision_says_how_much_of_it_was(invoke, tmp_path):
    done = invoke("--steps", 3, "--evaluate-every", 0, "--recipe", "rowwise", "--out", tmp_path / "x", "--json")
    assert done.exit_code == 0, done.stderr
    run = records.from_json(done.stdout, records.Run)
    conversion = records.load(tmp_path / "x" / "conversion.json", records.Conversion)
    assert 0 < run.low_precision_flops_share == conversion.low_precision_share
    assert conversion.flops_of == "model"


def test_learning_finds_what_the_teacher_hid(invoke):
    done = invoke("--data-option", "rows=20000", "--steps", 120, "--learning-rate", 3e-3, "--evaluate-every", 0)
    assert done.exit_code == 0, done.stderr
    metrics = dict(zip(*[iter(done.stdout.splitlines()[-1].split()[1:])] * 2, strict=True))
    assert float(metrics["auc"]) > 0.6
    assert float(metrics["ne"]) < 1.0


def test_an_interrupted_run_resumes_to_the_same_bits_and_the_whole_curve(invoke, tmp_path):
    common = ["--evaluate-every", 20, "--log-every", 10, "--checkpoint-every", 10, "--precision", "bf16"]
    assert invoke(*common, "--steps", 40, "--out", tmp_path / "whole").exit_code == 0
    assert invoke(*common, "--steps", 20, "--out", tmp_path / "cut").exit_code == 0
    again = invoke(*common, "--steps", 40, "--out", tmp_path / "cut", "--resume", "--json")
    assert again.exit_code == 0, again.stderr
    ends = [read_checkpoint(tmp_path / name / "checkpoints" / "step-00000040") for name in ("whole", "cut")]
    for group in ("model", "optimizer"):
        assert_same_bits(ends[0].tensors[group], ends[1].tensors[group])
    assert [point.step for point in records.from_json(again.stdout, records.Run).curve] == [10, 20, 30, 40]


def test_from_starts_a_new_run_with_old_weights(invoke, tmp_path):
    assert invoke("--steps", 20, "--out", tmp_path / "a").exit_code == 0
    start = tmp_path / "a" / "checkpoints" / "step-00000020"
    done = invoke(
        "--steps",
        1,
        "--learning-rate",
        1e-12,
        "--embedding-learning-rate",
        1e-12,
        "--out",
        tmp_path / "b",
        "--from",
        start,
    )
    assert done.exit_code == 0, done.stderr
    old, new = (
        read_checkpoint(p, groups=("model",)) for p in (start, tmp_path / "b" / "checkpoints" / "step-00000001")
    )
    for name, tensor in old.tensors["model"].items():
        torch.testing.assert_close(new.tensors["model"][name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "tf32"], "tf32"),
        (["--precision", "fp8"], "precision must be one of"),
        (["--model", "gpt"], "no model family 'gpt'"),
        (["--config", "huge"], "no size 'huge'"),
        (["--resume"], "--out"),
        (["--tensorboard"], "--out"),
        (["--fallback", "--out", "y"], "needs --resume"),
        (["--set", "norm"], "name=value"),
        (["--set", "colour=blue"], "no option 'colour'"),
        (["--monitor", "revenue"], "monitor_direction"),
        (["--resume", "--from", "x", "--out", "y"], "choose one"),
        (["--steps", "0"], "steps must be at least 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(invoke, options, message):
    done = invoke(*options)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
    assert done.stdout == ""


def test_a_loss_that_explodes_is_exit_1(invoke):
    done = invoke("--steps", 50, "--learning-rate", 1e30)
    assert done.exit_code == 1
    assert "not finite" in done.stderr


def test_several_processes_are_refused(invoke, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = invoke("--steps", 1)
    assert isinstance(done.exception, ValueError)
    assert "WORLD_SIZE" in str(done.exception)


def test_options_are_json_where_they_can_be():
    assert parse_options(["a=1", "b=block", "c=[1, 2]", "d=true", "e=x=y"]) == {
        "a": 1,
        "b": "block",
        "c": (1, 2),
        "d": True,
        "e": "x=y",
    }
    assert parse_options(None) == {}


@pytest.mark.slow
def test_a_compiled_ranker_learns_what_an_eager_one_learns():
    data = load("synthetic", **DATA)
    losses = []
    for request in ("off", "on"):
        seed_everything(0)
        model = build_ranker(data.schema, "dlrm", "tiny", sparse=True)
        config = TrainConfig(steps=8, batch_size=128, device="cpu", compile=request, log_every=8)
        result = Trainer(model, data, config).fit()
        losses.append(result.loss)
    assert result.compile.modules == ("core", "dense")
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
