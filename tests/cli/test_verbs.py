"""report and demo as a person would type them."""

import json
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loka import data, records
from loka.cli import app
from loka.records import Comparison

runner = CliRunner()


def test_demo_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import loka.demo

    synthetic = data.load("synthetic", rows=1500, dense=2, categorical=3, cardinality=20)
    real = loka.demo.Demo

    class Small(real):  # type: ignore[misc, valid-type]
        def __init__(self, *words: object, **options: object) -> None:
            super().__init__(*words, load_data=lambda name: synthetic, **options)

    monkeypatch.setattr(loka.demo, "Demo", Small)
    monkeypatch.setattr(
        loka.demo.DemoConfig,
        "for_device",
        partial(loka.demo.DemoConfig, batch_size=64, tune_batches=4, large="tiny", large_rows=64),
    )
    out = tmp_path / "out"
    words = ["demo", "--out", str(out), "--size", "tiny", "--steps", "3", "--more-steps", "2"]
    result = runner.invoke(app, words, obj={})
    assert result.exit_code == 0, result.output
    assert len(result.stdout.strip().splitlines()) == 6
    command = f"loka demo --steps 3 --more-steps 2 --size tiny --out {out}"
    assert command in (out / "report.html").read_text(encoding="utf-8")

    again = runner.invoke(app, [*words, "--json"], obj={})
    found = json.loads(again.stdout)
    assert "report" in found["resumed"]
    assert found["comparisons"]["planned"]["candidate"] == "planned FP8"
    stored = records.load(out / "records" / "comparison-planned.json", Comparison)
    assert found["comparisons"]["planned"]["relative_change"]["value"] == stored.relative_change.value

    page = tmp_path / "again.html"
    result = runner.invoke(app, ["report", str(out / "records"), "--out", str(page)], obj={})
    assert result.exit_code == 0, result.output
    assert page.read_text(encoding="utf-8") == (out / "report.html").read_text(encoding="utf-8")
