"""The quality bars, measured: ranking models beside logistic regression, sequence models beside popularity and first-order Markov.

    python benchmarks/quality.py --root FOLDER --out quality.json                       all of it, three seeds, on the GPU
    python benchmarks/quality.py --root FOLDER --out quality.json --only wukong:ml-1m,hstu --device cpu --seeds 1
    python benchmarks/quality.py --root FOLDER --out quality.json --only hstu,onerec,interformer --processes 8 --limit-seconds 200 --merge OLD.json

FOLDER holds the compact data of benchmarks/quality_data.py. Every run trains with early stopping on the validation split and is scored once on
the test split at the best validation step: AUC and log loss for ranking; HR@10 and NDCG@10 over the full catalogue, leave-last-out, for sequences.

The data sets are small, so a split lives on the device and batches are cut there; runs are spread over a few processes that share the GPU,
because a small model leaves it idle between launches. Runs that do not fit into --limit-seconds are listed as skipped, never estimated; one that
was under way stops there, and is listed as cut short: a schedule that was not finished says nothing about the model. First seeds come first.
"""

import argparse
import json
import math
import multiprocessing
import queue
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import quality_ranking
import quality_sequences
from evidence import describe_run

RANKING_MODELS = ("wukong", "dlrm", "dcn", "dhen", "interformer", "elfm")
SEQUENCE_MODELS = ("hstu", "onerec")
Job = tuple[str, str]
RANKING_DATA = ("ml-1m", "census-income-kdd", "complete-journey")
SEQUENCE_DATA = ("ml-1m", "amazon-2014-beauty", "amazon-2018-scientific")
# Student's t, 97.5 %, by degrees of freedom: the interval of a mean of a few seeds.
T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of quality_data.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; written again after every run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="model, data or model:data, comma-separated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-seconds", type=float, default=math.inf)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument(
        "--merge", type=Path, help="an earlier record: its runs of models and data not run now are kept"
    )
    parser.add_argument("--shorten", type=float, default=1.0, help="divide the length of every run, to test the script")
    arguments = parser.parse_args()
    jobs = list_jobs(arguments.only)
    if not jobs:
        parser.error(f"--only {arguments.only} matches nothing; models: {', '.join(RANKING_MODELS + SEQUENCE_MODELS)}")
    started = time.monotonic()
    report: dict[str, Any] = {name: [] for name in LISTS} | {
        "settings": vars(arguments) | {"root": "", "out": "", "merge": arguments.merge is not None}
    }
    report["environment"] = describe_run(arguments.device)
    report["baselines"] = read_baselines(arguments.root, jobs)
    if arguments.merge:
        keep_others(report, json.loads(arguments.merge.read_text()), jobs)
    deadline = time.time() + arguments.limit_seconds
    for outcome in run_jobs(jobs, arguments, deadline):
        report[outcome.pop("list")].append(outcome)
        report["summary"] = summarise(report)
        report["seconds"] = time.monotonic() - started
        arguments.out.write_text(json.dumps(report, indent=1, default=str))
    print(describe(report))
    return 1 if report["failed"] else 0


LISTS = ("runs", "cut_short", "tried", "skipped", "failed")


def keep_others(report: dict[str, Any], earlier: dict[str, Any], jobs: list[Job]) -> None:
    """Take over what an earlier record knows about cells that are not run now."""
    for name in LISTS:
        for run in earlier.get(name, []):
            if (run["model"], run["data"]) not in jobs:
                report["cut_short" if name == "runs" and run["cut_short"] else name].append(run)
    earlier_bars = earlier["baselines"].get("sequences", {})
    report["baselines"]["sequences"] = earlier_bars | report["baselines"]["sequences"]


def list_jobs(only: str) -> list[Job]:
    """(model, data), what takes long first: InterFormer, then the sequence models, then the rest of the ranking grid."""
    cells = [("interformer", d) for d in RANKING_DATA if d != "census-income-kdd"]  # which has no histories
    cells += [(m, d) for m in ("onerec", "hstu") for d in SEQUENCE_DATA]
    cells += [(m, d) for d in RANKING_DATA for m in reversed(RANKING_MODELS) if m != "interformer"]
    wanted = {word for word in only.split(",") if word}
    return [c for c in cells if not wanted or wanted & {c[0], c[1], f"{c[0]}:{c[1]}"}]


def run_jobs(jobs: list[Job], arguments: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """Outcomes as they arrive. One process runs them here; several share a queue, and a seed of a cell with one recipe is a job of its own."""
    tasks = [(job, seeds) for job in jobs for seeds in share_seeds(job, arguments.seeds)]
    tasks.sort(key=lambda task: task[1].start)  # stable: the first seeds of all cells, then the second ones
    if arguments.processes == 1:
        for job, seeds in tasks:
            yield from run_cell(job, seeds, arguments, deadline)
        return
    context = multiprocessing.get_context("spawn")
    waiting, done = context.Queue(), context.Queue()
    for task in tasks + [None] * arguments.processes:
        waiting.put(task)
    workers = [
        context.Process(target=work, args=(waiting, done, arguments, deadline)) for _ in range(arguments.processes)
    ]
    for worker in workers:
        worker.start()
    expected = {(*job, seed) for job, seeds in tasks for seed in seeds}
    finished = 0
    while finished < len(workers):
        try:
            outcome = done.get(timeout=5)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        if outcome is None:
            finished += 1
        else:
            expected.discard((outcome["model"], outcome["data"], outcome["seed"]))
            yield outcome
    for model, data, seed in sorted(expected):
        yield {"list": "failed", "model": model, "data": data, "seed": seed, "error": "its worker died"}
    for worker in workers:
        worker.join(timeout=10)


def share_seeds(job: Job, seeds: int) -> list[range]:
    """A cell with several recipes keeps its seeds together, because the recipes compete first."""
    return [range(s, s + 1) for s in range(seeds)] if len(find_recipes(job)) == 1 else [range(seeds)]


def find_recipes(job: Job) -> tuple[Any, ...]:
    if job[0] in SEQUENCE_MODELS:
        return quality_sequences.RECIPES[job]
    return quality_ranking.CHOSEN.get(job) or quality_ranking.RECIPES[job[1]]


def work(waiting: Any, done: Any, arguments: argparse.Namespace, deadline: float) -> None:
    while (task := waiting.get()) is not None:
        for outcome in run_cell(*task, arguments, deadline):
            done.put(outcome)
            if "CUDA" in outcome.get("error", ""):  # this process has lost its GPU: it must not burn through the queue
                done.put(None)
                return
    done.put(None)


def run_cell(job: Job, seeds: range, arguments: argparse.Namespace, deadline: float) -> Iterator[dict[str, Any]]:
    """Every candidate recipe with the first seed, the best of them on the validation split with the others."""
    recipes = [shorten(recipe, arguments.shorten) for recipe in find_recipes(job)]
    first = [run_once(job, seeds[0], recipe, arguments, deadline) for recipe in recipes]
    finished = [outcome for outcome in first if outcome["list"] == "runs"]
    best = min(finished, key=lambda outcome: outcome["valid_loss"], default=first[0])
    for outcome in first:
        yield outcome if outcome is best or outcome["list"] != "runs" else {**outcome, "list": "tried"}
    recipe = recipes[first.index(best)]
    for seed in seeds[1:]:
        yield run_once(job, seed, recipe, arguments, deadline)


def shorten(recipe: Any, factor: float) -> Any:
    if hasattr(recipe, "epochs"):
        return replace(recipe, epochs=recipe.epochs / factor)
    if factor == 1:
        return recipe
    return replace(recipe, steps=max(2, round(recipe.steps / factor)), evaluations=2)


def run_once(job: Job, seed: int, recipe: Any, arguments: argparse.Namespace, deadline: float) -> dict[str, Any]:
    model, data = job
    label = {"model": model, "data": data, "seed": seed}
    if time.time() > deadline:
        return {"list": "skipped", **label, "reason": "out of time"}
    room = quality_sequences if model in SEQUENCE_MODELS else quality_ranking
    start = time.perf_counter()
    try:
        result = room.run(arguments.root, model, data, seed, arguments.device, deadline=deadline, recipe=recipe)
    except (
        Exception
    ) as error:  # one broken cell must not cost the others their turn; it is reported and the exit status says so
        traceback.print_exc()
        return {"list": "failed", **label, "error": f"{type(error).__name__}: {error}"}
    where = "cut_short" if result["cut_short"] else "runs"
    outcome = {"list": where, **label, **result, "seconds": time.perf_counter() - start}
    metric = {name: outcome[name] for name in ("auc", "hr10", "best_step", "steps", "forward") if name in outcome}
    print(f"{model}:{data} seed {seed} {outcome['seconds']:.1f} s {metric}", file=sys.stderr, flush=True)
    return outcome


def read_baselines(root: Path, jobs: list[Job]) -> dict[str, Any]:
    """Logistic regression from the data folder, popularity and Markov computed now (counting: seconds on a CPU)."""
    logistic = json.loads((root / "baselines.json").read_text())
    data = sorted({data for model, data in jobs if model in SEQUENCE_MODELS})
    return {"logistic": logistic, "sequences": {d: quality_sequences.measure_baselines(root, d, "cpu") for d in data}}


def summarise(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean and 95 % interval over seeds, next to what must be beaten."""
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in report["runs"]:
        cells.setdefault((run["data"], run["model"]), []).append(run)
    rows = []
    for (data, model), runs in sorted(cells.items()):
        metric = "hr10" if model in SEQUENCE_MODELS else "auc"
        values = [run[metric] for run in runs]
        half = (
            T975.get(len(values) - 1, 1.96) * statistics.stdev(values) / len(values) ** 0.5
            if len(values) > 1
            else math.nan
        )
        rows.append({"data": data, "model": model, "metric": metric, "mean": statistics.fmean(values), "half_width": half,
                     "seeds": len(values), "bar": find_bar(report["baselines"], data, metric),
                     "seconds": statistics.fmean(run["seconds"] for run in runs)})  # fmt: skip
    return rows


def find_bar(baselines: dict[str, Any], data: str, metric: str) -> dict[str, float]:
    if metric == "hr10":
        return dict(baselines["sequences"][data])
    names = ("one-hot", "with dense", "with dense in bins")
    return {name: fit["auc"] for name, fit in zip(names, baselines["logistic"][data], strict=True)}


def describe(report: dict[str, Any]) -> str:
    lines = [f"{'data':24} {'model':12} {'metric':6} {'mean':>7} {'+-':>7}  seeds  baselines"]
    for row in report.get("summary", []):
        bar = ", ".join(f"{name} {value:.4f}" for name, value in row["bar"].items())
        lines.append(
            f"{row['data']:24} {row['model']:12} {row['metric']:6} {row['mean']:7.4f} {row['half_width']:7.4f}  {row['seeds']:5}  {bar}"
        )
    lines += [
        f"cut short: {s['model']}:{s['data']} seed {s['seed']} after {s['steps']} steps, {s['seconds']:.0f} s"
        for s in report["cut_short"]
    ]
    lines += [f"skipped: {s['model']}:{s['data']} seed {s['seed']} ({s['reason']})" for s in report["skipped"]]
    lines += [f"failed: {s['model']}:{s['data']} seed {s['seed']} ({s['error']})" for s in report["failed"]]
    return "\n".join([*lines, f"{report.get('seconds', 0):.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
