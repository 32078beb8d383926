"""The configuration that was timed, trained: what `loka.tune` chooses for a model, beside bf16 of the original, step time, memory and loss of the same object.

    python benchmarks/trained.py --root FOLDER --out trained.json --seeds 8 --processes 4 --seconds 480             on a GPU
    python benchmarks/trained.py --root FOLDER --out x.json --device cpu --families dlrm --data complete-journey --size tiny --shorten 200 --seeds 2     dry run

For every family and data set:

    1  a model of seed 0 is trained for a third of its steps in bf16 and tuned on validation batches (`loka.tune`, once as it is, once with `architecture=True`); the plan is saved
    2  every arm trains from the same weights on the same batches for a fixed number of steps, seed by seed:
           bf16         the original, autocast          naive     every linear in FP8, one scale per tensor
           tuned        loka.convert(model, plan)       mods      bf16 with the plan's architecture mods; tuned-mods: the plan of that architecture
    3  the test log loss is compared seed by seed: `tuned` with bf16, `tuned-mods` with `mods` at 0.02 % and with bf16 at 0.1 %

Power: beside every change stands the smallest one that as many seeds detect (80 %, two-sided 5 %); start with three seeds and see how many it takes. Step time is the median of the later half of
the steps as they trained, so it includes the optimizer, Guard and what the loop costs; the time of a step alone is in the tuning record. The file is written again after every run, and finished
runs are not repeated.
"""

import argparse
import itertools
import json
import math
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import ablation_cell as cell
from quality_ranking import read_tables

import loka
from loka import mods, records
from loka.lowp import Guard
from loka.metrics import compare_paired
from loka.models import build_ranker
from loka.training import Optimizers, learning_rate_factor

ARMS = ("bf16", "tuned", "naive", "mods", "tuned-mods")
AGAINST = {
    "tuned": (("bf16", 0.0002),),
    "naive": (("bf16", 0.0002),),
    "mods": (("bf16", 0.001),),
    "tuned-mods": (("mods", 0.0002), ("bf16", 0.001)),
}
WARM = 3  # tuned after a third of the steps
TUNE_BATCHES = 32


@dataclass(frozen=True)
class Bench:
    """What all runs share."""

    root: Path
    device: str
    size: str
    shorten: float
    plans: Path
    tune_seconds: float


def build(bench: Bench, family: str, data: str, seed: int) -> tuple[Any, dict[str, Any], cell.Recipe]:
    """The user's own model, with the weights of the seed."""
    torch.set_float32_matmul_precision("high")
    recipe = cell.RECIPES[data]
    schema, tables = read_tables(bench.root, data, bench.device)
    torch.manual_seed(seed)
    options = cell.ORIGINAL if family == "wukong" else {}
    model = build_ranker(schema, family, bench.size, sparse=True, dropout=recipe.dropout, **options)
    return model.to(bench.device), tables, recipe


def configure(bench: Bench, recipe: cell.Recipe, rows: int) -> Any:
    return cell.configure(cell.Bench(bench.root, bench.device, shorten=bench.shorten), recipe, rows)


def losses(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output.float(), labels, reduction="none").mean(1)


def plan_file(bench: Bench, family: str, data: str, architecture: bool) -> Path:
    return bench.plans / f"{family}-{data}{'-mods' if architecture else ''}.json"


def make_plan(bench: Bench, family: str, data: str, architecture: bool) -> None:
    """Train a third, tune, save the plan and what tune found."""
    model, tables, recipe = build(bench, family, data, seed=0)
    config = configure(bench, recipe, len(tables["train"]))
    train(model, tables["train"], recipe, config, bench, 0, math.inf, None, stop=max(2, config.steps // WARM))
    order = torch.randperm(len(tables["valid"]), generator=torch.Generator().manual_seed(0)).to(bench.device)
    size = min(recipe.batch, max(1, len(order) // TUNE_BATCHES))
    held = [((batch,), batch.labels) for batch in itertools.islice(tables["valid"].batches(order, size), TUNE_BATCHES)]
    tuned = loka.tune(
        model,
        held,
        losses,
        architecture=architecture,
        seconds=bench.tune_seconds,
        autocast=torch.bfloat16,
        progress=False,
    )
    out = plan_file(bench, family, data, architecture)
    tuned.plan.save(out)
    records.save(tuned.record, out.with_suffix(".tuning.json"))


def lower(model: Any, bench: Bench, family: str, data: str, arm: str, batch: Any) -> dict[str, Any]:
    """Turn the original into an arm, in place, by public calls alone."""
    if arm == "bf16":
        return {}
    if arm == "naive":
        done = loka.convert(model, recipe="tensorwise")
        return {"converted": len(done.converted)}
    plan = loka.Plan.load(plan_file(bench, family, data, arm != "tuned"))
    if arm == "mods":
        names = [name for name in plan.mods if name in mods.CORE]
        mods.apply(model, names, example=batch)
        return {"mods": names}
    done = loka.convert(model, plan, example=(batch,))
    return {"share": done.low_precision_share, "units": len(plan.units), "mods": list(plan.mods)}


def train(
    model: Any,
    table: Any,
    recipe: cell.Recipe,
    config: Any,
    bench: Bench,
    seed: int,
    deadline: float,
    guard: Guard | None,
    *,
    stop: int | None = None,
) -> dict[str, Any]:
    optimizers, ends = Optimizers(model, config), []
    model.train()
    for step, batch in enumerate(cell.shuffled(table, recipe, seed)):
        if step == (stop or config.steps):
            break
        optimizers.set_factor(learning_rate_factor(config, step))
        if guard is not None:
            guard.begin_step()
        loss = cell.lose(model, batch, bench.device)
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        if guard is not None:
            guard.check()
        if bench.device == "cuda" and step % 10 == 9:
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
        if time.time() > deadline:
            raise TimeoutError(f"out of time after {step + 1} of {config.steps} steps")
    later = [b - a for a, b in itertools.pairwise(ends[len(ends) // 2 :])]
    return {
        "steps": config.steps,
        "train_loss": float(loss.detach()),
        "step_ms": 1e3 * median(later) if later else None,
    }


def run(bench: Bench, family: str, data: str, arm: str, seed: int, deadline: float) -> dict[str, Any]:
    """Train one arm of one seed and score it on the test split."""
    model, tables, recipe = build(bench, family, data, seed)
    example = next(
        iter(
            tables["train"].batches(
                torch.arange(min(recipe.batch, len(tables["train"])), device=bench.device), recipe.batch
            )
        )
    )
    facts = lower(model, bench, family, data, arm, example)
    if bench.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(seed + 1000)  # dropout starts alike in all arms
    config = configure(bench, recipe, len(tables["train"]))
    guard = Guard(model) if arm in ("tuned", "tuned-mods", "naive") else None
    facts |= train(model, tables["train"], recipe, config, bench, seed, deadline, guard)
    if guard is not None:
        facts["guard"] = [str(event) for event in guard.events]
    if bench.device == "cuda":
        facts["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    rows = len(tables["test"]) if bench.shorten == 1 else max(1000, round(len(tables["test"]) / bench.shorten))
    facts["auc"], facts["log_loss"] = cell.score(model, tables["test"], bench.device, rows)
    return facts


def job(bench: Bench, name: str, deadline: float) -> dict[str, Any]:
    """A run by its name, in a process of its own; what fails is a result too."""
    family, data, arm, seed = name.split("/")
    torch.set_num_threads(1)
    try:
        return run(bench, family, data, arm, int(seed), deadline)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-800:]}


def summarise(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Per family, data set and arm: the change of the loss over paired seeds, step time and memory beside bf16."""
    rows = []
    groups = dict.fromkeys(tuple(name.split("/")[:3]) for name in found)
    for family, data, arm in groups:
        for other, margin in AGAINST.get(arm, ()):
            pairs = [
                (found[f"{family}/{data}/{arm}/{s}"], found[f"{family}/{data}/{other}/{s}"])
                for s in range(1000)
                if all("log_loss" in found.get(f"{family}/{data}/{a}/{s}", {}) for a in (arm, other))
            ]
            if len(pairs) < 2:
                continue
            ours, theirs = (torch.tensor([p[i]["log_loss"] for p in pairs], dtype=torch.float64) for i in (0, 1))
            seen = compare_paired(
                ours,
                theirs,
                margin=100 * margin,
                metric="log loss",
                lower_is_better=True,
                relative=True,
                method="student",
            )
            row = {
                "family": family, "data": data, "arm": arm, "against": other, "margin": margin, "seeds": len(pairs),
                "change": seen.estimate / 100, "low": seen.low / 100, "high": seen.high / 100, "detectable": seen.mde / 100,
                "verdict": seen.verdict,
            }  # fmt: skip
            for key in ("step_ms", "peak_gib"):
                if all(p[i].get(key) for p in pairs for i in (0, 1)):
                    row[key] = [median(p[i][key] for p in pairs) for i in (0, 1)]
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of quality_data.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; written again after every run")
    parser.add_argument("--families", default="wukong,dlrm,interformer")
    parser.add_argument("--data", default=",".join(cell.RECIPES))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--size", default="small")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="runs at a time; step times are comparable only among runs with as many neighbours",
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run after this")
    parser.add_argument("--tune-seconds", type=float, default=90)
    parser.add_argument("--shorten", type=float, default=1.0, help="divide the length of every run, to test the script")
    a = parser.parse_args()
    plans = a.out.with_suffix(".plans")
    plans.mkdir(parents=True, exist_ok=True)
    bench = Bench(a.root, a.device, a.size, a.shorten, plans, a.tune_seconds)
    deadline = time.time() + a.seconds
    body: dict[str, Any] = json.loads(a.out.read_text()) if a.out.exists() else {"runs": {}}
    body["settings"] = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(bench).items()
        if key not in ("root", "plans")
    }
    body["environment"] = msgspec.to_builtins(
        records.capture_environment(command=" ".join(["trained.py", *sys.argv[1:]]))
    )

    def write() -> None:
        body["summary"] = summarise(body["runs"])
        records.write_atomically(a.out, json.dumps(body, indent=1).encode())

    cells = list(itertools.product(a.families.split(","), a.data.split(",")))
    for family, data in cells:  # tuned one after another: tune times what it chooses, so the card must be its own
        for architecture in dict.fromkeys(
            arm != "tuned" for arm in a.arms.split(",") if arm in ("tuned", "mods", "tuned-mods")
        ):
            if not plan_file(bench, family, data, architecture).exists() and time.time() < deadline:
                make_plan(bench, family, data, architecture)
    names = [f"{f}/{d}/{arm}/{s}" for s in range(a.seeds) for f, d in cells for arm in a.arms.split(",")]
    todo = [name for name in names if "log_loss" not in body["runs"].get(name, {})]
    with ProcessPoolExecutor(a.processes, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(job, bench, name, deadline): name for name in todo if time.time() < deadline}
        for done in as_completed(waiting):
            body["runs"][waiting[done]] = done.result()
            write()
    body["tuned"] = {
        f.name.removesuffix(".tuning.json"): json.loads(f.read_text()) for f in sorted(plans.glob("*.tuning.json"))
    }
    write()
    for row in body["summary"]:
        print(row)


if __name__ == "__main__":
    main()
