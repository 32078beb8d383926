"""The ablation of the mods: {none, each core mod alone, all} x {bf16, naive FP8, planned FP8}, Wukong on three data sets, paired seeds.

    python benchmarks/ablation.py --root FOLDER --out ablation.json --seeds 8 --processes 8 --seconds 480       on a GPU
    python benchmarks/ablation.py --root FOLDER --out /tmp/a.json --device cpu --size tiny --shorten 200 --seeds 2 --only complete-journey

FOLDER holds the compact data of benchmarks/quality_data.py. A run is described in ablation_cell.py. The result compares every cell with two baselines,
seed by seed (same weights, same batches): the *original* bf16 model, which is the bar, and the same variant in bf16, which is what FP8 alone costs.

    relative change of the test log loss, 95 % Student interval over seeds, verdict for a margin of 0.1 %, minimum detectable effect

The file is a record of kind "ablation" (ablation_record.py). Runs are listed as they end; those that did not fit into --seconds
are listed as skipped, those that failed with their error; a run whose loss is not finite has diverged and is counted, not averaged. Continue with the same
--out: finished runs are not repeated.
"""

import argparse
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
import msgspec
import torch
from ablation_record import BASELINE, ORIGINAL, Ablation, AblationCell, AblationRun, MissingRun, PairedChange

from loka.metrics import compare_paired
from loka.records import Interval, RecordError, capture_environment, load, save

MARGIN = 0.001  # of log loss
OUT_OF_TIME = "out of time"
Task = tuple[str, str, str, int]
Outcome = AblationRun | MissingRun


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
    done = {key_of(run) for run in report.runs}
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
            report = add(report, outcome, seconds=time.monotonic() - started)
            save(report, arguments.out)
    print(describe(report))
    return 1 if report.failed else 0


def list_tasks(only: str, seeds: int) -> list[Task]:
    """Seed by seed, so that a run cut short has whole grids of fewer seeds."""
    wanted = {word for word in only.split(",") if word}
    axes = [list(cell.RECIPES), list(cell.VARIANTS), list(cell.PRECISIONS)]
    unknown = wanted - {word for axis in axes for word in axis}
    if unknown:
        raise SystemExit(f"--only: unknown {', '.join(sorted(unknown))}")
    data, variants, precisions = ([w for w in axis if w in wanted] or axis for axis in axes)
    return [(d, v, p, s) for s in range(seeds) for d in data for v in variants for p in precisions]


def key_of(run: Outcome) -> Task:
    return run.data, run.variant, run.precision, run.seed


def open_report(arguments: argparse.Namespace) -> Ablation:
    """A new report, or the finished runs of an old one of the same settings."""
    settings = {name: getattr(arguments, name) for name in ("size", "shorten", "device", "backend")}
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    given = " ".join(f"--{name} {value}" for name, value in {"seeds": arguments.seeds, **settings}.items())
    command = f"python benchmarks/ablation.py {given}"  # paths of this machine are nobody's business
    environment = capture_environment(command=command, device=name, threads=torch.get_num_threads())
    runs: list[AblationRun] = []
    skipped: list[MissingRun] = []
    failed: list[MissingRun] = []
    if arguments.out.exists():
        try:
            old = load(arguments.out, Ablation)
        except RecordError as error:
            raise SystemExit(f"{error}: choose another --out") from error
        if old.settings != settings:
            raise SystemExit(f"{arguments.out} holds runs of other settings, {old.settings}: choose another --out")
        runs, skipped, failed = old.runs, old.skipped, old.failed
    return Ablation(
        model=f"wukong {arguments.size}",
        settings=settings,
        margin=MARGIN,
        runs=runs,
        cells=summarise(runs),
        skipped=skipped,
        failed=failed,
        seconds=0.0,
        environment=environment,
    )


def add(report: Ablation, outcome: Outcome, *, seconds: float) -> Ablation:
    """The report with one more run. One that was not started for lack of time is skipped, one that was and has no result failed; what it was before is forgotten."""
    skipped, failed = (
        [run for run in old if key_of(run) != key_of(outcome)] for old in (report.skipped, report.failed)
    )
    runs = report.runs
    if isinstance(outcome, AblationRun):
        runs = [*runs, outcome]
    else:
        (skipped if outcome.why == OUT_OF_TIME else failed).append(outcome)
    return msgspec.structs.replace(
        report, runs=runs, cells=summarise(runs), skipped=skipped, failed=failed, seconds=seconds
    )


def run_all(bench: cell.Bench, tasks: list[Task], processes: int, deadline: float) -> Iterator[Outcome]:
    """Outcomes as they arrive; a worker that dies fails its own runs, and the rest go on in a new pool."""
    if processes == 1:
        for task in tasks:
            yield run_one(bench, task, deadline)
        return
    context = multiprocessing.get_context("spawn")
    waiting = list(tasks)
    while waiting:
        running: dict[Future[Outcome], Task] = {}
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
                    yield MissingRun(**label(task), why="its worker died")


def label(task: Task) -> dict[str, Any]:
    return dict(zip(("data", "variant", "precision", "seed"), task, strict=True))


def run_one(bench: cell.Bench, task: Task, deadline: float) -> Outcome:
    if time.time() > deadline:
        return MissingRun(**label(task), why=OUT_OF_TIME)
    start = time.perf_counter()
    try:
        facts = cell.run(bench, *task, deadline=deadline + 60)
    except Exception as error:  # one broken run must not cost the others their turn; the exit status says that it was
        traceback.print_exc()
        return MissingRun(**label(task), why=f"{type(error).__name__}: {error}")
    known = {name: facts[name] for name in AblationRun.__struct_fields__ if name in facts}
    run = AblationRun(**label(task), **known, seconds=time.perf_counter() - start)
    shown = {name: getattr(run, name) for name in ("log_loss", "auc", "fp8_share", "forward")}
    print(f"{':'.join(map(str, task))} {run.seconds:.1f} s {shown}", file=sys.stderr, flush=True)
    return run


def summarise(runs: list[AblationRun]) -> list[AblationCell]:
    """Every cell beside the original in bf16, beside its own variant in bf16 and in naive FP8; in the order of the grid."""
    cells: dict[tuple[str, str, str], dict[int, AblationRun]] = {}
    for run in runs:
        cells.setdefault((run.data, run.variant, run.precision), {})[run.seed] = run
    order = [*cell.RECIPES, *cell.VARIANTS, *cell.PRECISIONS]
    keys = sorted(cells, key=lambda key: [order.index(name) if name in order else -1 for name in key])
    return [summarise_cell(cells, *key) for key in keys]


def summarise_cell(
    cells: dict[tuple[str, str, str], dict[int, AblationRun]], data: str, variant: str, precision: str
) -> AblationCell:
    mine = cells[data, variant, precision]
    kept = [run for run in mine.values() if run.log_loss is not None]

    def mean(name: str) -> float | None:
        return statistics.fmean(getattr(run, name) for run in kept) if kept else None

    return AblationCell(
        data=data,
        variant=variant,
        precision=precision,
        seeds=len(mine),
        diverged=len(mine) - len(kept),
        fp8_share=statistics.fmean(run.fp8_share for run in mine.values()),
        log_loss=mean("log_loss"),
        auc=mean("auc"),
        seconds=mean("seconds"),
        against_original=compare(mine, cells.get((data, ORIGINAL, BASELINE), {})),
        against_bf16=compare(mine, cells.get((data, variant, BASELINE), {})),
        against_naive=None if precision == BASELINE else compare(mine, cells.get((data, variant, "naive"), {})),
    )


def compare(mine: dict[int, AblationRun], theirs: dict[int, AblationRun]) -> PairedChange | None:
    """The paired comparison over the seeds that both have; None for a cell with itself or with fewer than two."""
    pairs = [(mine[seed].log_loss, theirs[seed].log_loss) for seed in sorted(mine.keys() & theirs.keys())]
    pairs = [pair for pair in pairs if None not in pair]
    if len(pairs) < 2 or mine is theirs:
        return None
    candidate, baseline = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    found = compare_paired(
        candidate,
        baseline,
        margin=100 * MARGIN,  # percent, as all of what it returns
        metric="log loss",
        lower_is_better=True,
        relative=True,
        method="student",
    )
    change = Interval(value=found.estimate / 100, low=found.low / 100, high=found.high / 100)
    return PairedChange(change=change, minimum_detectable=found.mde / 100, outcome=found.verdict, seeds=len(pairs))


def describe(report: Ablation) -> str:
    lines = [
        f"{'data':20} {'mods':11} {'precision':9} {'log loss':>9} {'AUC':>7} {'FP8':>6}  against the original in bf16"
    ]
    for row in report.cells:
        found = row.against_original
        text = "" if found is None else (
            f"{100 * found.change.value:+.3f} % [{100 * found.change.low:+.3f}, {100 * found.change.high:+.3f}] {found.outcome}, "
            f"MDE {100 * found.minimum_detectable:.3f} %"
        )  # fmt: skip
        lost = f" ({row.diverged} of {row.seeds} diverged)" if row.diverged else ""
        loss, auc = (math.nan if value is None else value for value in (row.log_loss, row.auc))
        lines.append(
            f"{row.data:20} {row.variant:11} {row.precision:9} {loss:9.5f} {auc:7.4f} {row.fp8_share:6.1%}  {text}{lost}"
        )
    for kind, missing in (("skipped", report.skipped), ("failed", report.failed)):
        lines += [f"{kind}: {len(missing)} runs, e.g. {missing[0]}"] if missing else []
    return "\n".join([*lines, f"{report.seconds:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
