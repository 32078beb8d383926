"""The page is computed from the runs of a record: means, intervals, order, bold where the bar is beaten, and nothing hidden."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "quality_table.py"


def make_run(model, data, seed, value, **extra):
    metric = {"hr10": value, "ndcg10": value / 2} if model == "hstu" else {"auc": value, "log_loss": 0.5}
    return {"model": model, "data": data, "seed": seed, **metric, "cut_short": False, **extra}


REPORT = {
    "runs": [
        *(make_run("wukong", "ml-1m", seed, value) for seed, value in enumerate((0.80, 0.81, 0.82))),
        *(make_run("dlrm", "ml-1m", seed, value) for seed, value in enumerate((0.90, 0.70, 0.92))),
        make_run("dcn", "ml-1m", 0, 0.99),
        make_run("dcn", "ml-1m", 1, 0.10, cut_short=True),
        make_run("hstu", "amazon-2014-beauty", 0, 0.05),
    ],
    "cut_short": [make_run("hstu", "amazon-2014-beauty", 1, 0.01, cut_short=True)],
    "tried": [make_run("wukong", "ml-1m", 0, 0.1)],
    "skipped": [{"model": "elfm", "data": "ml-1m", "seed": 2, "reason": "out of time"}],
    "failed": [],
    "baselines": {
        "logistic": {"ml-1m": [{"auc": 0.7}, {"auc": 0.75}, {"auc": 0.76}]},
        "sequences": {"amazon-2014-beauty": {"popularity": 0.01, "markov": 0.06}},
    },
}


def render(tmp_path, report, *arguments):
    record = tmp_path / "quality.json"
    record.write_text(json.dumps(report))
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(record), *map(str, arguments)], capture_output=True, text=True, check=True
    ).stdout


def test_the_tables(tmp_path):
    page = render(tmp_path, REPORT)
    assert page == (
        "### MovieLens 1M: AUC\n\n| model | AUC | log loss | seeds |\n|---|---|---|---|\n"
        "| dcn | 0.9900 | 0.5000 | 1 |\n"
        "| dlrm | 0.8400 ± 0.3022 | 0.5000 ± 0.0000 | 3 |\n"
        "| wukong | **0.8100 ± 0.0248** | 0.5000 ± 0.0000 | 3 |\n"
        "| logistic regression, dense in bins | 0.7600 | | |\n"
        "| logistic regression with dense | 0.7500 | | |\n"
        "| logistic regression, one-hot | 0.7000 | | |\n\n"
        "### Amazon 2014 Beauty: HR@10\n\n| model | HR@10 | NDCG@10 | seeds |\n|---|---|---|---|\n"
        "| hstu | 0.0500 | 0.0250 | 1 |\n"
        "| first-order Markov | 0.0600 | | |\n| popularity | 0.0100 | | |\n\n"
        "Cut short, and therefore not counted: dcn on MovieLens 1M (seed 1), hstu on Amazon 2014 Beauty (seed 1).\n"
        "Skipped: elfm on MovieLens 1M (seed 2).\n"
    )


def test_a_page_on_disk_is_the_page_that_is_printed(tmp_path):
    assert render(tmp_path, REPORT, "--out", tmp_path / "page.md") == ""
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == render(tmp_path, REPORT)


def test_the_committed_record_renders(tmp_path):
    committed = SCRIPT.parent / "results" / "h200" / "quality.json"
    page = render(tmp_path, json.loads(committed.read_text(encoding="utf-8")))
    assert "### MovieLens 1M: AUC" in page
    assert "nan" not in page
