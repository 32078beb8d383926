"""The scripts that measure the mods, as far as they can be tested without measuring."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("ablation", "ablation_cell", "stress", "stress_figure", "quality_ranking", "quality_data"):
        sys.modules.pop(name, None)


def cell(variant, precision, seed, loss):
    return {"data": "d", "variant": variant, "precision": precision, "seed": seed, "log_loss": loss, "auc": 0.7, "seconds": 1.0,
            "fp8_share": 0.5}  # fmt: skip


def test_every_cell_is_compared_with_the_original_and_with_its_own_bf16_seed_by_seed():
    import ablation

    runs = []
    for seed, base in enumerate((0.5, 0.6, 0.7, 0.8)):
        runs += [cell("none", "bf16", seed, base), cell("none", "naive", seed, base * (1.02 + 0.0001 * seed))]
        runs += [cell("all", "bf16", seed, base * 1.0001), cell("all", "planned", seed, base * 1.0003)]
    rows = {(row["variant"], row["precision"]): row for row in ablation.summarise(runs)}
    assert rows["none", "bf16"]["against_original"] is None
    assert rows["none", "naive"]["against_original"]["verdict"] == "worse"
    assert rows["none", "naive"]["against_original"]["percent"] == pytest.approx(2.0, abs=0.02)
    assert rows["all", "planned"]["against_original"]["verdict"] == "equivalent"
    assert rows["all", "planned"]["against_bf16"]["percent"] == pytest.approx(0.02, abs=1e-3)


def test_a_diverged_run_is_counted_and_not_averaged():
    import ablation

    runs = [cell("none", "bf16", s, 0.5) for s in range(3)]
    runs += [cell("none", "naive", s, 0.6 if s else None) for s in range(3)]
    row = next(row for row in ablation.summarise(runs) if row["precision"] == "naive")
    assert (row["seeds"], row["diverged"], row["log_loss"]) == (3, 1, pytest.approx(0.6))
    assert row["against_original"]["seeds"] == 2
    assert "1 of 3 diverged" in ablation.describe({"summary": [row], "skipped": [], "failed": []})


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
