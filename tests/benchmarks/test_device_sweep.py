"""The sweep tells green, wrong, refused, failed and not run apart, names every shape that is not green, and ends in time."""

import importlib.util
import itertools
import json
from pathlib import Path

from forked import run_script

FOLDER = Path(__file__).parents[2] / "benchmarks"


def load():
    spec = importlib.util.spec_from_file_location("device_sweep", FOLDER / "device_sweep.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(shape: str, variant: str = "e4m3:row@e4m3:row|fast", **fields):
    return {"variant": variant, "shape": shape, "ok": False, "reason": "", "error": None, "tolerance": None, **fields}


def test_every_shape_that_is_not_green_is_named() -> None:
    sweep = load()
    other = "e4m3:1x128@e4m3:128x128"
    found = sweep.describe(
        [
            row("1x16x16", ok=True, error=0.001, tolerance=0.004),
            row("2x16x16", ok=True, error=0.003, tolerance=0.004),
            row("3x16x16", reason="wrong on normal: row 1", error=0.5, tolerance=0.004),
            row("4x16x16", reason="wants K of 128"),
            row("5x16x16", failure="killed by SIGSEGV"),
            row("6x16x16", not_run=True),
            row("1x16x16", other, reason="has no kernel"),
            row("2x16x16", other, reason="has no kernel"),
            row("6x16x16", other, not_run=True),
        ]
    )
    assert found["counts"] == {"green": 2, "wrong": 1, "refused": 3, "failed": 1, "not_run": 2}
    assert found["worst_error_over_tolerance"] == 0.75
    assert [(w["shape"], w["reason"]) for w in found["wrong"]] == [("3x16x16", "wrong on normal: row 1")]
    assert [(f["shape"], f["failure"]) for f in found["failed"]] == [("5x16x16", "killed by SIGSEGV")]
    assert found["refused"] == {
        "wants K of 128": {"e4m3:row@e4m3:row|fast": ["4x16x16"]},
        "has no kernel": {other: "all"},
    }


def test_the_calls_are_seeded_and_steps_of_16_and_128() -> None:
    sweep = load()
    calls = list(sweep.calls(40, 3, 1 << 27))
    assert calls == list(sweep.calls(40, 3, 1 << 27))
    assert calls != list(sweep.calls(40, 4, 1 << 27))
    shapes = list(dict.fromkeys(shape for _, shape in calls))
    assert len(shapes) == 40
    assert all(k % 16 == n % 16 == 0 and 1 <= m <= 65536 and max(m * k, k * n, m * n) <= 1 << 27 for m, k, n in shapes)
    assert any(k % 128 == n % 128 == 0 for _, k, n in shapes)
    assert any(k % 128 and n % 128 for _, k, n in shapes)
    assert {variant for variant, _ in calls} == {*sweep.MAIN, *sweep.ALSO}


def test_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    words = ["--sweep", "3", "--seconds", "60", "--device", "cpu", "--backends", "reference,deepgemm", "--elements", "30000", "--out", str(out)]  # fmt: skip
    code, said = run_script(FOLDER / "device_libraries.py", *words)
    assert code == 0, said[-2000:]
    found = json.loads(out.read_text())["sweep"]["backends"]
    assert found["reference"]["counts"] == {"green": 15, "wrong": 0, "refused": 0, "failed": 0, "not_run": 0}
    assert found["deepgemm"]["counts"]["refused"] == 15
    assert "needs a CUDA GPU, not cpu" in found["deepgemm"]["refused"]
    assert "reference: 15 green" in said


def test_what_the_time_did_not_reach_is_counted(tmp_path: Path) -> None:
    sweep = load()
    made = sweep.run(["reference"], "cpu", count=2, seed=0, seconds=0.0, elements=30000, out=str(tmp_path / "s.json"))
    assert sweep.describe(made.rows["reference"])["counts"]["not_run"] == 11
    assert json.loads((tmp_path / "s.json").read_text())["sweep"]["backends"]["reference"]["counts"]["green"] == 0


def test_the_wide_sweep_is_seeded_wide_and_ends_in_time() -> None:
    shapes, again = (list(load().wide_sweep(seed=5, seconds=3000, clock=itertools.count().__next__)) for _ in range(2))
    assert shapes == again
    assert 1000 < len(shapes) <= 3000
    assert all(k % 16 == 0 and n % 16 == 0 for _, k, n in shapes)
    assert sum(k % 128 == 0 and n % 128 == 0 for _, k, n in shapes) > len(shapes) // 3
    assert sum(k % 128 != 0 for _, k, n in shapes) > len(shapes) // 3
    assert min(m for m, _, _ in shapes) == 1
    assert max(m for m, _, _ in shapes) > 30000
