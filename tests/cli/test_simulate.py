"""`loka simulate`: says that it is a simulation, compares codecs, refuses what it does not know."""

import json

import pytest
from typer.testing import CliRunner

from loka.cli import app

ASK = ["simulate", "--forward", "4", "--backward", "8", "--dense", "60e6", "--embeddings", "13.6e6", "--gpus", "8,64"]


def test_every_line_says_simulated_and_a_codec_is_named() -> None:
    done = CliRunner().invoke(app, ASK, obj={})
    assert done.exit_code == 0
    assert done.stdout.count("simulated:") == 6
    assert "best: bf16" in done.stdout
    assert "best: e4m3:1x128:pow2" in done.stdout
    assert "not a measurement" in done.stderr


def test_json_is_labelled_too() -> None:
    done = CliRunner().invoke(app, [*ASK, "--json"], obj={})
    record = json.loads(done.stdout)
    assert record["simulation"] is True
    assert {step["gpus"] for step in record["steps"]} == {8, 64}


def test_unknown_machines_and_broken_nodes_are_refused() -> None:
    unknown = CliRunner().invoke(app, [*ASK, "--machine", "abacus"], obj={})
    assert isinstance(unknown.exception, ValueError)
    assert "h200-ndr" in str(unknown.exception)
    assert isinstance(CliRunner().invoke(app, [*ASK[:-1], "12"], obj={}).exception, ValueError)


@pytest.mark.parametrize(("option", "value"), [("--forward", "nan"), ("--backward", "inf"), ("--dense", "1e999"), ("--update", "-1")])  # fmt: skip
def test_amounts_that_are_no_finite_number_are_named(option: str, value: str) -> None:
    done = CliRunner().invoke(app, [*ASK, option, value], obj={})
    assert isinstance(done.exception, ValueError)
    assert f"{option} {float(value):g}: expected a finite number, 0 or more" in str(done.exception)


def test_a_step_without_communication_compares_no_codecs() -> None:
    done = CliRunner().invoke(app, [*ASK[:5], "--gpus", "8"], obj={})
    assert isinstance(done.exception, ValueError)
    assert "expected --dense, --embeddings or both" in str(done.exception)
