"""The record of benchmarks/quality.py as Markdown: mean and 95 % interval over seeds, per model and data set, beside what must be beaten.

    python benchmarks/quality_table.py benchmarks/results/h200/quality.json              prints it
    python benchmarks/quality_table.py RECORD --out docs/quality.md                      writes it

One table per data set and task. A value is `mean ± half width` of Student's interval over the seeds; one seed has no interval and says so. Bold: the whole
interval lies above the strongest baseline. Below the tables stands what the record does not show: runs cut short, skipped, failed. The means are
computed here from the runs, so that the page and the record cannot disagree.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

# Student's t, 97.5 %, by degrees of freedom.
T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
TITLES = {
    "ml-1m": "MovieLens 1M",
    "census-income-kdd": "Census-Income",
    "complete-journey": "Complete Journey",
    "amazon-2014-beauty": "Amazon 2014 Beauty",
    "amazon-2018-scientific": "Amazon 2018 Scientific",
}
METRICS = {"auc": ("AUC", "log_loss", "log loss"), "hr10": ("HR@10", "ndcg10", "NDCG@10")}
LOGISTIC = ("logistic regression, one-hot", "logistic regression with dense", "logistic regression, dense in bins")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, help="write here instead of printing")
    arguments = parser.parse_args()
    text = render(json.loads(arguments.record.read_text(encoding="utf-8")))
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


def render(report: dict[str, Any]) -> str:
    """The whole page."""
    cells: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for run in report["runs"]:
        if not run.get("cut_short"):
            metric = "hr10" if "hr10" in run else "auc"
            cells.setdefault((metric, run["data"]), {}).setdefault(run["model"], []).append(run)
    parts = [
        table
        for (metric, data), models in sorted(cells.items())
        for table in render_table(metric, data, models, find_bars(report["baselines"], metric, data))
    ]
    missing = list_missing(report)
    return "\n".join([*parts, *missing]).rstrip("\n") + "\n"


def find_bars(baselines: dict[str, Any], metric: str, data: str) -> dict[str, float]:
    """Name and value of every baseline, as the record has them."""
    if metric == "hr10":
        return {
            {"markov": "first-order Markov"}.get(name, name): value
            for name, value in baselines["sequences"][data].items()
        }
    return {name: fit["auc"] for name, fit in zip(LOGISTIC, baselines["logistic"][data], strict=True)}


def render_table(metric: str, data: str, models: dict[str, list[dict[str, Any]]], bars: dict[str, float]) -> list[str]:
    """Models from best to worst, then the baselines."""
    name, second, second_name = METRICS[metric]
    lines = [
        f"### {TITLES.get(data, data)}: {name}",
        "",
        f"| model | {name} | {second_name} | seeds |",
        "|---|---|---|---|",
    ]
    best_bar = max(bars.values())
    order = sorted(models, key=lambda model: -statistics.fmean(run[metric] for run in models[model]))
    for model in order:
        values = [run[metric] for run in models[model]]
        mean, half = find_interval(values)
        shown = describe(mean, half)
        beats = half is not None and mean - half > best_bar
        other = describe(*find_interval([run[second] for run in models[model]]))
        lines.append(f"| {model} | {f'**{shown}**' if beats else shown} | {other} | {len(values)} |")
    lines += [f"| {bar} | {value:.4f} | | |" for bar, value in sorted(bars.items(), key=lambda pair: -pair[1])]
    return [*lines, ""]


def find_interval(values: list[float]) -> tuple[float, float | None]:
    """Mean and half width of the 95 % interval; None for one value."""
    if len(values) < 2:
        return statistics.fmean(values), None
    t = T975.get(len(values) - 1, 1.96)
    return statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values))


def describe(mean: float, half: float | None) -> str:
    """The value with its interval."""
    return f"{mean:.4f}" if half is None else f"{mean:.4f} ± {half:.4f}"


def list_missing(report: dict[str, Any]) -> list[str]:
    """One line per kind of run that has no place in the tables."""
    cut = report.get("cut_short", []) + [run for run in report["runs"] if run.get("cut_short")]
    kinds = {"Cut short, and therefore not counted": cut, "Skipped": report["skipped"], "Failed": report["failed"]}
    lines = []
    for title, runs in kinds.items():
        names = sorted(
            {f"{run['model']} on {TITLES.get(run['data'], run['data'])} (seed {run['seed']})" for run in runs}
        )
        if names:
            lines.append(f"{title}: {', '.join(names)}.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
