"""Rows come from timings, from benchmark records and from the package, and say which versions they hold for."""

from pathlib import Path
from typing import Any

import pytest

from loka.dispatch.database import Database, Key
from loka.dispatch.rows import (
    linear_variant,
    machine_here,
    origin_of,
    rows_of_bench,
    rows_of_timings,
    shipped,
    versions_of,
)
from loka.formats import Spec
from loka.kernels.scaled_mm import GemmWay
from loka.measure.site import NO_GPU, SiteJob, SiteTiming
from loka.records import load
from loka.records.performance import KernelBench, KernelRow

from .evidence import HERE
from .measured import interval

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "h200"
ROW = Spec.parse("e4m3:row")


def test_variants_are_spelled_one_way() -> None:
    spell = {"fast_accum": True, "weights": "cached"}
    assert linear_variant("fprop", "a", "b", **spell) == "fprop a @ b fast, weights cached"  # type: ignore[arg-type]
    assert linear_variant("wgrad", "a", "b", fast_accum=False, weights="cached") == "wgrad a @ b"


def test_versions_name_the_library_and_loka() -> None:
    versions = versions_of(HERE)
    assert versions["torch"] == "torch 2, loka 0"
    assert versions["bf16"] == "torch 2"
    assert versions["triton"] == "triton absent, loka 0"
    assert versions["deepgemm"].startswith("deepgemm ")
    assert machine_here(HERE).versions == versions


def test_a_timing_becomes_a_row_and_what_was_not_tried_does_not() -> None:
    made = [GemmWay(ROW, ROW, True, backend) for backend in ("torch", "triton", "fbgemm", "deepgemm")]
    timings = [
        SiteTiming(made[0], interval(10.0), interval(1.5), baseline=interval(15.0), error=0.001, tolerance=0.002, errors={"normal": {"mere": 0.1, "relative_l2": 0.04}}),
        SiteTiming(made[1], refusal="wrong: row 3", error=0.5, tolerance=0.002),
        SiteTiming(made[2], refusal=NO_GPU),
        SiteTiming(made[3], refusal="not timed: the time box was used up"),
    ]  # fmt: skip
    rows = rows_of_timings(SiteJob("fprop", 64, 32, 16, tuple(made)), timings, versions_of(HERE))
    assert [(r.backend, r.refusal) for r in rows] == [("torch", None), ("triton", "wrong: row 3")]
    assert rows[0].variant == "fprop e4m3:row @ e4m3:row fast, weights dynamic"
    assert rows[0].errors["normal"].mere == 0.1
    assert rows[0].version == "torch 2, loka 0"


def bench_row(**changes: Any) -> KernelRow:
    fields: dict[str, Any] = {
        "op": "scaled_mm", "call": "2048x64x32 e4m3:row @ e4m3:row -> bfloat16 fast", "shape": {"m": 2048, "k": 64, "n": 32},
        "backend": "torch", "microseconds": interval(4.0),
    }  # fmt: skip
    return KernelRow(**{**fields, **changes})


def test_a_benchmark_record_is_imported_where_it_holds_what_is_needed() -> None:
    record = KernelBench(
        method="test",
        peaks=None,
        rows=[
            bench_row(),
            bench_row(backend="bf16", microseconds=interval(8.0)),
            bench_row(backend="gemm torch"),
            bench_row(shape={"m": 2000, "k": 64, "n": 32}),
            bench_row(backend="triton", microseconds=None, refusal="not timed: crashed"),
            bench_row(backend="triton", microseconds=None, refusal="no kernel"),
            bench_row(backend="fbgemm"),
        ],
        environment=HERE,
    )
    imported = rows_of_bench(record)
    assert [(r.backend, r.refusal) for r in imported.rows] == [
        ("torch", None),
        ("bf16", None),
        ("triton", "no kernel"),
    ]
    assert imported.rows[0].variant == "e4m3:row @ e4m3:row -> bfloat16 fast"
    assert imported.rows[0].baseline == interval(8.0)
    assert imported.origin == origin_of(HERE)
    assert sum(imported.skipped.values()) == 4
    assert "the record does not say which version of fbgemm it timed" in imported.skipped
    assert any("edge of a bucket" in reason for reason in imported.skipped)


@pytest.mark.parametrize("name", ["scaled_mm", "quantize", "norm_quantize", "fused_linear"])
def test_the_committed_h200_records_can_be_asked(name: str) -> None:
    imported = rows_of_bench(load(RESULTS / f"{name}.json", KernelBench))
    database = Database(":memory:")
    database.add(imported.origin, imported.rows)
    (machine,) = database.machines()
    assert machine.device == "NVIDIA H200"
    timed = [r for r in imported.rows if r.backend == "triton" and r.microseconds]
    assert timed
    for r in timed:
        assert database.find(Key(r.op, r.variant, r.m, r.k, r.n, "triton"), machine).row == r


def test_what_ships_can_be_merged() -> None:
    for name, record in shipped():
        database = Database(":memory:")
        assert database.merge(record) == sum(len(group.rows) for group in record.groups), name
