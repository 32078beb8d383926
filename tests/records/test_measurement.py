"""Measured values: how an interval reads, and what an environment says."""

import pytest

from loka.records import Interval, capture_environment


@pytest.mark.parametrize(
    ("spec", "text"),
    [("+.2%", "+1.00% [-2.00%, +3.51%]"), (".3f", "0.010 [-0.020, 0.035]"), (".2fx", "0.01x [-0.02, 0.04]")],
)
def test_an_interval_is_its_value_and_its_ends_in_one_format(spec: str, text: str) -> None:
    assert f"{Interval(value=0.01, low=-0.02, high=0.0351):{spec}}" == text


def test_an_interval_contains_its_value() -> None:
    with pytest.raises(ValueError, match="does not contain its value 2"):
        Interval(value=2.0, low=0.0, high=1.0)


@pytest.mark.parametrize(
    ("called", "said"),
    [("/x/loka/__main__.py", "loka demo"), ("/x/mine/__main__.py", "python -m mine demo"), ("/x/loka", "loka demo")],
)
def test_a_command_can_be_called_again(called: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [called, "demo"])
    assert capture_environment().command == said


def test_folders_of_this_machine_are_in_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/tool", "--out=/home/somebody/runs/x", "/data/file", "plain"])
    assert capture_environment().command == "tool --out=x file plain"
