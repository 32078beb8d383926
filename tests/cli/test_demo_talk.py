"""What `loka demo` says while it runs, to a log."""

import importlib

import pytest

demo = importlib.import_module("loka.cli.demo")  # `loka.cli.demo` is the verb, this is its file


def test_a_log_gets_a_line_a_station_and_one_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
    talk = demo.Lines()
    for seconds, station, done, total in ((0, "train", 0, None), (5, "train", 3, 400), (31, "train", 90, 400), (2, "size", 0, None)):  # fmt: skip
        now[0] += seconds
        talk(station, done, total)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "    0 s  train in float32",
        "   36 s  train in float32 90 of 400",
        "   38 s  estimate speeds on a GPU",
    ]
