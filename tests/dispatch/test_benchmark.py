"""The script that measures the rows and the bar, walked on the emulation: it measures, judges, stops, and goes on where it stopped."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from loka.records import load
from loka.records.performance import PerformanceRows

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "dispatch_h200.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("dispatch_h200", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_measures_judges_and_goes_on(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        script.main(["--smoke", "--out", str(tmp_path)]) == 0
    )  # emulation is slow, so bf16 is chosen, and bf16 is the oracle
    (group,) = load(tmp_path / "rows.json", PerformanceRows).groups
    assert {row.variant.split()[0] for row in group.rows} == {"fprop", "dgrad", "wgrad"}
    assert all(row.errors["normal"].relative_l2 < 0.06 for row in group.rows)
    assert {row.m for row in group.rows} == {64, 17}  # 20 rows are measured at 17, the edge of their bucket
    judged = json.loads((tmp_path / "dispatch.json").read_text())["pairs"]
    assert len(judged) == 6
    assert judged["fprop 20x13x27"]["default"]["choice"] == "bf16"
    capsys.readouterr()
    script.main(["--smoke", "--out", str(tmp_path)])
    assert "0 jobs measured" in capsys.readouterr().out


def test_a_crash_is_remembered(script: Any, tmp_path: Path) -> None:
    job = script.SiteJob("fprop", 20, 13, 27, script.candidates_for("fprop", ["reference", "fbgemm"]))
    case = script.encode_case(job, job.candidates, {})
    (tmp_path / "running.json").write_text(json.dumps(case))
    run = script.Run(tmp_path, 10.0, "cpu", 3)
    rows = [row for _, row in run.database.entries()]
    assert {row.backend for row in rows} == {"fbgemm"}
    assert {row.refusal for row in rows} == {"the process ended while this job ran"}
    assert not (tmp_path / "running.json").exists()


def test_the_summary_is_the_bar(script: Any) -> None:
    def pair(speedup: float, oracle: float, red: bool = False) -> dict[str, Any]:
        entry = {"choice": "x", "speedup": speedup, "red": red}
        return {"gemm": "fprop", "shape": [1, 1, 1], "oracle_speedup": oracle, "any gain": entry, "default": entry}

    found = script.summarise({"a": pair(1.0, 1.0), "b": pair(1.5, 2.0), "c": pair(0.9, 1.0), "d": pair(1.0, 1.0, True)})
    summary = found["any gain, fprop"]
    assert summary["of_oracle"] == pytest.approx((1.0 * 0.75 * 0.9) ** (1 / 3))
    assert summary["slowdown_against_bf16"] == pytest.approx(1 / 0.9)
    assert summary["red"] == ["d"]


def test_the_shapes_are_those_of_the_bar(script: Any) -> None:
    shapes = script.SHAPES
    assert len(set(shapes)) == len(shapes) >= 40
    assert min(m for m, _, _ in shapes) == 64
    assert max(m for m, _, _ in shapes) == 32768
    assert max(max(k, n) for _, k, n in shapes) == 16384
    assert {13, 27, 479} <= {size for _, k, n in shapes for size in (k, n)}
    assert any(m != script.bucket_of(m) for m, _, _ in shapes)  # the buckets are put to the test too
    for group in ("wukong", "models"):
        jobs = script.jobs_of(group, dict.fromkeys(("fprop", "dgrad", "wgrad"), ()), shapes)
        assert all(job.m == script.bucket_of(job.m) for job, _ in jobs)
