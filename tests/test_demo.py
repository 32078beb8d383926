"""The whole job on a small generated data set: every station, interruption at each of them, and changed settings."""

from pathlib import Path

import pytest
import torch

from loka import records
from loka.data import RankingData, load
from loka.demo import Demo, DemoConfig
from loka.demo.job import ARMS
from loka.records import Comparison, DriftReport, ModSummary, Plan, ProbeReport, Progress, Run
from loka.records.speeds import TargetSpeeds

SETTINGS = DemoConfig(
    size="tiny", steps=12, more_steps=6, batch_size=64, probe_every=4, rows=64, samples=2, sensitivity_examples=500
)
STATIONS = ("train", "probe", "mods", "plan", *ARMS, "swap", "compare", "report")


def generated(name: str) -> RankingData:
    return load("synthetic", rows=2000, dense=4, categorical=4, cardinality=50)


class KilledError(Exception):
    """Stands for a killed process."""


def interrupt_at(station: str, step: int = 0) -> object:
    def talk(name: str, done: int, total: int | None) -> None:
        if name == station and done >= step:
            raise KilledError(station)

    return talk


def make(out: Path, config: DemoConfig = SETTINGS, **options: object) -> Demo:
    return Demo(out, config, load_data=generated, command="loka demo", **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "out"
    make(out).run()
    return out


def test_every_station_leaves_its_records(finished: Path) -> None:
    folder = finished / "records"
    probe = records.load(folder / "probe.json", ProbeReport)
    assert probe.sampled_steps == 3
    assert probe.flops_of == "model"
    plan = records.load(folder / "plan.json", Plan)
    assert plan.min_speedup is None
    assert 0 < plan.low_precision_share < 1
    naive = records.load(folder / "plan-naive.json", Plan)
    assert all(choice.quantized for site in naive.sites for choice in site.choices)
    runs = {arm: records.load(folder / f"run-{arm}.json", Run) for arm in ARMS}
    assert runs["high"].low_precision_flops_share == 0
    assert runs["planned"].low_precision_flops_share == plan.low_precision_share
    assert all(run.curve and 0.3 < run.metrics["auc"] < 1 for run in runs.values())
    comparison = records.load(folder / "comparison-naive.json", Comparison)
    assert comparison.pairs == 1000
    assert comparison.relative_change.low < comparison.relative_change.high
    swapped = records.load(folder / "comparison-swap-planned.json", Comparison)
    assert swapped.baseline == "high precision"
    assert swapped.relative_change.value != 0
    assert all(site.metric_change is not None for site in probe.sites)
    assert "<!doctype html>" in (finished / "report.html").read_text(encoding="utf-8")


def test_the_prediction_layer_is_protected_in_the_plan_only(finished: Path) -> None:
    plan, naive = (records.load(finished / "records" / f"{name}.json", Plan) for name in ("plan", "plan-naive"))
    heads = [next(s for s in p.sites if s.site == "core.head.last") for p in (plan, naive)]
    assert [any(c.quantized for c in head.choices) for head in heads] == [False, True]


def test_a_plan_for_a_machine_elsewhere_is_labelled(finished: Path) -> None:
    folder = finished / "records"
    there = records.load(folder / "plan-elsewhere.json", Plan)
    assert there.target == "NVIDIA H200"
    assert any("not of this machine" in note for note in there.notes)
    chosen = [c for site in there.sites for c in site.choices if c.quantized]
    assert all(c.speed_source and "NVIDIA H200" in c.speed_source for c in chosen)
    speeds = records.load(folder / "speeds-elsewhere.json", TargetSpeeds)
    assert all("database row" in row.source for row in speeds.rows)
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "The plan for NVIDIA H200" in page
    assert "When FP8 pays" in page


def test_mods_are_recorded(finished: Path) -> None:
    summary = records.load(finished / "records" / "mods.json", ModSummary)
    assert "protect_intermediates" in [mod.split("(")[0] for mod in summary.mods]
    assert summary.effect != "architecture"
    assert any(change.site == "core.head.last" for change in summary.changed)
    assert records.load(finished / "records" / "drift.json", DriftReport).steps == SETTINGS.steps


def test_the_arms_start_alike_and_differ_by_precision(finished: Path) -> None:
    from safetensors.torch import load_file

    losses = {arm: load_file(finished / arm / "test.safetensors")["losses"] for arm in ARMS}
    assert not torch.equal(losses["high"], losses["control"])
    nudged = float((losses["control"] - losses["high"]).abs().max())
    low = float((losses["naive"] - losses["high"]).abs().max())
    assert 0 < nudged < 0.05
    assert low > nudged


def test_run_again_it_has_nothing_to_do(finished: Path) -> None:
    before = (finished / "report.html").stat().st_mtime_ns
    result = make(finished).run()
    assert result.resumed == STATIONS
    assert result.restarted is None
    assert (finished / "report.html").stat().st_mtime_ns == before
    lines = result.lines()
    assert len(lines) == 5
    assert "linears run in FP8" in lines[0]
    assert lines[-1].endswith("report.html")


@pytest.mark.parametrize(("station", "step"), [("train", 5), ("probe", 2), ("planned", 3), ("compare", 0)])
def test_interrupted_it_continues_to_the_same_result(station: str, step: int, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        make(tmp_path / "out", talk=interrupt_at(station, step)).run()
    stored = records.load(tmp_path / "out" / "progress.json", Progress)
    assert stored.done == list(STATIONS[: STATIONS.index(station)])
    result = make(tmp_path / "out").run()
    assert result.resumed == tuple(stored.done)
    for arm in ("planned", "naive", "swap-naive"):
        found, expected = (
            records.load(folder / "records" / f"comparison-{arm}.json", Comparison)
            for folder in (tmp_path / "out", finished)
        )
        assert found == expected


def test_other_settings_start_anew_and_say_so(finished: Path, tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "out"
    shutil.copytree(finished, out)
    config = DemoConfig(**{**SETTINGS.__dict__, "seed": 1})
    result = make(out, config).run()
    assert result.resumed == ()
    assert result.restarted is not None
    assert "seed: 0 -> 1" in result.restarted


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not delete")
    with pytest.raises(ValueError, match="holds other files"):
        make(tmp_path).run()
    assert (tmp_path / "thesis.txt").read_text() == "do not delete"


@pytest.mark.parametrize("options", [{"steps": 0}, {"margin": 0.0}, {"samples": 0}])
def test_nonsense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        DemoConfig(**options)  # type: ignore[arg-type]


def test_a_gpu_gets_a_model_large_enough_to_gain() -> None:
    small, large = DemoConfig.for_device("cpu"), DemoConfig.for_device("cuda:0")
    assert small == DemoConfig()
    assert (large.size, large.batch_size, large.device) == ("wide", 8192, "cuda:0")
    assert DemoConfig.for_device("cuda", size="tiny", steps=3).steps == 3
