"""The scripts that measure the mods, as far as they can be tested without measuring."""

import argparse
import dataclasses
import functools
import pickle
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.scripts import script
from loka.records import Interval, save

record = script("ablation_record")
AblationRun, MissingRun, RefusedLatency, TowerLatency = (
    record.AblationRun,
    record.MissingRun,
    record.RefusedLatency,
    record.TowerLatency,
)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in (
        "ablation",
        "ablation_cell",
        "ablation_latency",
        "stress",
        "stress_figure",
        "quality_ranking",
        "quality_data",
    ):
        sys.modules.pop(name, None)


def cell(variant, precision, seed, loss):
    return AblationRun(
        data="d", variant=variant, precision=precision, seed=seed, log_loss=loss, auc=0.7, seconds=1.0, fp8_share=0.5
    )


def test_every_cell_is_compared_with_the_original_and_with_its_own_bf16_seed_by_seed():
    import ablation

    runs = []
    for seed, base in enumerate((0.5, 0.6, 0.7, 0.8)):
        runs += [cell("none", "bf16", seed, base), cell("none", "naive", seed, base * (1.02 + 0.0001 * seed))]
        runs += [cell("all", "bf16", seed, base * 1.0001), cell("all", "planned", seed, base * 1.0003)]
    rows = {(row.variant, row.precision): row for row in ablation.summarise(runs)}
    assert rows["none", "bf16"].against_original is None
    assert rows["none", "naive"].against_original.outcome == "worse"
    assert rows["none", "naive"].against_original.change.value == pytest.approx(0.02, abs=2e-4)
    assert rows["all", "planned"].against_original.outcome == "equivalent"
    assert rows["all", "planned"].against_bf16.change.value == pytest.approx(2e-4, abs=1e-5)
    assert rows["all", "planned"].against_naive is None  # there is none


def test_a_diverged_run_is_counted_and_not_averaged():
    import ablation

    runs = [cell("none", "bf16", s, 0.5) for s in range(3)]
    runs += [cell("none", "naive", s, 0.6 if s else None) for s in range(3)]
    report = functools.reduce(functools.partial(ablation.add, seconds=1.0), runs, ablation.open_report(arguments()))
    row = next(row for row in report.cells if row.precision == "naive")
    assert (row.seeds, row.diverged, row.log_loss) == (3, 1, pytest.approx(0.6))
    assert row.against_original.seeds == 2
    assert "1 of 3 diverged" in ablation.describe(report)


def arguments(out=Path("nowhere.json"), **others):
    return argparse.Namespace(
        **{"size": "tiny", "shorten": 1.0, "device": "cpu", "backend": "auto", "seeds": 2, "out": out, **others}
    )


def test_the_file_is_a_record_that_a_second_call_continues(tmp_path):
    import ablation

    out = tmp_path / "ablation.json"
    report = ablation.add(ablation.open_report(arguments(out)), cell("none", "bf16", 0, 0.5), seconds=1.0)
    missing = {"data": "d", "variant": "none", "precision": "naive", "seed": 0}
    report = ablation.add(report, MissingRun(**missing, why="out of time"), seconds=1.0)
    assert (len(report.skipped), len(report.failed)) == (1, 0)
    report = ablation.add(report, MissingRun(**missing, why="RuntimeError: no"), seconds=2.0)
    assert (len(report.skipped), len(report.failed), report.seconds) == (0, 1, 2.0)
    save(report, out)
    again = ablation.open_report(arguments(out))
    assert (again.runs, again.cells, again.failed) == (report.runs, report.cells, report.failed)
    done = ablation.add(again, cell("none", "naive", 0, 0.5), seconds=1.0)
    assert (len(done.runs), done.failed) == (2, [])  # it had another chance
    with pytest.raises(SystemExit, match="other settings"):
        ablation.open_report(arguments(out, size="small"))
    out.write_text("{}")
    with pytest.raises(SystemExit, match=r"`kind` is None.*choose another --out"):
        ablation.open_report(arguments(out))


def test_an_outcome_survives_the_way_from_a_worker():
    run = cell("none", "bf16", 0, 0.5)
    assert pickle.loads(pickle.dumps(run)) == run


def test_latency_rows_are_measured_beside_the_unmodified_tower_and_refusals_say_why():
    import ablation_latency as latency

    group = latency.Group("infer", 8, "all", ("bf16", "fused"), 256, "cpu", 2)
    base, ready, refused = latency.prepare_group(group)
    assert base is not None
    assert (base.name, [row.name for row in ready], refused) == ("bf16", ["bf16", "fused"], [])
    rows = list(latency.measure(group, base, ready))
    assert [(row.variant, row.precision, row.speedup.value > 0) for row in rows] == [
        ("all", "bf16", True),
        ("all", "fused", True),
    ]
    assert 0.005 < rows[1].error < 0.2  # FP8, and no more than that
    plain = latency.prepare_group(dataclasses.replace(group, variant="none", precisions=("fused",)))
    assert [row.name for row in plain[1]] == ["fused"], "a chain runs with the user's own norms too"
    nothing = latency.prepare_group(dataclasses.replace(group, width=32, precisions=("fused",)))
    assert nothing[1] == []
    assert "narrower than 64" in nothing[2][0].why


@pytest.mark.parametrize("precision", ["bf16", "fused"])
def test_a_training_row_is_checked_by_its_gradients(precision, monkeypatch):
    import ablation_latency as latency

    group = latency.Group("train", 8, "all", (precision,), 256, "cpu", 2)
    assert len(latency.prepare_group(group)[1]) == 1
    right = latency.find_truth
    monkeypatch.setattr(latency, "find_truth", lambda *given: (*right(*given)[:2], -right(*given)[2]))
    assert "differ from float32's by" in latency.prepare_group(group)[2][0].why


def test_latency_rows_that_are_there_are_not_measured_again(tmp_path):
    import ablation_latency as latency

    given = argparse.Namespace(out=tmp_path / "l.json", device="cpu", scale=16, repeats=2, modes="infer")
    report = latency.open_report(given)
    assert len(latency.list_groups(report, given)) == 10
    label = {"mode": "infer", "batch": 64, "variant": "none"}
    one = Interval(value=1.0, low=1.0, high=1.0)
    for precision in ("bf16", "tensorwise", "rowwise"):
        report = latency.add(
            report, TowerLatency(**label, precision=precision, error=0.0, microseconds=one, speedup=one)
        )
    report = latency.add(report, RefusedLatency(**label, precision="fused", why="it cannot"))
    save(report, given.out)
    again = latency.open_report(given)
    assert (again.rows, again.refused) == (report.rows, report.refused)
    assert latency.list_groups(again, given)[0].precisions == ("fused",)
    row = TowerLatency(**label, precision="fused", error=0.0, microseconds=one, speedup=one)
    assert latency.add(again, row).refused == []
    assert len(latency.list_groups(latency.add(again, row), given)) == 9


def test_tasks_are_the_grid_seed_by_seed():
    import ablation

    tasks = ablation.list_tasks("ml-1m,none,all", 2)
    assert len(tasks) == 2 * 2 * 3
    assert [task[3] for task in tasks] == [0] * 6 + [1] * 6
    with pytest.raises(SystemExit, match="unknown nothing"):
        ablation.list_tasks("nothing", 1)


def test_the_share_kept_and_the_figure_of_the_stress_set():
    import stress
    import stress_figure

    runs = []
    for seed in range(3):
        for arm, loss in zip(stress.ARMS, (0.50, 0.53, 0.50, 0.501, 0.60, 0.502, 0.54), strict=True):
            runs.append({"arm": arm, "seed": seed, "log_loss": loss + 0.001 * seed, "fp8_share": 0.9})
    summary = stress.summarise(runs)
    kept = {row["arm"]: row["kept"]["share"] for row in summary if row.get("kept")}
    assert kept["original, naive FP8"] == pytest.approx(0.25)
    assert kept["mods, planned FP8"] == pytest.approx(0.95)
    group = {"case": "one scale", "first_octave": -50, "histogram": [1] * 60, "lost": 0.4}
    figure = stress_figure.draw({"groups": [group] * 3, "summary": summary})
    assert ET.fromstring(figure).tag.endswith("svg")
    assert "40% becomes zero" in figure
    assert ">+6<" in figure
    assert ">+20<" in figure


def test_groups_are_described_by_what_their_scale_lets_through():
    import stress
    import torch

    from loka.formats import Spec

    x = torch.tensor([[448.0, 1.0], [448e-9, 1e-9]])
    assert stress.describe_group(x, Spec.parse("e4m3:tensor"))["lost"] == 0.5
    assert stress.describe_group(x, Spec.parse("e4m3:row"))["lost"] == 0.0
