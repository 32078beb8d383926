"""The script that measures the bars, walked on the emulation: every section runs, is gated, and leaves its record."""

from pathlib import Path

from forked import run_script
from loka.records import load
from loka.records.performance import KernelBench

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernels_h200.py"


def test_every_section_leaves_a_record(tmp_path: Path) -> None:
    code, said = run_script(SCRIPT, "--smoke", "--out", str(tmp_path))
    assert code == 1, said  # emulation meets no bar, and that is said
    assert "MISSED" in said
    found = {path.stem: load(path, KernelBench) for path in tmp_path.glob("*.json")}
    assert set(found) == {"quantize", "norm_quantize", "scaled_mm", "fused_linear", "fused_linear_training"}
    for record in found.values():
        assert all(row.refusal is None and row.microseconds is not None for row in record.rows), said
        assert record.method == "perf_counter on a CPU"
    training = [row.backend for row in found["fused_linear_training"].rows]
    assert training == ["bf16", "reference", "reference, exact wgrad"]
    assert any("share of copy bandwidth" in note for note in found["quantize"].notes)


def test_unknown_sections_are_refused(tmp_path: Path) -> None:
    code, said = run_script(SCRIPT, "--smoke", "--only", "everything", "--out", str(tmp_path))
    assert code == 2
    assert "no section everything" in said
