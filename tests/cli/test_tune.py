"""`loka tune` in a log: what it is doing goes to stderr line by line, what it found to stdout."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from loka.cli import app
from loka.cli.analyze import _shorten
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of
from loka.serving import load_ranker, open_model

HERE = __name__


def factory() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))


def batches(split: str, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for seed in range(4):
        x = torch.randn(batch_size, 16, generator=torch.Generator().manual_seed(seed))
        yield x, (x[:, :1] > 0).float()


def test_a_log_is_told_what_it_is_doing(tmp_path: Path) -> None:
    words = ["tune", f"{HERE}:factory", "--data", f"{HERE}:batches", "--batch-size", "32", "--train-steps", "3", "--out", str(tmp_path / "out")]  # fmt: skip
    done = CliRunner().invoke(app, words, obj={})
    assert done.exit_code in (0, 1), (done.output, done.exception)
    told = [line.split(" s  ", 1)[-1] for line in done.stderr.splitlines()]
    assert told[:2] == ["train first", "look"]
    assert done.stdout.startswith("Sequential: ")
    assert json.loads((tmp_path / "out" / "tuning.json").read_text())["metric_name"] == "loss"


def test_a_cut_name_shows_that_it_is_cut() -> None:
    assert _shorten("core.head.last") == "core.head.last"
    assert _shorten("core.layers.0.fmb.mlp.layers.0.linear", 20) == "…mlp.layers.0.linear"


def test_what_is_tuned_for_serving_is_served(tmp_path: Path) -> None:
    """The folder that is written answers as the model does that was measured."""
    out = tmp_path / "out"
    words = [
        "tune",
        "dlrm:tiny",
        "--data",
        "synthetic",
        "--serve",
        "--batch-size",
        "128",
        "--batches",
        "4",
        "--margin",
        "0.5",
    ]
    words += ["--train-steps", "3", "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(app, words, obj={})
    assert done.exit_code == 0, (done.output, done.exception)
    assert f"{out / 'ranker'}" in done.stderr
    loaded = load_ranker(out / "ranker")
    converted = [name for name, _ in chains_of(loaded.model)] + [name for name, _ in linears_of(loaded.model)]
    assert converted, "nothing is in low precision: the test would show nothing"
    assert open_model(out / "ranker").buckets


def test_initial_weights_are_named_at_once(tmp_path: Path) -> None:
    """A built-in model without --train-steps and --checkpoint; an own factory may load its weights itself."""
    words = ["tune", "dlrm:tiny", "--data", "synthetic", "--device", "cpu", "--batch-size", "128", "--batches", "2"]
    done = CliRunner().invoke(app, [*words, "--margin", "0.5", "--out", str(tmp_path / "random")], obj={})
    assert done.stderr.startswith("note: dlrm:tiny has its initial weights")
    words = ["tune", f"{HERE}:factory", "--data", f"{HERE}:batches", "--batch-size", "32"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "own")], obj={})
    assert done.exit_code in (0, 1)
    assert "initial weights" not in done.stderr


def test_data_options_reach_the_data(tmp_path: Path) -> None:
    words = ["tune", f"{HERE}:factory", "--data", f"{HERE}:batches", "--data-option", "rows=9", "--out", str(tmp_path)]
    refused = CliRunner().invoke(app, words, obj={})
    assert "it takes no data options" in str(refused.exception)
    words = ["tune", "dlrm:tiny", "--data", "synthetic", "--data-option", "rows=0", "--out", str(tmp_path)]
    assert "rows >= 1" in str(CliRunner().invoke(app, words, obj={}).exception)
