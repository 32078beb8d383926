"""benchmarks/quantizers_sweep.py counts what the maths needs, draws widths of every kind, and runs."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from forked import run_script
from loka.formats import Spec
from loka.kernels.quantize import QuantizeCall

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quantizers_sweep.py"


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantizers_sweep", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("spec", "turned", "bytes_an_element"),
    [
        ("e4m3:row", None, 3),
        ("e4m3:tensor", None, 5),
        ("e4m3:tensor:static", "e4m3:tensor:static", 4),
        ("e4m3:1x128", "e4m3:1x128", 4),
        ("e4m3:row", "e4m3:row", 6),
        ("e4m3:tensor", "e4m3:tensor", 6),
    ],
)
def test_bytes_the_maths_needs(sweep: ModuleType, spec: str, turned: str | None, bytes_an_element: int) -> None:
    call = QuantizeCall(7, 11, Spec.parse(spec), transpose=Spec.parse(turned) if turned else None)
    assert sweep.bytes_needed(call) == 7 * 11 * bytes_an_element


def test_shapes_are_of_every_kind_and_the_same_each_time(sweep: ModuleType) -> None:
    shapes = sweep.draw_shapes(40, 0, 1 << 30)
    assert shapes == sweep.draw_shapes(40, 0, 1 << 30)
    assert len(shapes) == 40
    assert all(64 <= m <= 32768 and 256 <= k <= 8192 for m, k in shapes)
    assert {k % 16 == 0 for _, k in shapes} == {True, False}
    assert any(k % 2 for _, k in shapes)


def test_it_runs(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    options = ["--device", "cpu", "--backend", "reference", "--shapes", "1", "--largest", "33", "--repeats", "3"]
    code, said = run_script(SCRIPT, *options, "--out", str(out))
    assert code == 0, said
    record = json.loads(out.read_text())
    assert len(record["rows"]) == 10
    assert all(row["percent"] > 0 for row in record["rows"])
    assert record["summary"][0]["shapes"] == 1
