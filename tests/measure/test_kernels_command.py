"""`loka bench kernels` on the emulation."""

import json

import pytest
import typer
from typer.testing import CliRunner

from loka.cli.bench import kernels, parse_shapes
from loka.records import load
from loka.records.performance import KernelBench

app = typer.Typer()
app.command()(kernels)
CPU = ["--device", "cpu", "--no-isolate", "--backends", "reference,torch", "--repeats", "3", "--shapes", "8x64x16"]


def test_it_prints_a_table_and_writes_a_record(tmp_path) -> None:
    out = tmp_path / "bench.json"
    result = CliRunner().invoke(app, [*CPU, "--variants", "e4m3:row@e4m3:row", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "torch: needs a CUDA GPU, not cpu" in result.output
    record = load(out, KernelBench)
    assert [row.backend for row in record.rows] == ["bf16", "reference", "torch"]


def test_json_is_the_record() -> None:
    result = CliRunner().invoke(app, [*CPU, "--variants", "e4m3:1x128@e4m3:128x128", "--json"])
    assert json.loads(result.output)["kind"] == "kernel_bench"


def test_a_red_kernel_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from loka.kernels.scaled_mm import reference

    right = reference.run
    monkeypatch.setattr(reference, "run", lambda a, b, **options: right(a, b, **options) * 1.1)
    result = CliRunner().invoke(app, [*CPU, "--variants", "e4m3:row@e4m3:row"])
    assert result.exit_code == 1
    assert "reference: wrong on normal" in result.output


@pytest.mark.parametrize("text", ["8x64", "8x64xn", "", "8x64x16,"])
def test_shapes_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="MxKxN"):
        parse_shapes(text)


def test_empty_shapes_and_unknown_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="'8x0x16' is empty"):
        parse_shapes("8x0x16")
    assert parse_shapes("8x64", "norm_quantize") == [(8, 64, 1)]
    found = CliRunner().invoke(app, ["--device", "abacus"])
    assert isinstance(found.exception, ValueError)
    assert "--device abacus: " in str(found.exception)
