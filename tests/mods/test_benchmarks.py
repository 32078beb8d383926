"""The scripts that measure the mods, as far as they can be tested without measuring."""

import argparse
import functools
import pickle
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from loka.records import AblationRun, MissingRun, save

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("ablation", "ablation_cell", "stress", "stress_figure", "quality_ranking", "quality_data"):
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
    report = ablation.add(report, MissingRun(**missing, why="RuntimeError: no"), seconds=2.0)
    assert (len(report.skipped), len(report.failed), report.seconds) == (1, 1, 2.0)
    save(report, out)
    again = ablation.open_report(arguments(out))
    assert again.runs == report.runs
    assert again.cells == report.cells
    assert again.skipped == again.failed == []  # they get another chance
    with pytest.raises(SystemExit, match="other settings"):
        ablation.open_report(arguments(out, size="small"))
    out.write_text("{}")
    with pytest.raises(SystemExit, match=r"`kind` is None.*choose another --out"):
        ablation.open_report(arguments(out))


def test_an_outcome_survives_the_way_from_a_worker():
    run = cell("none", "bf16", 0, 0.5)
    assert pickle.loads(pickle.dumps(run)) == run


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
