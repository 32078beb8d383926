"""Rows come from timings and from the package, and say which versions they hold for."""

from loka.dispatch.database import Database
from loka.dispatch.rows import (
    linear_variant,
    machine_here,
    rows_of_timings,
    shipped,
    versions_of,
)
from loka.formats import Spec
from loka.kernels.scaled_mm import GemmWay
from loka.measure.site import NO_GPU, SiteJob, SiteTiming

from .evidence import HERE
from .measured import interval

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


def test_what_ships_can_be_merged() -> None:
    for name, record in shipped():
        database = Database(":memory:")
        assert database.merge(record) == sum(len(group.rows) for group in record.groups), name
