"""`loka probe` as a person would type it: built-in and own models, Ctrl-C and --resume, refusals."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from loka.cli import app
from loka.cli.probe import Meter, spell_seconds
from loka.cli.subject import Subject
from loka.probe import Report

runner = CliRunner()
HERE = __name__
QUICK = [
    "--steps",
    "4",
    "--batch-size",
    "32",
    "--every",
    "2",
    "--samples",
    "2",
    "--recipe",
    "rowwise",
    "--device",
    "cpu",
]
OWN = ["probe", "--model", f"{HERE}:factory", "--data", f"{HERE}:batches", *QUICK, "--sensitivity", "64"]
SYNTHETIC = [
    "--data",
    "synthetic",
    *(w for o in ("rows=256", "dense=2", "categorical=2", "cardinality=10") for w in ("--data-option", o)),
]


def factory() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 1))


def batches(split: str, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed + 1000 * (split == "valid"))
    for _ in range(3):
        x = torch.randn(batch_size, 6, generator=generator)
        yield x, (x[:, :1] > 0).float()


def diverging(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square() * float("inf")


def run(words: list[str], code: int = 0) -> Any:
    result = runner.invoke(app, words, obj={})
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_ones_own_model(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    result = run([*OWN, "--out", str(out)])
    assert "safe" in result.stdout
    told = [line for line in result.stderr.splitlines() if line.startswith("evaluate: ")]
    kernels = re.fullmatch(
        r"evaluate: 0 of (\d+), kernels", told[0]
    )  # each part of the work begins with a line of its own
    assert kernels is not None
    assert told[1] == f"evaluate: {kernels[1]} of {kernels[1]}, 0 s left, kernels"
    assert told[2] == "evaluate: 0 of 3, 0"
    report = Report.load(out).record
    assert report.model == f"{HERE}:factory"
    assert report.data == f"{HERE}:batches"
    assert (report.steps, len(report.sites)) == (4, 3)
    assert report.judged_on == ["rows", "copula", "gaussian"]
    assert report.flops_of == "model"
    assert report.sensitivity is not None
    assert "held-out" in report.sensitivity
    assert all(site.metric_change is not None for site in report.sites)
    assert all(site.verdicts[0].speed == "not measured" for site in report.sites)
    assert {e.source for c in report.sites[0].candidates for e in c.errors} == {"rows", "copula", "gaussian", "normal"}


def test_a_built_in_model_as_json_and_as_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run(["probe", "--model", "dlrm", *SYNTHETIC, *QUICK, "--sensitivity", "0", "--json", "--html", str(page)])
    record = json.loads(result.stdout)
    assert record["kind"] == "probe"
    assert record["combined_change"] is None
    assert page.stat().st_size > 1000


def test_other_kinds_of_sites_are_evaluated_too() -> None:
    words = ["probe", "--model", "dlrm", *SYNTHETIC, *QUICK, "--sensitivity", "0", "--json"]
    sites = json.loads(run([*words, "--kind", "linear", "--kind", "batched", "--kind", "lookup"]).stdout)["sites"]
    found = {site["type"]: site for site in sites}
    assert {"Linear", "DotInteraction", "Embedding"} <= found.keys()
    assert found["DotInteraction"]["candidates"]
    assert not found["Embedding"]["gemms"]


def test_ctrl_c_keeps_what_was_learned_and_resume_ends_where_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    run([*OWN, "--out", str(whole)])
    real = Subject.stream

    def interrupted(self: Subject, split: str = "train", *, skip: int = 0) -> Iterator[Any]:
        for number, batch in enumerate(real(self, split, skip=skip)):
            if number == 2:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(Subject, "stream", interrupted)
        result = runner.invoke(app, [*OWN, "--out", str(parts)], obj={})
    assert result.exit_code != 0
    assert "the state after 2 steps is saved" in result.stderr
    assert not parts.exists()
    result = run([*OWN, "--out", str(parts), "--resume"])
    assert "continuing after 2 steps" in result.stderr
    assert Report.load(parts).record.sites == Report.load(whole).record.sites
    again = run([*OWN, "--out", str(parts), "--resume"])  # trained already: evaluates only
    assert "continuing after 4 steps" in again.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "give --out"),
        (["--steps", "0"], "--steps 0"),
        (["--metric", "auc"], "no metric 'auc'"),
        (["--recipe", "magic"], "no recipe 'magic'"),
        (["--kind", "cubic"], "cubic"),
        (["--backend", "abacus"], "abacus"),
    ],
)
def test_what_cannot_be_done_says_why(words: list[str], message: str) -> None:
    result = runner.invoke(app, [*OWN, *words], obj={})
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_another_jobs_state_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    run([*OWN, "--out", str(out)])
    result = runner.invoke(app, [*OWN, "--out", str(out), "--resume", "--seed", "3"], obj={})
    assert "seed: 0 -> 3" in str(result.exception)
    result = runner.invoke(app, [*OWN, "--out", str(tmp_path / "other.json"), "--resume"], obj={})
    assert "there is no state" in str(result.exception)
    (tmp_path / "bad.json.state.safetensors").write_bytes(b"nothing")
    result = runner.invoke(app, [*OWN, "--out", str(tmp_path / "bad.json"), "--resume"], obj={})
    assert "is not a state of `loka probe`" in str(result.exception)


def test_a_loss_that_explodes_is_a_finding() -> None:
    result = run([*OWN, "--loss", f"{HERE}:diverging"], code=1)
    assert "the loss is" in result.stderr


def test_the_meter_tells_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    meter = Meter("work")
    meter("first", 0, 10)
    meter("second", 1, 10)  # too soon
    meter("", 10, 10)
    assert capsys.readouterr().err.splitlines() == ["work: 0 of 10, first", "work: 10 of 10, 0 s left"]
    meter("third", 0, 10)  # another part of the work
    assert capsys.readouterr().err.splitlines() == ["work: 0 of 10, third"]
    assert spell_seconds(90) == "90 s"
    assert spell_seconds(600) == "10 min"
