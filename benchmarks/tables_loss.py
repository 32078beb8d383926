"""What low precision costs in training: the test log loss beside float32, paired seeds (same weights, same batches).

    python benchmarks/tables_loss.py --data ml-1m --source FOLDER --seeds 8 --steps 790 --learning-rate 0.003 --embedding-learning-rate 0.002 --ways float32,again,all --out loss-all-ml-1m.json

All of it together, on two gloo ranks that share each batch:

    all                int8 rows; 8-bit collectives (FSDP2): weights gathered in int8, gradients scattered in E4M3, stochastically; linears in FP8 as the plan says, test included
    sent               the same with the linears in float32
    wire               the collectives alone
    gathered           of these, the weights alone
    scattered          of these, the gradients alone
    planned            the linears alone
    ranks              two ranks, everything in float32: what another order of sums does
    forced             int8 rows, E4M3 both ways, FP8 at every linear whatever Probe says: what the plan is for

The plan is made once, by Probe, from a float32 run with a seed that is not compared; no linear may change the loss by more than its share of 0.02 %, linears
with fewer than 64 inputs or outputs stay high (there is no FP8 tile for them), and gradient products are rounded stochastically: to nearest they are biased, which a score of one step
does not see (FP8 input gradients, rounded to nearest at every linear of a tiny DLRM: +0.14 % on Census-Income; noise of the same size: 0.00 %). It is kept in the record.

Ways to keep the rows of all tables while they train (rowwise Adagrad, DLRM, everything else in float32), in one process, `--processes` runs at a time on one thread each (a run is no faster on two threads):

    int8               one scale a row, stochastic rounding          bf16        stochastic rounding
    e4m3               scales of powers of two, stochastic           e4m3-hot    the same, the hottest 20 % of the rows in float32
    e4m3-nearest       rounding to nearest, planted: it loses the small updates and must come out worse than int8

The learning rates fall to zero (cosine): at a constant rate the last steps move the loss by more than what is looked for.

Training is chaotic. Float32 runs of one MovieLens seed whose initial weights differ by a hundredth, or a thousandth, end 0.2 % apart (standard deviation), and another order of sums alone moved another seed by
0.19 %: beside the one float32 run that happened to be drawn, every way that perturbs anything looks worse or better by as much. So every way, float32 included, is drawn `--draws` times a seed: the initial weights
perturbed by a hundredth of their size (draw 0: not at all), the same for all ways, and other numbers for stochastic rounding. A seed counts with the means of its draws. `again` is float32 in draws of its own: the noise that is left.

Most of that noise comes from training too little. 500 steps at a rate of 0.001 leave a MovieLens model at a log loss of 0.582 (seeds 100 to 102), its seeds 2.6 % apart and the draws of a seed 0.14 %; a whole epoch (790 steps) at 0.003
ends at 0.559, with seeds and draws 0.04 % apart. So the rates and the length are chosen first, with float32 alone, on seeds that are not compared.

For each way: the relative change of the test log loss, mean and 95 % Student interval over seeds. A run whose loss is not finite is reported and not averaged. The file is written
again after every run, and finished runs are not repeated.
"""

import argparse
import json
import math
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from loka.data import load
from loka.kernels.embedding_update import reference as law
from loka.metrics import compare_paired
from loka.models import build_ranker
from loka.nn.tables import quantize_tables
from loka.probe import Probe
from loka.records import Choice, Plan, capture_environment, from_json, to_json
from loka.training import Callback, TrainConfig, Trainer, seed_everything
from loka.units.discovery import NARROW

BASELINE = "float32"
PERTURBATION = 1e-2
MARGIN = 0.1  # percent of the log loss
WEIGHTS, GRADIENTS = "int8:1x128", "e4m3:1x128:pow2:stochastic"
WIRE = f"{WEIGHTS},{GRADIENTS}"
WAYS: dict[str, dict[str, Any]] = {
    BASELINE: {"rows": "float32"},
    "again": {"rows": "float32"},
    "int8": {"rows": "int8:row"},
    "bf16": {"rows": "bfloat16"},
    "e4m3": {"rows": "e4m3:row:pow2"},
    "e4m3-hot": {"rows": "e4m3:row:pow2", "hot": 0.2},
    "e4m3-nearest": {"rows": "e4m3:row:pow2"},
    "all": {"rows": "int8:row", "collectives": WIRE, "planned": True},
    "sent": {"rows": "int8:row", "collectives": WIRE},
    "wire": {"rows": "float32", "collectives": WIRE},
    "gathered": {"rows": "float32", "collectives": f"{WEIGHTS},fp32"},
    "scattered": {"rows": "float32", "collectives": f"fp32,{GRADIENTS}"},
    "planned": {"rows": "float32", "collectives": None, "planned": True},
    "ranks": {"rows": "float32", "collectives": None},
    "forced": {"rows": "int8:row", "collectives": "e4m3:1x128:pow2", "recipe": "rowwise"},
}
RANKS = 2
PLAN_SEED, PLAN_MARGIN, SAMPLED_STEPS = 1000, 2e-4, 8
HALF = 2**22  # of 23 bits: rounds up what is above the middle


@contextmanager
def rounding_to_nearest(planted: bool) -> Iterator[None]:
    original = law.uniform_bits
    if planted:
        law.uniform_bits = lambda rows, columns, draw, **_: torch.full((len(rows), columns), HALF)  # type: ignore[assignment]
    try:
        yield
    finally:
        law.uniform_bits = original


@cache
def read(name: str, root: Path | None, source: Path | None) -> Any:
    return load(name, root=root, source=source)


def prepare(seed: int, draw: int, data: Any, options: argparse.Namespace) -> tuple[Any, TrainConfig]:
    seed_everything(seed)
    model = build_ranker(data.schema, "dlrm", "tiny", d=options.width)
    if draw:
        generator = torch.Generator().manual_seed(draw)
        for parameter in model.parameters():
            parameter.data *= 1 + PERTURBATION * torch.randn(parameter.shape, generator=generator)
    config = TrainConfig(
        steps=options.steps, batch_size=options.batch_size, seed=seed, device="cpu", compile="off",
        learning_rate=options.learning_rate, embedding_learning_rate=options.embedding_learning_rate,
        schedule="cosine", evaluate_every=0, log_every=options.steps,
    )  # fmt: skip
    return model, config


def round_otherwise(trainer: Trainer, draw: int) -> None:
    """Stochastic rounding of another draw: the order of examples stays the seed's."""
    for holder in (getattr(trainer, "clock", None), *(part for part, _ in trainer.optimizers._parts)):
        if hasattr(holder, "seed"):
            holder.seed += 1_000_003 * draw


class Watching(Callback):
    """Probe looks at some steps of a run."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def on_step_end(self, trainer: Trainer, log: Any) -> None:
        self.probe.step()


def make_plan(data: Any, options: argparse.Namespace) -> Plan:
    model, config = prepare(PLAN_SEED, 0, data, options)
    quantize_tables(model, rows="float32")
    probe = Probe(model, every=max(1, options.steps // SAMPLED_STEPS), rows=512)
    Trainer(model, data, config, callbacks=[Watching(probe)]).fit()
    probe.detach()
    report = probe.evaluate(samples=10, backends=("reference",), sources=("rows",), judged_on=("rows",))
    narrow = {site.name: "high" for site in report.record.sites if min(site.k, site.n) < NARROW}
    plan = report.plan(min_speedup=None, margin=PLAN_MARGIN, chains=False, overrides=narrow)
    return round_gradients_stochastically(plan)


def round_gradients_stochastically(plan: Plan) -> Plan:
    """The plan with stochastic rounding of both operands in every low-precision gradient GEMM. With rounding to nearest a weight is off to the same side in every step: a bias that training follows."""

    def turn(choice: Choice) -> Choice:
        if choice.gemm == "fprop" or choice.a is None or choice.b is None:
            return choice
        a, b = (spec if spec.endswith(":stochastic") else f"{spec}:stochastic" for spec in (choice.a, choice.b))
        return msgspec.structs.replace(choice, a=a, b=b, reason=f"{choice.reason}; rounded stochastically, as asked")

    sites = [msgspec.structs.replace(site, choices=[turn(c) for c in site.choices]) for site in plan.sites]
    return msgspec.structs.replace(plan, sites=sites, seal=None)


def run_on_ranks(
    way: str, seed: int, draws: list[int], options: argparse.Namespace, plan: Plan | None
) -> list[dict[str, Any]]:
    """Start this file again on RANKS processes; the first writes what came out."""
    asked = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(options).items()
        if value is not None and name not in ("out", "ways", "seeds", "draws", "processes", "one_of_many", "plan")
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        if plan is not None:
            asked.append(f"--plan={plan.save(Path(folder) / 'plan.json')}")
        asked.append(f"--one-of-many={','.join(map(str, (way, seed, *draws)))}")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        subprocess.run([*launcher, __file__, *asked, f"--out={out}"], check=True)
        result: list[dict[str, Any]] = json.loads(out.read_text())
    return result


def run_one_of_many(options: argparse.Namespace) -> None:
    """One rank of `run_on_ranks`."""
    import torch.distributed as dist

    from loka.training.distributed import DistributedTrainer, Distribution, joined

    way, seed, *draws = options.one_of_many.split(",")
    results = []
    with joined("gloo"):
        data = read(options.data, options.root, options.source)
        for draw in map(int, draws):
            model, config = prepare(int(seed), draw, data, options)
            asked = dict(WAYS[way])
            plan = Plan.load(options.plan) if asked.pop("planned", False) else None
            trainer = DistributedTrainer(
                model, data, config, plan=plan, recipe=asked.pop("recipe", None), how=Distribution(**asked)
            )
            round_otherwise(trainer, draw)
            trainer.fit()
            metrics, done = trainer.evaluate(data.test), trainer.conversion
            results.append({
                "way": way, "seed": int(seed), "draw": draw, "log_loss": metrics["log_loss"], "auc": metrics["auc"], "wire": None if trainer.wire is None else trainer.wire.ratio,
                "linears": 0 if done is None else len(done.converted), "gemm_flops_in_fp8": None if done is None else done.low_precision_share,
            })  # fmt: skip
        if dist.get_rank() == 0:
            options.out.write_text(json.dumps(results))


def run_alone(way: str, seed: int, options: argparse.Namespace, draw: int) -> dict[str, Any]:
    """One run in this process."""
    torch.set_num_threads(1)
    data = read(options.data, options.root, options.source)
    model, config = prepare(seed, draw + 1000 * (way == "again"), data, options)
    quantize_tables(model, **WAYS[way])
    for module in model.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"  # the planted rounding is the law's
    trainer = Trainer(model, data, config)
    round_otherwise(trainer, draw)
    with rounding_to_nearest(way == "e4m3-nearest"):
        trainer.fit()
    metrics = trainer.evaluate(data.test)
    return {"way": way, "seed": seed, "draw": draw, "log_loss": metrics["log_loss"], "auc": metrics["auc"]}


def run(
    way: str, seed: int, draws: list[int], options: argparse.Namespace, plan: Plan | None, pool: Executor
) -> list[dict[str, Any]]:
    if "collectives" in WAYS[way]:
        return run_on_ranks(way, seed, draws, options, plan)
    return list(pool.map(partial(run_alone, way, seed, options), draws))


def compare(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Relative change of the log loss, way by way, over the seeds that both have, each with the mean of its draws."""
    drawn: dict[tuple[str, int], list[float]] = {}
    for r in runs:
        if math.isfinite(r["log_loss"]):
            drawn.setdefault((r["way"], r["seed"]), []).append(r["log_loss"])
    loss = {key: sum(values) / len(values) for key, values in drawn.items()}
    rows = []
    for way in WAYS:
        seeds = sorted(seed for w, seed in loss if w == way and (BASELINE, seed) in loss)
        if way == BASELINE or len(seeds) < 2:
            continue
        pair = [torch.tensor([loss[w, s] for s in seeds], dtype=torch.float64) for w in (way, BASELINE)]
        found = compare_paired(
            *pair, margin=MARGIN, metric="log loss", lower_is_better=True, relative=True, method="student"
        )
        rows.append({
            "way": way, "seeds": len(seeds), "draws": min(len(drawn[way, s]) for s in seeds), "change_percent": found.estimate, "low": found.low, "high": found.high, "mde": found.mde,
            "verdict": str(found.verdict),
        })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="complete-journey")
    parser.add_argument("--source", type=Path, help="raw files of the data set")
    parser.add_argument("--root", type=Path, help="folder of caches")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--draws", type=int, default=4, help="runs of each way and seed")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--embedding-learning-rate", type=float, default=2e-2)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time of the ways that take one process")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--one-of-many", help=argparse.SUPPRESS)
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one_of_many:
        run_one_of_many(options)
        return 0
    settings = {
        name: value
        for name, value in vars(options).items()
        if name not in ("out", "source", "root", "ways", "seeds", "draws", "processes", "one_of_many", "plan")
    }
    stored = json.loads(options.out.read_text()) if options.out.exists() else {"settings": settings, "runs": []}
    if stored["settings"] != json.loads(json.dumps(settings)):
        raise SystemExit(f"{options.out} was made with other settings: {stored['settings']}")
    data = read(options.data, options.root, options.source)  # makes the cache, before others read it
    done = {(r["way"], r["seed"], r["draw"]) for r in stored["runs"]}
    plan = None
    if any(WAYS[way].get("planned") for way in options.ways.split(",")):
        if "plan" not in stored:
            stored["plan"] = json.loads(to_json(make_plan(data, options)))
        plan = from_json(json.dumps(stored["plan"]), Plan)
    with ProcessPoolExecutor(options.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for seed in range(options.seeds):
            for way in options.ways.split(","):
                draws = [draw for draw in range(options.draws) if (way, seed, draw) not in done]
                if not draws:
                    continue
                start = time.perf_counter()
                found = run(way, seed, draws, options, plan, pool)
                seconds = (time.perf_counter() - start) / len(draws)
                stored["runs"] += [{**one, "seconds": seconds} for one in found]
                print(f"{way} {seed}: {[round(one['log_loss'], 6) for one in found]}, {seconds:.0f} s each", file=sys.stderr, flush=True)  # fmt: skip
                stored["environment"] = json.loads(_environment())
                stored["changes"] = compare(stored["runs"])
                options.out.write_text(json.dumps(stored, indent=1) + "\n")
    for row in stored["changes"]:
        interval = f"[{row['low']:+.4f}, {row['high']:+.4f}]"
        print(
            f"{row['way']:14} {row['change_percent']:+.4f} %  {interval}  {row['seeds']} seeds x {row['draws']} draws  {row['verdict']}"
        )
    return 0


def _environment() -> bytes:
    import msgspec

    return msgspec.json.encode(capture_environment(device="cpu", threads=torch.get_num_threads()))


if __name__ == "__main__":
    raise SystemExit(main())
