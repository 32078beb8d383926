"""The ablation of the mods: {none, each core mod alone, all} x {bf16, naive FP8, planned FP8}, Wukong on three data sets, paired seeds.

    python benchmarks/ablation.py --root FOLDER --out ablation.json --seeds 8 --processes 8 --seconds 480       on a GPU
    python benchmarks/ablation.py --root FOLDER --out /tmp/a.json --device cpu --size tiny --shorten 200 --seeds 2 --only complete-journey

FOLDER holds the compact data of benchmarks/quality_data.py. A run is described in ablation_cell.py. The result compares every cell with two baselines,
seed by seed (same weights, same batches): the *original* bf16 model, which is the bar, and the same variant in bf16, which is what FP8 alone costs.

    relative change of the test log loss, 95 % Student interval over seeds, verdict for a margin of 0.1 %, minimum detectable effect

Runs are listed as they end; those that did not fit into --seconds are listed as skipped, those that failed with their error; a run whose loss is not finite is
"diverged" and is counted, not averaged. Continue with the same --out: finished runs are not repeated.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import ablation_cell as cell
import torch

from loka.metrics import compare_paired
from loka.records import capture_environment

MARGIN = 0.1  # percent of log loss
Task = tuple[str, str, str, int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of quality_data.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; written again after every run")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--only", default="", help="data, variants and precisions to run, comma-separated; default all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this")
    parser.add_argument("--size", default="small", help="size of Wukong")
    parser.add_argument("--shorten", type=float, default=1.0, help="divide the length of every run, to test the script")
    parser.add_argument("--backend", default="auto", help="of the naive arm's GEMMs")
    parser.add_argument(
        "--plans", type=Path, help="folder of plans to use and to add to; default: a new one that is not kept"
    )
    parser.add_argument(
        "--only-plans",
        action="store_true",
        help="make the plans and stop: evaluating in emulation is the slow part, and a CPU can do it",
    )
    arguments = parser.parse_args()
    tasks = list_tasks(arguments.only, arguments.seeds)
    if not tasks:
        parser.error(f"--only {arguments.only} matches nothing")
    report = open_report(arguments)
    done = {key_of(row) for row in report["runs"]}
    tasks = [task for task in tasks if task not in done]
    started, deadline = time.monotonic(), time.time() + arguments.seconds
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.plans or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = cell.Bench(
            arguments.root, arguments.device, arguments.size, arguments.shorten, folder, arguments.backend
        )
        if arguments.only_plans:
            for data, variant in dict.fromkeys((data, variant) for data, variant, _, _ in tasks):
                cell.find_plan(bench, data, variant)
                print(f"{folder}: {data}, {variant}", file=sys.stderr, flush=True)
            return 0
        for outcome in run_all(bench, tasks, arguments.processes, deadline):
            report[outcome.pop("list")].append(outcome)
            report["summary"] = summarise(report["runs"])
            report["seconds"] = time.monotonic() - started
            arguments.out.write_text(json.dumps(report, indent=1, default=str))
    print(describe(report))
    return 1 if report["failed"] else 0


def list_tasks(only: str, seeds: int) -> list[Task]:
    """Seed by seed, so that a run cut short has whole grids of fewer seeds."""
    wanted = {word for word in only.split(",") if word}
    axes = [list(cell.RECIPES), list(cell.VARIANTS), list(cell.PRECISIONS)]
    unknown = wanted - {word for axis in axes for word in axis}
    if unknown:
        raise SystemExit(f"--only: unknown {', '.join(sorted(unknown))}")
    data, variants, precisions = ([w for w in axis if w in wanted] or axis for axis in axes)
    return [(d, v, p, s) for s in range(seeds) for d in data for v in variants for p in precisions]


def key_of(row: dict[str, Any]) -> Task:
    return row["data"], row["variant"], row["precision"], row["seed"]


def open_report(arguments: argparse.Namespace) -> dict[str, Any]:
    """A new report, or the finished runs of an old one of the same settings."""
    settings = {name: getattr(arguments, name) for name in ("size", "shorten", "device", "backend")}
    fresh: dict[str, Any] = {"settings": settings, "runs": [], "skipped": [], "failed": []}
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    command = "python benchmarks/ablation.py"  # paths of this machine are nobody's business
    environment = capture_environment(command=command, device=name, threads=torch.get_num_threads())
    fresh["environment"] = {f: getattr(environment, f) for f in environment.__struct_fields__}
    fresh["model"] = {"family": "wukong", "size": arguments.size, "original": cell.ORIGINAL, "margin_percent": MARGIN}
    if arguments.out.exists():
        old = json.loads(arguments.out.read_text())
        if old.get("settings") != settings:
            raise SystemExit(
                f"{arguments.out} holds runs of other settings, {old.get('settings')}: choose another --out"
            )
        fresh["runs"] = old["runs"]
    return fresh


def run_all(bench: cell.Bench, tasks: list[Task], processes: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Outcomes as they arrive; a worker that dies fails its own runs, and the rest go on in a new pool."""
    if processes == 1:
        for task in tasks:
            yield run_one(bench, task, deadline)
        return
    context = multiprocessing.get_context("spawn")
    waiting = list(tasks)
    while waiting:
        running: dict[Future[dict[str, Any]], Task] = {}
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < processes:
                        task = waiting.pop(0)
                        running[pool.submit(run_one, bench, task, deadline)] = task
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        outcome = future.result()
                        del running[future]
                        yield outcome
            except BrokenProcessPool:
                for task in running.values():
                    yield label(task) | {"list": "failed", "error": "its worker died"}


def label(task: Task) -> dict[str, Any]:
    return dict(zip(("data", "variant", "precision", "seed"), task, strict=True))


def run_one(bench: cell.Bench, task: Task, deadline: float) -> dict[str, Any]:
    if time.time() > deadline:
        return {"list": "skipped", **label(task), "reason": "out of time"}
    start = time.perf_counter()
    try:
        result = cell.run(bench, *task, deadline=deadline + 60)
    except Exception as error:  # one broken run must not cost the others their turn; the exit status says that it was
        traceback.print_exc()
        return {"list": "failed", **label(task), "error": f"{type(error).__name__}: {error}"}
    outcome = {"list": "runs", **label(task), **result, "seconds": time.perf_counter() - start}
    shown = {name: outcome.get(name) for name in ("log_loss", "auc", "fp8_share", "forward")}
    print(f"{':'.join(map(str, task))} {outcome['seconds']:.1f} s {shown}", file=sys.stderr, flush=True)
    return outcome


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every cell beside the original in bf16 and beside its own variant in bf16."""
    cells: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
    for run in runs:
        cells.setdefault((run["data"], run["variant"], run["precision"]), {})[run["seed"]] = run
    rows = []
    for (data, variant, precision), by_seed in sorted(cells.items()):
        kept = [run for run in by_seed.values() if run["log_loss"] is not None]
        row = {"data": data, "variant": variant, "precision": precision, "seeds": len(by_seed),
               "diverged": len(by_seed) - len(kept), "fp8_share": statistics.fmean(r["fp8_share"] for r in by_seed.values())}  # fmt: skip
        if kept:
            row |= {name: statistics.fmean(run[name] for run in kept) for name in ("log_loss", "auc", "seconds")}
        row["against_original"] = compare(by_seed, cells.get((data, "none", "bf16"), {}))
        row["against_bf16"] = compare(by_seed, cells.get((data, variant, "bf16"), {}))
        row["against_naive"] = compare(by_seed, cells.get((data, variant, "naive"), {}))
        rows.append(row)
    return rows


def compare(mine: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """The paired comparison over the seeds that both have; None for a cell with itself or with fewer than two."""
    seeds = [
        s for s in sorted(mine) if s in theirs and mine[s]["log_loss"] is not None and theirs[s]["log_loss"] is not None
    ]
    if len(seeds) < 2 or mine is theirs:
        return None
    pair = [torch.tensor([side[s]["log_loss"] for s in seeds], dtype=torch.float64) for side in (mine, theirs)]
    found = compare_paired(
        *pair, margin=MARGIN, metric="log loss", lower_is_better=True, relative=True, method="student"
    )
    return {"percent": found.estimate, "low": found.low, "high": found.high, "mde": found.mde, "verdict": found.verdict,
            "seeds": len(seeds)}  # fmt: skip


def describe(report: dict[str, Any]) -> str:
    lines = [
        f"{'data':20} {'mods':11} {'precision':9} {'log loss':>9} {'AUC':>7} {'FP8':>6}  against the original in bf16"
    ]
    for row in report.get("summary", []):
        found = row["against_original"]
        text = "" if found is None else (
            f"{found['percent']:+.3f} % [{found['low']:+.3f}, {found['high']:+.3f}] {found['verdict']}, MDE {found['mde']:.3f} %"
        )  # fmt: skip
        lost = f" ({row['diverged']} of {row['seeds']} diverged)" if row["diverged"] else ""
        lines.append(
            f"{row['data']:20} {row['variant']:11} {row['precision']:9} {row.get('log_loss', math.nan):9.5f} "
            f"{row.get('auc', math.nan):7.4f} {row['fp8_share']:6.1%}  {text}{lost}"
        )
    for kind in ("skipped", "failed"):
        found = report[kind]
        lines += [f"{kind}: {len(found)} runs, e.g. {found[0]}"] if found else []
    return "\n".join([*lines, f"{report.get('seconds', 0):.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
