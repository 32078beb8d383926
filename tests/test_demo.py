"""The whole job on a small generated data set: every station, interruption at each of them, and changed settings."""

import sys
from pathlib import Path

import pytest
import torch

from loka import records
from loka.data import RankingData, load
from loka.demo import Demo, DemoConfig
from loka.demo.job import ARMS
from loka.records import Comparison, Conversion, Progress, Run
from loka.records.tuning import SizeEstimates, Tuning

SETTINGS = DemoConfig(size="tiny", steps=12, more_steps=6, batch_size=64, tune_batches=6, tune_margin=0.05)
STATIONS = ("train", "tune", "size", *ARMS, "swap", "compare", "report")


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
    tuning = records.load(folder / "tuning.json", Tuning)
    assert tuning.conversion is not None
    assert tuning.speedup is None, "nothing is timed on a CPU"
    assert 0 < tuning.plan.low_precision_share < 1
    runs = {arm: records.load(folder / f"run-{arm}.json", Run) for arm in ARMS}
    assert runs["high"].low_precision_flops_share == 0
    assert 0 < runs["planned"].low_precision_flops_share < runs["naive"].low_precision_flops_share
    assert all(run.curve and 0.3 < run.metrics["auc"] < 1 for run in runs.values())
    comparison = records.load(folder / "comparison-naive.json", Comparison)
    assert comparison.pairs == 1000
    assert comparison.relative_change.low < comparison.relative_change.high
    swapped = records.load(folder / "comparison-swap-planned.json", Comparison)
    assert swapped.baseline == "high precision"
    assert swapped.relative_change.value != 0
    assert "<!doctype html>" in (finished / "report.html").read_text(encoding="utf-8")


def test_the_plan_is_what_the_planned_run_runs(finished: Path) -> None:
    tuning = records.load(finished / "records" / "tuning.json", Tuning)
    planned, naive = (records.load(finished / arm / "conversion.json", Conversion) for arm in ("planned", "naive"))
    assert planned.converted == tuning.conversion.converted
    assert planned.plan == tuning.plan.seal.sha256
    assert "core.head.last" in planned.kept
    assert "core.head.last" in naive.converted


def test_speeds_are_estimated_and_called_so(finished: Path) -> None:
    sizes = records.load(finished / "records" / "sizes.json", SizeEstimates)
    assert sizes.target == "NVIDIA H200"
    assert sizes.here.share == 0, "tiny: FP8 does not pay"
    assert sizes.here.linears.value == 1
    assert sizes.large.size == "wide"
    assert sizes.large.linears.low > 1
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "Estimated for NVIDIA H200" in page
    assert "None was measured" in page
    line = make(finished).run().lines()[-2]
    assert "not measured" in line
    assert "Estimated" in line


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
    assert len(lines) == 6
    assert "linears run in FP8" in lines[0]
    assert lines[-1].endswith("report.html")


@pytest.mark.parametrize(
    ("station", "step"), [("train", 5), ("tune: verify the metric", 1), ("planned", 3), ("compare", 0)]
)
def test_interrupted_it_continues_to_the_same_result(station: str, step: int, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        make(tmp_path / "out", talk=interrupt_at(station, step)).run()
    stored = records.load(tmp_path / "out" / "progress.json", Progress)
    assert stored.done == list(STATIONS[: STATIONS.index(station.partition(":")[0])])
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
    kept = out / "earlier-1"
    assert str(kept) in result.restarted
    assert (kept / "report.html").read_bytes() == (finished / "report.html").read_bytes()
    assert make(kept).run().resumed == STATIONS  # a job like any other


def test_an_unknown_size_leaves_earlier_results_alone(finished: Path, tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "out"
    shutil.copytree(finished, out)
    with pytest.raises(ValueError, match="has no size 'huge'"):
        make(out, DemoConfig(**{**SETTINGS.__dict__, "size": "huge"})).run()
    assert (out / "report.html").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not delete")
    with pytest.raises(ValueError, match="holds other files"):
        make(tmp_path).run()
    assert (tmp_path / "thesis.txt").read_text() == "do not delete"


@pytest.mark.parametrize("options", [{"steps": 0}, {"margin": 0.0}, {"tune_batches": 1}])
def test_nonsense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        DemoConfig(**options)  # type: ignore[arg-type]


def test_a_gpu_gets_a_model_large_enough_to_gain() -> None:
    small, large = DemoConfig.for_device("cpu"), DemoConfig.for_device("cuda:0")
    assert small == DemoConfig()
    assert (large.family, large.size, large.batch_size, large.device) == ("dlrm", "wide", 8192, "cuda:0")
    assert DemoConfig.for_device("cuda", size="tiny", steps=3).steps == 3


def test_a_missing_charting_library_is_said_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ValueError, match=r"pip install 'loka\[report\]'"):
        Demo(tmp_path / "demo").run()
    assert not (tmp_path / "demo").exists()


def test_an_arm_in_which_nothing_runs_in_fp8_is_equivalent(tmp_path: Path) -> None:
    """Its losses are the same to the last bit: that is no sample of rare differences."""
    (tmp_path / "records").mkdir()
    losses = torch.rand(60, generator=torch.Generator().manual_seed(0))
    scores = {"losses": losses, "group": torch.arange(60) // 2}
    make(tmp_path)._write_comparison("planned", scores, scores, "planned FP8", 0.0)
    found = records.load(tmp_path / "records" / "comparison-planned.json", Comparison)
    assert (found.outcome, found.relative_change.low, found.relative_change.high) == ("equivalent", 0.0, 0.0)
