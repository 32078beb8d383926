"""Dispatch on a whole model: seven policies for one plain Wukong, the whole training step with AdamW, in one run.

    python benchmarks/policies.py --out policies.json --seconds 240                       on a GPU
    python benchmarks/policies.py --tuned tune_zoo_wukong.json --out policies.json        with the plan of that record instead of another call of tune
    python benchmarks/policies.py --device cpu --rows 64 --steps 1 --tune-seconds 30 --out x.json     a walk through the plans: nothing is timed; speeds are the shipped rows'; a minute with --tuned

    torchao-tensorwise, torchao-rowwise, torchao-rowwise_with_gw_hp      one recipe of torchao's at every linear of 256 and more
    all-deepgemm, all-fbgemm                                             one library at all of these; refused by name where it is not installed
    plan-mixed      per GEMM the fastest row of the database that is accurate enough: Probe watches a few steps, `report.plan(target=this GPU)` chooses
    plan-tune       what `loka.tune` chooses; beside it bf16-layout, its rewrites of the layout alone

The model is trained in bf16 first (benchmarks/tune_zoo.py); Probe and tune look at it alone on the card. Then benchmarks/zoo.py runs every policy: outputs and gradients are compared with float32,
the compiled step is captured in a CUDA graph, and all are timed in turns. Published, on another Wukong and compute only: tensorwise 1.05x, rowwise 1.01x, rowwise_with_gw_hp 1.08x, DeepGEMM 0.85x,
FBGEMM 0.98x, mixed 1.12x. Plans and weights are kept in --work, and not made again; OUT has the plans before anything is compiled. DeepGEMM compiles a kernel for every shape when it meets it, which
takes minutes one by one: a process for every shape has them compiled at the start, and what is timed finds them in DeepGEMM's cache.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))
import tune_zoo
import zoo
from evidence import describe_run, spell_command

POLICIES = ("torchao-tensorwise", "torchao-rowwise", "torchao-rowwise_with_gw_hp", "all-deepgemm", "all-fbgemm", "plan-mixed", "plan-tune")  # fmt: skip
PUBLISHED = {
    "torchao-tensorwise": 1.05, "torchao-rowwise": 1.01, "torchao-rowwise_with_gw_hp": 1.08, "all-deepgemm": 0.85, "all-fbgemm": 0.98, "plan-mixed": 1.12,
}  # fmt: skip
WATCHED = 3  # steps that Probe sees
LEFT_TO_TIME = 110  # seconds that the plans leave to compiling and timing
GPU_ROWS, SHIPPED = dict(zoo.ROWS), "NVIDIA H200"


def trained_model(name, steps, device, weights):
    """The model, trained; from the file where it was trained before."""
    model = tune_zoo.build(name, device)
    if weights.exists():
        model.load_state_dict(torch.load(weights, map_location=device))
    else:
        tune_zoo.train(model, name, device, steps)
        torch.save(model.state_dict(), weights)
    return model


def plan_mixed(model, name, device, samples):
    """Per GEMM the fastest row of the database that is accurate enough."""
    import loka

    probe = loka.Probe(model, every=1, rows=512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for inputs, labels in tune_zoo.batches(name, device, WATCHED, seed=3):
        tune_zoo.step(model, inputs, labels, "train", device)
        optimizer.step()
        probe.step()
    probe.detach()
    report = probe.evaluate(samples=samples, backends=("reference",), sources=("rows",), judged_on=("rows",))
    if device == "cpu":  # as if this were the card, with as many rows as there
        return report.plan(target=SHIPPED, row_factor=GPU_ROWS[name] / zoo.ROWS[name])
    return report.plan(target=torch.cuda.get_device_name(), database=rows_of_here(device))


def rows_of_here(device):
    """The shipped rows of the libraries that are installed: a plan that names another one could not be placed."""
    from loka.dispatch.database import Database
    from loka.dispatch.recipe import RECIPES
    from loka.dispatch.speed import shipped_database
    from loka.kernels import registry
    from loka.kernels.scaled_mm.call import MatmulCall

    pairs = [RECIPES[name].operands("fprop") for name in ("tensorwise", "rowwise", "blockwise")]
    calls = [MatmulCall(2048, 1024, 1024, o.a, o.b, torch.bfloat16, o.fast_accum) for o in pairs]
    kept, shipped = Database(":memory:"), shipped_database()
    for name in registry.BACKENDS["scaled_mm"]:
        if any(registry.backend("scaled_mm", name).supports(call, torch.device(device)) for call in calls):
            kept.merge(shipped.export(backend=name))
    kept.merge(shipped.export(backend="bf16"))
    return kept


def plan_tune(model, name, device, seconds):
    import loka

    held = tune_zoo.held_out(name, "train", device)
    tuned = loka.tune(model, held, tune_zoo.loss, seconds=seconds, progress=False)
    print(tuned, flush=True)
    return tuned.plan


def wide_shapes(name):
    """Outputs and inputs of the linears that a policy converts, each shape once."""
    rows, zoo.ROWS[name] = zoo.ROWS[name], 1
    try:
        with torch.device("meta"):
            model = zoo.make(name, "cpu")[0]
    finally:
        zoo.ROWS[name] = rows
    return sorted({tuple(m.weight.shape) for n, m in model.named_modules() if zoo._is_wide(m, n)})


def compile_library(shape, rows, recipe, backend, device):
    """One step of one linear as `all-BACKEND` runs it: its three products are compiled then, and stay in the library's cache."""
    import loka

    n, k = shape
    model = torch.nn.Sequential(torch.nn.Linear(k, n, device=device))
    loka.convert(model, recipe=recipe, backend=backend)
    zoo.run_step(model, (torch.randn(rows, k, device=device, requires_grad=True),), "train")


def start_compiling(a):
    """A process for every shape of DeepGEMM's, where it is installed."""
    if importlib.util.find_spec("deep_gemm") is None:
        return []
    command = [sys.executable, __file__, *sys.argv[1:], "--compile"]
    return [subprocess.Popen([*command, f"{n}x{k}"]) for n, k in wide_shapes(a.model)]


def make_plans(a, folder):
    """One after another, in this process, before anything else is on the card; a plan that fails leaves its reason."""
    import loka

    failed = {}
    if a.tuned:
        rows = json.loads(Path(a.tuned).read_text())["rows"]
        row = next(r for r in rows if (r["model"], r["target"]) == (a.model, "train") and "record" in r)
        msgspec.convert(row["record"]["plan"], loka.Plan).save(folder / "tune.json")
    ways = {"tune": lambda m: plan_tune(m, a.model, a.device, a.tune_seconds), "mixed": lambda m: plan_mixed(m, a.model, a.device, a.samples)}  # fmt: skip
    for name, make in ways.items():
        if (folder / f"{name}.json").exists():
            continue
        try:
            began = time.time()
            plan = make(trained_model(a.model, a.steps, a.device, folder / "weights.pt"))
            print(f"plan {name}: {time.time() - began:.0f} s\n{plan}"[:4000], flush=True)
            if not (plan.units or plan.mods or any(site.low_precision_share for site in plan.sites)):
                raise ValueError("the plan keeps every GEMM in 16 bits: the step is that of bf16")
            plan.save(folder / f"{name}.json")
        except Exception as error:  # the other policies are still worth their rows
            failed[name] = f"{type(error).__name__}: {error}"[:1500]
            print(f"plan {name}: FAILED {error}\n{traceback.format_exc()[-1500:]}", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="wukong")
    parser.add_argument("--tuned", help="a record of tune_zoo.py: take its plan")
    parser.add_argument("--steps", type=int, default=300, help="of training in bf16 before")
    parser.add_argument("--rows", type=int, help="of a batch, to try the script")
    parser.add_argument("--samples", type=int, default=4, help="of each GEMM that Probe judges")
    parser.add_argument("--tune-seconds", type=float, default=75)
    parser.add_argument(
        "--seconds", type=float, default=240, help="for all of it: what still compiles then is given up"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the plans alone")
    parser.add_argument("--work", type=Path, help="where plans and trained weights are kept; OUT.plans if not given")
    parser.add_argument("--plans-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", metavar="NxK", help=argparse.SUPPRESS)
    a = parser.parse_args()
    began, folder = time.time(), a.work or Path(f"{a.out}.plans")
    if a.compile:
        shape = tuple(int(size) for size in a.compile.split("x"))
        compile_library(shape, zoo.ROWS[a.model], zoo.RECIPE_OF["deepgemm"], "deepgemm", a.device)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if a.rows:
        if a.device == "cuda":
            parser.error("--rows is for --device cpu: zoo.py times its own number")
        zoo.ROWS[a.model] = a.rows
    if a.plans_only or a.device == "cpu":
        (folder / "failed.json").write_text(json.dumps(make_plans(a, folder)))
        return
    compiling = start_compiling(a)
    if not a.tuned:  # tune times what it chooses
        wait_for(compiling, began + a.seconds / 4)
    # in a process of its own: what it holds of the card must be gone before others are timed
    failed = ask_for_plans(folder, began + max(a.seconds - LEFT_TO_TIME, a.seconds / 4))
    write(a, folder, failed, {"environment": describe_run("cuda"), "rows": []})
    able = [p for p in POLICIES if not p.startswith("plan-") or (folder / f"{p.removeprefix('plan-')}.json").exists()]
    ways, left = ",".join(["bf16", "bf16-layout", *able]), a.seconds - (time.time() - began)
    timed = folder / "zoo.json"
    command = [sys.executable, str(Path(__file__).parent / "zoo.py"), "--models", a.model, "--modes", "train", "--ways", ways, "--plans", str(folder), "--wait", str(max(left - 25, 30)), "--out", str(timed)]  # fmt: skip
    try:
        subprocess.run(command, check=True)
    finally:
        wait_for(compiling, 0.0)
    write(a, folder, failed, json.loads(timed.read_text()))
    timed.unlink()


def wait_for(processes, until):
    """Until they end, or until that time; what runs then is ended."""
    for process in processes:
        try:
            process.wait(max(until - time.time(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask_for_plans(folder, until):
    """Why which plans could not be made; those that could are in the folder."""
    file = folder / "failed.json"
    file.unlink(missing_ok=True)
    asked = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--plans-only"])
    wait_for([asked], until)
    if asked.returncode == 0:
        return json.loads(file.read_text())
    why = "there was no time left for it" if asked.returncode < 0 else f"the plans' process ended with {asked.returncode}"  # fmt: skip
    return {name: why for name in ("tune", "mixed") if not (folder / f"{name}.json").exists()}


def write(a, folder, failed, body):
    """The record: what was timed, what could not be planned, and the plans."""
    for name, why in failed.items():
        body["rows"].append({"model": a.model, "mode": "train", "way": f"plan-{name}", "failed": why})
    base = next((row["ms"] for row in body["rows"] if row["way"] == "bf16" and "ms" in row), None)
    for row in body["rows"]:
        row["published"] = PUBLISHED.get(row["way"])
        row["speedup"] = base / row["ms"] if base and "ms" in row else None
    body["plans"] = {f.stem: json.loads(f.read_text()) for f in folder.glob("*.json") if f.stem in ("mixed", "tune")}
    body["command"] = spell_command()
    a.out.write_text(json.dumps(body, indent=1))


if __name__ == "__main__":
    main()
