from types import SimpleNamespace

import pytest
import torch

from loka.kernels import registry
from loka.kernels.scaled_mm import reference
from loka.measure import bench
from loka.measure.adapter import ADAPTERS, adapter_for, parse_variant
from loka.records import from_json, to_json
from loka.records.performance import KernelBench, KernelRow, Peaks

SMALL = {"device": "cpu", "repeats": 3, "isolate": False, "seconds": 60.0}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three made-up backends beside the reference: one wrong, one raising, one refusing."""

    def wrong(a, b, **options):
        return reference.run(a, b, **options) * 1.1

    def raising(a, b, **options):
        raise RuntimeError("no kernel image for this device")

    yes = reference.supports
    modules = {
        "wrong": SimpleNamespace(supports=yes, run=wrong),
        "raising": SimpleNamespace(supports=yes, run=raising),
        "reference": reference,
        "torch": registry.backend("scaled_mm", "torch"),
    }
    monkeypatch.setitem(registry.BACKENDS, "scaled_mm", tuple(modules))
    for name, module in modules.items():
        monkeypatch.setitem(registry._LOADED, f"scaled_mm.{name}", module)


def test_red_backends_are_listed_and_not_timed(planted: None) -> None:
    config = bench.BenchConfig(
        shapes=[(16, 64, 32)], variants=["e4m3:row@e4m3:row"], backends=tuple(registry.BACKENDS["scaled_mm"]), **SMALL
    )
    record = bench.run(config, command="test")
    rows = {row.backend: row for row in record.rows}
    assert list(rows) == ["bf16", "wrong", "raising", "reference", "torch"]
    assert rows["wrong"].refusal.startswith("wrong on normal: ")
    assert rows["wrong"].red
    assert not rows["raising"].red
    assert rows["raising"].refusal == "RuntimeError: no kernel image for this device"
    assert rows["torch"].refusal == "needs a CUDA GPU, not cpu"
    assert all(rows[name].microseconds is None for name in ("wrong", "raising", "torch"))
    assert rows["reference"].error <= rows["reference"].tolerance
    assert rows["reference"].microseconds.value > 0
    assert rows["reference"].speedup.low <= rows["reference"].speedup.value
    assert rows["bf16"].speedup is None
    assert record.method == "perf_counter on a CPU"
    assert from_json(to_json(record), KernelBench) == record
    text = bench.table(record)
    assert "wrong: wrong on normal" in text
    assert "16x64x32 e4m3:row @ e4m3:row" in text


def test_children_give_the_same_answers() -> None:
    config = bench.BenchConfig(
        shapes=[(8, 64, 16)],
        variants=["e4m3:tensor@e4m3:tensor"],
        backends=("reference",),
        **{**SMALL, "isolate": True, "seconds": 120},
    )
    rows = {row.backend: row for row in bench.run(config, command="test").rows}
    assert rows["reference"].refusal is None
    assert rows["reference"].microseconds.value > 0


def test_other_ops_plug_in() -> None:
    config = bench.BenchConfig(op="quantize", shapes=[(16, 256, 1)], backends=("reference",), **SMALL)
    rows = [row for row in bench.run(config, command="test").rows if row.backend == "reference"]
    assert len(rows) == len(ADAPTERS["quantize"].VARIANTS)
    assert all(row.refusal is None and row.error == 0.0 for row in rows)
    assert all(row.roofline_microseconds > 0 for row in rows)  # bytes only: a CPU has a copy bandwidth too


@pytest.mark.parametrize("op", sorted(ADAPTERS))
def test_calls_survive_the_trip_to_a_child(op: str) -> None:
    adapter = adapter_for(op)
    for call in adapter.calls([(3, 128, 5), (4, 13, 7)], adapter.VARIANTS):
        assert adapter.decode(adapter.encode(call)) == call


def test_the_roofline_is_the_larger_term() -> None:
    adapter = adapter_for("scaled_mm")
    call = parse_variant("e4m3:tensor@e4m3:tensor", (8192, 4096, 4096))
    slow_memory = Peaks(copy_bytes_per_second=1e9, bf16_flops=1e15, fp8_flops=1e15)
    slow_units = Peaks(copy_bytes_per_second=1e15, bf16_flops=1e12, fp8_flops=1e12)
    bytes_moved = 8192 * 4096 + 4096 * 4096 + 2 * 8192 * 4096
    assert bench.roofline_microseconds(adapter, call, slow_memory) == pytest.approx(1e6 * bytes_moved / 1e9)
    assert bench.roofline_microseconds(adapter, call, slow_units) == pytest.approx(1e6 * 2 * 8192 * 4096 * 4096 / 1e12)
    assert bench.roofline_microseconds(adapter, call, Peaks(copy_bytes_per_second=1e9)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "nothing"}, "no op"),
        ({"backends": ("nothing",)}, "no backend nothing"),
        ({"repeats": 1}, "at least 3 repeats"),
        ({"shapes": ()}, "needs shapes"),
    ],
)
def test_impossible_requests_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench.BenchConfig(**{**SMALL, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_gpu_that_is_not_there_is_said() -> None:
    with pytest.raises(ValueError, match="no usable GPU"):
        bench.BenchConfig(device="cuda")


@pytest.mark.parametrize("text", ["e4m3:row", "e4m3:row@e4m3:row|int8", "e4m3:row@e4m3:row|float16|float32"])
def test_variants_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="variant"):
        parse_variant(text, (1, 1, 1))


def test_a_row_is_refused_or_timed_never_both() -> None:
    with pytest.raises(ValueError, match="one of them is wrong"):
        KernelRow(
            op="x", call="y", shape={}, backend="z", refusal="broken", microseconds={"value": 1, "low": 1, "high": 1}
        )
