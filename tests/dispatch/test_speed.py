"""A plan for a machine elsewhere takes errors from Probe and speeds from database rows, says so, and refuses what has no row."""

from dataclasses import replace
from typing import Any

import pytest

from loka.dispatch import RECIPES, Policy, make_plan
from loka.dispatch.database import Database, Machine
from loka.dispatch.rows import linear_variant
from loka.dispatch.speed import Fastest, fastest_backend
from loka.records import Choice, Plan

from .evidence import candidate, report, site
from .measured import H200, interval, origin, row

TARGET = "NVIDIA H200"
M, K, N = 32, 16, 8  # of evidence.site


def variant(gemm: str = "fprop", spec: str = "e4m3:row", weights: str = "dynamic") -> str:
    return linear_variant(gemm, spec, spec, fast_accum=True, weights=weights)  # type: ignore[arg-type]


def speed(value: float, spec: str = "e4m3:row", backend: str = "torch", **changes: Any) -> Any:
    version = {"torch": "torch 2.11.0, loka 0", "triton": "triton 3.6, loka 0"}[backend]
    fields = {"variant": variant(spec=spec), "backend": backend, "version": version, "speedup": interval(value, 0.01)}
    return row(**{"m": M, "k": K, "n": N, **fields, **changes})


def database(*rows: Any, **where: Any) -> Database:
    made = Database(":memory:")
    made.add(origin(**where), rows)
    return made


def plan(rows: Database, *sites: Any, **changes: Any) -> Plan:
    found = sites or (site("a", candidate(recipe="rowwise"), candidate(recipe="tensorwise")),)
    return make_plan(report(*found), Policy(**{"target": TARGET, **changes}), database=rows)


def choice(made: Plan) -> Choice:
    return made.sites[0].choices[0]


def test_the_fastest_backend_of_the_target_is_taken_and_cited() -> None:
    made = plan(database(speed(1.4), speed(1.6, backend="triton"), speed(1.2, spec="e4m3:tensor")))
    assert (choice(made).backend, choice(made).a) == ("triton", "e4m3:row")
    assert choice(made).expected_speedup == 1.6
    assert choice(made).expected_error == 0.05  # Probe's, from the emulation
    assert choice(made).speed_source == "database row of 2026-01-02, NVIDIA H200, driver 580, torch 2.11.0, commit abc; M 32, weights dynamic"  # fmt: skip
    assert (made.target, made.weights) == (TARGET, "dynamic")
    assert any("from database rows" in note for note in made.notes)
    assert any("tensorwise on triton: speed not known: no row" in text for text in choice(made).refusals)


def test_the_error_still_decides() -> None:
    inaccurate = site("a", candidate(recipe="rowwise", error=0.5), candidate(recipe="tensorwise"))
    made = plan(database(speed(1.6), speed(1.2, spec="e4m3:tensor")), inaccurate)
    assert choice(made).a == "e4m3:tensor"


def test_a_row_of_another_bucket_shape_or_mode_does_not_count() -> None:
    for wrong in (
        {"m": 48},
        {"k": 32},
        {"n": 16},
        {"variant": variant(weights="cached")},
        {"variant": variant("dgrad")},
    ):
        made = plan(database(speed(1.6, **wrong)))
        assert not choice(made).quantized
        assert "no row" in choice(made).reason
        assert any("no row of NVIDIA H200 for any GEMM" in note for note in made.notes)
    assert choice(plan(database(speed(1.6, variant=variant(weights="cached"))), weights="cached")).quantized


def test_a_kernel_that_refused_there_is_refused_with_its_reason() -> None:
    red = speed(9.0, microseconds=None, speedup=None, refusal="wrong: row 7")
    made = plan(database(red, speed(1.3, backend="triton")))
    assert choice(made).backend == "triton"
    assert "rowwise on torch: on NVIDIA H200: wrong: row 7" in choice(made).refusals


def test_rows_are_of_one_machine_the_newest() -> None:
    rows = database(speed(1.6))
    rows.add(origin(date="2026-02-02", torch="2.12"), [speed(1.2, version="torch 2.12, loka 0")])
    made = plan(rows)
    assert choice(made).expected_speedup == 1.2
    assert any("other installations" in note and "torch 2.11.0" in note for note in made.notes)


def test_more_rows_per_call_on_the_target() -> None:
    rows = database(speed(1.6, m=128))
    assert not choice(plan(rows)).quantized
    made = plan(rows, row_factor=4.0)
    assert choice(made).quantized
    assert any("4 times the rows" in note for note in made.notes)


def test_a_target_without_rows_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"measured there.*'test device'.*knows 'NVIDIA H100'"):
        plan(database(speed(1.6), device="NVIDIA H100"))


def test_a_backend_is_judged_by_its_own_error_where_probe_has_it() -> None:
    import msgspec

    own = msgspec.structs.replace(candidate(recipe="rowwise", error=0.9), backend="torch")
    rows = database(speed(1.6), speed(1.3, backend="triton"))
    made = plan(rows, site("a", own, candidate(recipe="rowwise")))
    assert choice(made).backend == "triton"


def test_what_probe_refused_throughout_stays_refused() -> None:
    made = plan(database(speed(1.6)), site("a", candidate(recipe="rowwise", refusal="not finite")))
    assert choice(made).reason == "rowwise on reference: not finite"


def test_a_database_may_stand_in_for_times_probe_did_not_take() -> None:
    rows = database(speed(1.6), device="test device")
    assert choice(plan(rows, target="test device")).expected_speedup == 1.6
    assert not choice(make_plan(report(site("a", candidate(recipe="rowwise"))), Policy(target="test device"))).quantized


def test_a_database_without_a_target_is_refused() -> None:
    with pytest.raises(ValueError, match="set target"):
        plan(database(speed(1.6)), target=None)
    with pytest.raises(ValueError, match="row_factor scales"):
        make_plan(report(site("a", candidate())), Policy(row_factor=2.0))


def test_auto_takes_the_shortest_time_of_this_machine_and_nothing_else() -> None:
    operands = RECIPES["rowwise"].fprop
    rows = database(
        speed(1.4, microseconds=interval(9.0)),
        speed(1.6, backend="triton", microseconds=interval(7.0)),
        speed(1.9, m=64, microseconds=interval(1.0)),
    )

    def ask(m: int = M, machine: Machine = H200, *databases: Database) -> Fastest | None:
        return fastest_backend("fprop", operands, m, K, N, databases=databases or [rows], machine=machine)

    assert ask().backend == "triton"
    assert ask(64).backend == "torch"
    assert "M 32, weights dynamic" in ask().source
    assert ask(4096) is None
    assert ask(M, replace(H200, driver="1")) is None
    assert ask(M, replace(H200, versions={**H200.versions, "triton": "another"})).backend == "torch"
    kept = database(speed(1.1, variant=variant(weights="cached"), microseconds=interval(8.0)))
    assert (
        "weights cached" in ask(M, H200, kept, rows).source
    )  # the first database with rows, as a placed linear keeps its weight
    refused = database(speed(1.0, microseconds=None, speedup=None, refusal="wrong"))
    assert ask(M, H200, refused) is None
