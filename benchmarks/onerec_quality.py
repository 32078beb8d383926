"""What FP8 costs a trained OneRec: recall, NDCG, likelihood and the overlap of beam sets, against bf16, on three data sets.

    python benchmarks/onerec_quality.py --root FOLDER --out onerec_quality.json --seconds 500
    python benchmarks/onerec_quality.py --combine A.json B.json --out onerec_quality.json
    python benchmarks/onerec_quality.py --root FOLDER --out onerec_wide.json --models wide --only ml-1m --seeds 0,1,2 --users 3000 --no-sensitivity --seconds 240
    python benchmarks/onerec_quality.py --root FOLDER --out x.json --device cpu --only amazon-2018-scientific --shorten 100 --users 60 --beams 32    dry run

FOLDER holds the compact data of benchmarks/quality_data.py; training is that of benchmarks/quality_sequences.py. Each model is trained once (early stopping on
the validation split), then run through the engine on the test users in bf16, in fp16 and in FP8 (loka.quantize, no calibration, nothing chosen on test data), constrained to valid ids:

    fp8           the published recipe, `onerec`: attention and dense FFNs per channel and token, experts 1x128 and 128x128
    fp8 mixed     ours, `onerec_mixed`: experts' gate and up scaled per row, down in blocks

    quality       recall@10, NDCG@10, log-likelihood per user; FP8 against bf16, paired, equivalence within 1 %, and the smallest change that as many users detect
    overlap       of the first n beams with bf16's, n = 10, 50, 512: FP8's beside fp16's, since two 16-bit formats disagree as well
    sensitivity   change of the validation likelihood with one site at a time in FP8, also for the sites the recipe keeps

`moe` is the same model with a mixture of experts from its second block on, `wide` one of 512 with eight experts of 1408, so that every matrix of an expert has several 128-blocks. Several
--seeds are processes that share the card; what they say together is the mean of each user's values over the seeds. Rows are written as they come; a failing part is a row with its error.
Half of the time is for training. Then all arms answer the same PIECE users, and the next ones, until time is over: a row says how many. An arm that fails is named and left out.
Data: `quality_data.py --only sequences-ml-1m --no-baselines`, 3 MiB.
"""

import argparse
import json
import queue
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import quality_sequences as sequences
import torch
import torch.nn.functional as F
from evidence import spell_command
from onerec_synthetic import share_weights
from torch import Tensor

from loka.data.batch import Jagged
from loka.inference import Engine, EngineConfig, Request
from loka.metrics import BeamOverlap, compare_paired
from loka.models.onerec import Experts, OneRec
from loka.ptq import quantize
from loka.records import capture_environment
from loka.training import TrainConfig

MARGIN = 1.0  # percent
GRACE = 15.0  # seconds after the deadline until a seed is given up
PIECE = 512  # users that every arm answers before time is asked for
Z975 = 1.959964
DATA = ("amazon-2018-scientific", "ml-1m", "amazon-2014-beauty")
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"experts": Experts(routed=8, top=2, hidden=128, shared=1, dense_blocks=1)},
    "wide": {"d": 512, "d_ff": 1536, "experts": Experts(routed=8, top=2, hidden=1408, shared=1, dense_blocks=1)},
}
TRAINING: dict[str, dict[str, Any]] = {"wide": {"steps": 1500, "batch": 1024, "learning_rate": 1e-3, "evaluations": 3}}
LOW = {"fp8": "onerec", "fp8 mixed": "onerec_mixed"}  # arm: recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default=",".join(DATA), help="data sets")
    parser.add_argument("--models", default="dense,moe")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--seeds", default="0", help="comma-separated; several train side by side")
    parser.add_argument("--no-sensitivity", action="store_true", help="leave out the sites one at a time")
    parser.add_argument("--users", type=int, default=8000, help="test users, at most")
    parser.add_argument("--beams", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32, help="requests per batch of the engine")
    parser.add_argument("--shorten", type=float, default=1.0, help="divide the length of training, to test the script")
    parser.add_argument(
        "--combine", type=Path, nargs="+", help="run nothing: write the rows of these files, and what they say together"
    )
    a = parser.parse_args()
    if a.combine:
        a.out.write_text(json.dumps(combine([json.loads(file.read_text()) for file in a.combine]), indent=1) + "\n")
        return 0
    if a.root is None:
        parser.error("--root FOLDER is needed to run something")
    started = time.monotonic()
    name = torch.cuda.get_device_name() if a.device == "cuda" else "cpu"
    environment = capture_environment(command=spell_command(), device=name)
    report: dict[str, Any] = {
        "environment": {n: getattr(environment, n) for n in environment.__struct_fields__},
        "settings": {k: str(v) for k, v in vars(a).items() if k not in ("root", "out")},
        "rows": [],
        "failed": [],
        "skipped": [],
    }
    deadline = time.time() + a.seconds
    seeds, values = [int(seed) for seed in a.seeds.split(",")], {}
    for told in answers(a, seeds, deadline):
        part, found = told
        if part == "values":
            values.setdefault(found.pop("cell"), []).append(found)
        else:
            report[part].append(found)
        report["over seeds"] = {cell: pool(each) for cell, each in values.items() if len(each) > 1}
        report["seconds"] = time.monotonic() - started
        a.out.write_text(json.dumps(report, indent=1))
    a.out.write_text(json.dumps(report, indent=1))
    print(describe(report))
    return 1 if report["failed"] else 0


def answers(a: argparse.Namespace, seeds: list[int], deadline: float) -> Iterator[tuple[str, Any]]:
    """What the seeds tell, as it comes: one here, several in processes of their own."""
    if len(seeds) == 1:
        yield from run_seed(a, seeds[0], deadline)
        return
    context = get_context("spawn")
    told = context.Queue()
    processes = {s: context.Process(target=tell, args=(told, a, s, deadline), daemon=True) for s in seeds}
    for process in processes.values():
        process.start()
    while processes:
        try:
            seed, what = told.get(timeout=max(deadline + GRACE - time.time(), 0.1))
        except queue.Empty:
            break
        if what is None:
            del processes[seed]
        else:
            yield what
    for seed, process in processes.items():
        process.terminate()
        yield "skipped", f"seed {seed}: not at its end {GRACE:.0f} s after the deadline"


def tell(out: Any, a: argparse.Namespace, seed: int, deadline: float) -> None:
    try:
        for what in run_seed(a, seed, deadline):
            out.put((seed, what))
    finally:
        out.put((seed, None))


def run_seed(a: argparse.Namespace, seed: int, deadline: float) -> Iterator[tuple[str, Any]]:
    """All cells of a seed, one after another; each has a fair share of the time that is left, half of it for training."""
    cells = [(data, kind) for kind in a.models.split(",") for data in a.only.split(",")]
    for number, (data, kind) in enumerate(cells):
        left = deadline - time.time()
        if left < 5:
            yield "skipped", f"{kind}:{data} seed {seed}"
            continue
        try:
            share, now = left / (len(cells) - number), time.time()
            row, values = run(a, data, kind, seed, trained_by=now + 0.5 * share, deadline=now + share)
            yield "values", {"cell": f"{kind}:{data}", **values}
            yield "rows", row
        except Exception as error:
            traceback.print_exc()
            yield "failed", {"cell": f"{kind}:{data} seed {seed}", "error": f"{type(error).__name__}: {error}"[:800]}


def pool(seeds: list[dict[str, dict[str, np.ndarray]]]) -> dict[str, Any]:
    """What the seeds say together: every user's mean over them, FP8 against bf16; of the users and arms that all of them have."""
    users = min(len(values) for seed in seeds for arm in seed.values() for values in arm.values())
    means = {
        arm: {metric: torch.from_numpy(np.mean([seed[arm][metric][:users] for seed in seeds], 0)) for metric in values}
        for arm, values in seeds[0].items()
        if all(arm in seed for seed in seeds)
    }
    changes = {f"{arm} against bf16": {m: compare(v, means["bf16"][m], m) for m, v in means[arm].items()} for arm in LOW if arm in means}  # fmt: skip
    return {"seeds": len(seeds), "arms": {a: {m: float(v.mean()) for m, v in each.items()} for a, each in means.items()}, **changes}  # fmt: skip


def combine(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of several runs, and every metric over all of them: the mean of the changes weighted by their precision (users of different rows are different)."""
    rows = [row for report in reports for row in report["rows"]]
    pooled = {}
    for metric in dict.fromkeys(name for row in rows for name in row["fp8 against bf16"]):
        found = [row["fp8 against bf16"][metric] for row in rows]
        found = [f for f in found if "percent" in f]
        errors = [(f["high"] - f["low"]) / (2 * Z975) for f in found]
        weights = [1 / e**2 for e in errors]
        mean = sum(w * f["percent"] for w, f in zip(weights, found, strict=True)) / sum(weights)
        half = Z975 / sum(weights) ** 0.5
        verdict = "equivalent" if abs(mean) + half < MARGIN else "worse" if mean + half < 0 else "inconclusive"
        pooled[metric] = {
            "percent": mean,
            "low": mean - half,
            "high": mean + half,
            "verdict": verdict,
            "rows": len(found),
        }
    joined = {name: [x for report in reports for x in report[name]] for name in ("failed", "skipped")}
    settings = [report["settings"] for report in reports]
    return {"environment": reports[-1]["environment"], "settings": settings, "rows": rows, **joined, "pooled": pooled}


def run(
    a: argparse.Namespace, data: str, kind: str, seed: int, *, trained_by: float, deadline: float
) -> tuple[dict[str, Any], Any]:
    """Train one model and ask every arm. Returns the row, and every user's values."""
    begin = time.monotonic()
    task, trained = train(a, data, kind, seed, trained_by)
    row: dict[str, Any] = {"data": data, "model": kind, "seed": seed, **trained}
    users, target = (t[: a.users] for t in task.events.held_out("test"))
    arms, failed = ask(task, users, target, a, row, deadline)
    if failed:
        row["failed arms"] = failed
    values = {name: arm["values"] for name, arm in arms.items()}
    row["arms"] = {name: {k: float(v.double().mean()) for k, v in each.items()} for name, each in values.items()}
    for name in (low for low in LOW if low in values):
        row[f"{name} against bf16"] = {k: compare(values[name][k], v, k) for k, v in values["bf16"].items()}
    ns = [n for n in (10, 50, 512) if n <= arms["bf16"]["items"].shape[1]]
    row["overlap with bf16"] = {
        name: overlap(arms["bf16"]["items"], arms[name]["items"], ns) for name in arms if name != "bf16"
    }
    row["sensitivity"] = [] if a.no_sensitivity or time.time() > deadline else sensitivity(task, a)
    row["seconds"] = time.monotonic() - begin
    print(f"{kind}:{data} {row['seconds']:.0f} s {row['arms']} {row['overlap with bf16']}", file=sys.stderr, flush=True)
    # as arrays: a tensor that a process sends goes with the process
    return row, {name: {k: v.double().cpu().numpy() for k, v in each.items()} for name, each in values.items()}


def train(a: argparse.Namespace, data: str, kind: str, seed: int, deadline: float) -> tuple[Any, dict[str, Any]]:
    events = sequences.read_events(a.root, data, a.device)
    recipe = replace(sequences.RECIPES["onerec", data][0], **TRAINING.get(kind, {}))
    recipe = replace(recipe, steps=max(2, round(recipe.steps / a.shorten)), model=recipe.model | KINDS[kind])
    if a.shorten > 1:
        recipe = replace(recipe, batch=min(recipe.batch, 64), evaluations=1)
    torch.manual_seed(seed)
    task = sequences.NextId(events, recipe)
    task.model.to(a.device)
    config = TrainConfig(
        steps=recipe.steps,
        warmup_steps=min(100, recipe.steps),
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        schedule="cosine",
        final_fraction=0.02,
    )
    best = sequences.train(task, recipe, config, a.device, deadline, limit=min(3000, a.users))
    task.model.load_state_dict(best.pop("state"))
    task.model.eval()
    return task, {"training": {k: v for k, v in best.items() if isinstance(v, int | float | str)}}


def histories(task: Any, users: Tensor, target: Tensor) -> list[Tensor]:
    """What each user did before the target, as the model reads it."""
    e = task.events
    first = torch.maximum(e.first[users], target - task.recipe.length)
    return [task.described[e.items[a:b]] for a, b in zip(first.tolist(), target.tolist(), strict=True)]


def ask(
    task: Any, users: Tensor, target: Tensor, a: argparse.Namespace, row: dict[str, Any], deadline: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """The answers of every arm to as many users as there is time for, and why an arm has none; bf16 must have some."""
    engines: dict[str, Any] = {}
    pieces: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    began = time.time()
    for some, goal in zip(users.split(PIECE), target.split(PIECE), strict=True):
        now = time.time()
        if pieces and now + (now - began) > deadline:  # another would take as long as the last one
            break
        began = now
        for name, dtype in (("bf16", "bf16"), *((low, "bf16") for low in LOW), ("fp16", "fp16")):
            if name in failed:
                continue
            try:
                if name not in engines:
                    engines[name] = make_engine(task, name, dtype, a, row)
                pieces.setdefault(name, []).append(answer(task, *engines[name], some, goal, dtype, a))
            except Exception as error:
                if name == "bf16":
                    raise
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"[:800]
                pieces.pop(name, None)
    arms = {
        name: {
            "items": torch.cat([each["items"] for each in found]),
            "values": {k: torch.cat([each["values"][k] for each in found]) for k in found[0]["values"]},
        }
        for name, found in pieces.items()
    }
    return arms, failed


def make_engine(task: Any, name: str, dtype: str, a: argparse.Namespace, row: dict[str, Any]) -> tuple[OneRec, Engine]:
    """An arm's model and what serves it; the row is told what is in FP8. Backends are not timed, which would take longer than all users."""
    model = share_weights(task.model)
    if name in LOW:
        summary = quantize(model, LOW[name])
        row[f"quantised {name}"] = f"{len(summary.quantized)} of {len(summary.record.sites)}"
        row[f"bytes ratio {name}"] = summary.record.ratio
    config = EngineConfig(beams=a.beams, requests=(a.batch,), dtype=dtype, normalize="valid", fuse=False, tune=False)
    return model, Engine(model, config, valid=task.trie, device=a.device)


@torch.no_grad()
def answer(
    task: Any, model: OneRec, engine: Engine, users: Tensor, target: Tensor, dtype: str, a: argparse.Namespace
) -> dict[str, Any]:
    """Items and per-user metrics of one arm."""
    rows, goals = histories(task, users, target), task.events.items[target].cpu()
    items = torch.full((len(rows), a.beams), -1, dtype=torch.int64)
    for start in range(0, len(rows), a.batch):
        for place, found in enumerate(engine.generate([Request(r) for r in rows[start : start + a.batch]]), start):
            items[place, : len(found.items)] = found.items
    hit = items[:, :10] == goals[:, None]
    gain = 1.0 / torch.log2(torch.arange(2, 12).double())
    values = {"recall@10": hit.any(1).double(), "ndcg@10": (hit * gain).sum(1)}
    wide = torch.bfloat16 if dtype == "bf16" else torch.float16
    with torch.autocast(a.device, dtype=wide):
        values["log-likelihood"] = likelihood(task, model, users, target)
    return {"items": items, "values": values}


@torch.no_grad()
def likelihood(task: Any, model: OneRec, users: Tensor, target: Tensor) -> Tensor:
    """Log-probability of the held-out item among valid ids."""
    out = []
    for some, goal in zip(users.split(512), target.split(512), strict=True):
        rows = histories(task, some, goal)
        offsets = torch.tensor([0, *(len(r) for r in rows)], device=goal.device).cumsum(0)
        codes = task.events.codes[task.events.items[goal]]
        logits = model(Jagged(torch.cat(rows), offsets), codes)
        masks = task.trie.follow(codes)
        levels = [
            -F.cross_entropy(part.double().masked_fill(~mask, -torch.inf), codes[:, i], reduction="none")
            for i, (part, mask) in enumerate(zip(logits, masks, strict=True))
        ]
        out.append(torch.stack(levels).sum(0).cpu())
    return torch.cat(out)


def compare(candidate: Tensor, baseline: Tensor, metric: str) -> dict[str, Any]:
    sign = -1.0 if float(baseline.sum()) < 0 else 1.0
    if float(baseline.abs().sum()) == 0:
        return {"verdict": "no baseline: the metric is 0 for every user"}
    found = compare_paired(
        sign * candidate, sign * baseline, margin=MARGIN, metric=metric, lower_is_better=sign < 0, relative=True
    )
    ends = sorted((sign * found.low, sign * found.high))
    return {
        "percent": sign * found.estimate,
        "low": ends[0],
        "high": ends[1],
        "mde": found.mde,
        "verdict": found.verdict,
        "users": found.units,
    }


def overlap(reference: Tensor, candidate: Tensor, ns: list[int]) -> dict[str, float]:
    metric = BeamOverlap(ns)
    metric.update(reference, candidate)
    return {f"@{n}": value for n, value in metric.compute().overlap.items()}


def sensitivity(task: Any, a: argparse.Namespace) -> list[dict[str, Any]]:
    """Each site alone on the validation likelihood; `kept` sites are those the recipe leaves in 16 bits."""
    users, target = (t[: min(a.users, 1024)] for t in task.events.held_out("valid"))
    low = share_weights(task.model)
    by_recipe = set(quantize(share_weights(task.model), "onerec").quantized)
    done = quantize(low, "onerec", score=lambda m: (-likelihood(task, m, users, target), None), widen=True)
    found = {site.name: site.metric_change for site in done.record.sites if site.metric_change is not None}
    kept = set(found) - by_recipe
    return [
        {"site": name, "kept": name in kept, "percent": 100 * c.value, "low": 100 * c.low, "high": 100 * c.high}
        for name, c in sorted(found.items(), key=lambda pair: -pair[1].value)
    ]


def describe(report: dict[str, Any]) -> str:
    lines = []
    for row in report["rows"]:
        lines.append(f"{row['model']} {row['data']} seed {row['seed']} ({row['seconds']:.0f} s)")
        for low in (name for name in LOW if name in row["arms"]):
            for metric, found in row[f"{low} against bf16"].items():
                means = " ".join(f"{name} {row['arms'][name][metric]:.5f}" for name in ("bf16", "fp16", low) if name in row["arms"])  # fmt: skip
                ends = f"{found['percent']:+.3f} % [{found['low']:+.3f}, {found['high']:+.3f}]" if "percent" in found else ""  # fmt: skip
                lines.append(f"  {metric:16} {means}  {ends} {found['verdict']}")
        lines += [f"  overlap {name:5} {found}" for name, found in row["overlap with bf16"].items()]
        lines += [f"  most sensitive {s['site']} {s['percent']:+.3f} %" for s in row["sensitivity"][:3]]
    return "\n".join([*lines, *(f"failed {f}" for f in report["failed"]), *(f"skipped {s}" for s in report["skipped"])])


if __name__ == "__main__":
    sys.exit(main())
