"""`loka.tune` on models that nobody rewrote: step time and loss of one configuration, in one record.

    python benchmarks/tune_zoo.py --models dlrm,wukong --targets train,serve --out tune_zoo.json
    python benchmarks/tune_zoo.py --again tune_zoo.json                          the saved plans in fresh processes; adds what it finds to the rows
    python benchmarks/tune_zoo.py --device cpu --rows 64 --models dlrm --steps 20 --out x.json, then --again x.json         a walk through it: nothing is timed

Labels come from a fixed teacher. The models are trained 500 steps in bf16 first, all at once, each in a process of its own; the trained weights are kept beside the record (FILE.weights). Then they
are tuned on 16 batches they have not seen, one after another: tuning times what it chooses, so the card must be its own.

--again, for every row, in a process of its own: the trained model is loaded, converted from the saved plan, and compared with what tune left behind: the same modules and kernels, the same outputs,
the memory of the model and of one step (bar 5 %), the compiled step (bar 3 %). In the same run it is timed beside bf16, beside torchao's rowwise FP8 where that is installed, and beside
`plan_everything`, the best that public calls reach by hand, whose change of the loss says whether tune could have taken it. All rows are prepared and compiled at once, then timed one at a time.
"""

import argparse
import copy
import gc
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import zoo
from evidence import spell_command

AGAIN = 100  # seconds of --limit that --fresh keeps for --again


def teacher(shapes, device, seed=7, pooled=False):
    """A fixed function of the inputs, smooth and not linear; labels are drawn from it.

    pooled: of each history's mean over positions, for models that pool. They cannot learn what depends on every position by itself.
    """
    g = torch.Generator(device=device).manual_seed(seed)
    sizes = [s.shape[-1] if pooled else s.numel() // s.shape[0] for s in shapes]
    weights = [torch.randn(64, size, device=device, generator=g) / size**0.5 for size in sizes]
    last = torch.randn(64, device=device, generator=g) / 2

    def label(inputs, generator):
        parts = [_spread(x) for x in inputs]
        if pooled:
            parts = [x.mean(1) * x.shape[1] ** 0.5 for x in parts]
        h = sum(x.reshape(len(x), -1) @ w.T for x, w in zip(parts, weights, strict=True))
        p = torch.sigmoid(torch.tanh(h) @ last)
        return torch.bernoulli(p, generator=generator)

    return label


def _spread(x):
    """Floats as they are; ids as numbers without an order."""
    return x.float() if x.is_floating_point() else torch.sin(x.float())


def batches(name, device, count, seed):
    """Fresh inputs with labels."""
    _, shapes = _shapes(name, device)
    label = teacher(shapes, device, pooled=name == "encoder")
    g = torch.Generator(device=device).manual_seed(seed)

    def again(x):
        if x.is_floating_point():
            return torch.randn(x.shape, device=device, generator=g)
        return torch.randint(int(x.max()) + 1, x.shape, device=device, generator=g)

    for _ in range(count):
        inputs = tuple(again(x) for x in shapes)
        yield inputs, label(inputs, g)


def _shapes(name, device):
    return zoo.make(name, device)


def loss(output, target):
    every = output.float().flatten(1)  # several tasks learn one label
    return F.binary_cross_entropy_with_logits(every, target[:, None].expand_as(every), reduction="none").mean(1)


def train(model, name, device, steps):
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3 if name in ("dlrm", "cross", "tower") else 3e-4, fused=device == "cuda"
    )
    run = torch.compile(model, dynamic=False) if device == "cuda" else model
    for inputs, y in batches(name, device, steps, seed=1):
        with torch.autocast(device, torch.bfloat16):
            value = loss(run(*inputs), y).mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(value.detach())


def build(name, device):
    torch.manual_seed(0)
    with torch.device(device):
        return zoo.make(name, device)[0]


def held_out(name, target, device):
    held = list(batches(name, device, 16, seed=2))
    if target == "serve":
        held = [(zoo._floats(inputs, lambda x: x.to(torch.bfloat16)), y) for inputs, y in held]
    return held


def train_one(name, steps, device, weights):
    """Train a model and keep its weights."""
    began, model = time.time(), build(name, device)
    value = train(model, name, device, steps)
    torch.save(
        {"how": _how(name, steps, device), "loss": value, "state": model.state_dict(), "seconds": time.time() - began},
        weights,
    )


def _how(name, steps, device):
    return {"steps": steps, "rows": len(next(iter(batches(name, device, 1, seed=2)))[1])}


def tune(name, target, steps, seconds, device, weights, graphed=True):
    import loka

    model = build(name, device)
    kept = torch.load(weights, map_location=device)
    if kept["how"] != _how(name, steps, device):
        raise ValueError(f"{weights} was trained as {kept['how']}; delete it to train again")
    model.load_state_dict(kept["state"])
    facts = {"model": name, "target": target, "cuda_graph": graphed, "trained_loss": kept["loss"], "train_s": kept["seconds"]}  # fmt: skip
    del kept  # on the GPU, and not of tune
    held = held_out(name, target, device)
    if target == "serve":
        model = model.eval().to(torch.bfloat16)
    began = time.time()
    tuned = loka.tune(model, held, loss, target=target, seconds=seconds, progress=False, cuda_graph=graphed)
    facts["tune_s"] = time.time() - began
    facts["printed"] = str(tuned)
    facts["record"] = msgspec.to_builtins(tuned.record)
    first = held[0]
    del held
    facts["after"] = describe(tuned.model, first, target, device)
    return facts


def describe(model, batch, target, device):
    """What a converted model is: its modules, its outputs, what it and one step of it hold; kernels of the step."""
    inputs, labels = batch
    facts = {"modules": {name: type(module).__name__ for name, module in model.named_modules()}}
    if device == "cuda":
        gc.collect()  # models of earlier rows
        torch.cuda.empty_cache()
        facts["model_gib"] = (torch.cuda.memory_allocated() - sum(x.nbytes for x in (*inputs, labels))) / 2**30
        torch.cuda.reset_peak_memory_stats()
    names = []
    for _ in range(2):  # the first makes what is made once
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if device == "cuda" else None  # fmt: skip
        if profile is not None:
            profile.start()
        output = step(model, inputs, labels, target, device)
        if profile is not None:
            torch.cuda.synchronize()
            profile.stop()
            names = sorted(f"{e.count} x {e.key[:100]}" for e in profile.key_averages() if e.self_device_time_total > 0)
    facts["outputs"] = output.detach().float().flatten()[:256].cpu().tolist()
    if device == "cuda":
        facts |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "kernels": names}
    return facts


def step(model, inputs, labels, target, device):
    """One step as it is written, not compiled: forward, and backward in training."""
    if target == "serve":
        with torch.no_grad():
            return model(*inputs)
    model.train()
    with torch.autocast(device, torch.bfloat16):
        output = model(*inputs)
    loss(output, labels).mean().backward()
    model.zero_grad(set_to_none=True)
    return output


def again(row, weights, device, my_turn, torchao):
    """A row's plan in this fresh process: what is the same as in tune's own, and how fast it is here, timed when it is its turn."""
    import loka
    from loka.placing import plan_everything
    from loka.tuning import Task, timing
    from loka.tuning.comparing import evaluate

    name, target, record = row["model"], row["target"], row["record"]
    serving, training = target == "serve", target == "train"
    plan = msgspec.convert(record["plan"], loka.Plan)
    model = build(name, device)
    model.load_state_dict(torch.load(weights, map_location=device)["state"])
    first = next(iter(batches(name, device, 1, seed=2)))
    if serving:
        model = model.eval().to(torch.bfloat16)
        first = (zoo._floats(first[0], lambda x: x.to(torch.bfloat16)), first[1])
    twin = copy.deepcopy(model).cpu()  # for the other ways; not in the memory that is measured
    converts = plan.units or plan.mods or any(site.low_precision_share for site in plan.sites)
    done = loka.convert(model, plan, example=first[0], freeze=serving) if converts else None
    facts = {"after": describe(model, first, target, device)}
    facts |= compare(row, done, facts["after"])
    held = held_out(name, target, device)
    task = Task(model, held, loss, autocast=torch.bfloat16 if training and device == "cuda" else None)
    ways, tasks = {}, {"again": task}
    others = [
        "bf16",
        "everything",
        *(["torchao"] if torchao and device == "cuda" else []),
    ]  # torchao last: it changes how all that follows is compiled
    for way in others:
        other = copy.deepcopy(twin).to(device)
        try:
            if way == "everything":
                made = plan_everything(other, first[0], mods=list(loka.mods.FREE), serving=serving, linears=256)
                loka.convert(other, made, example=first[0], freeze=serving)
            if way == "torchao":
                zoo.prepare(other, "torchao-rowwise", first[0], "infer" if serving else "train", {})
            step(other, *first, target, device)
        except Exception as error:
            if way != "torchao":
                raise
            facts.setdefault("failed_ways", {})[way] = f"{type(error).__name__}: {error}"[:500]
            continue
        tasks[way] = Task(other, held, loss, autocast=task.autocast)
    losses = {way: evaluate(t, t.held_out, as_trained=training) for way, t in tasks.items()}
    facts["metric_change"] = {w: msgspec.to_builtins(losses[w].change_from(losses["bf16"])) for w in tasks if w != "bf16"}  # fmt: skip
    if device == "cuda":
        for way, t in tasks.items():
            for _ in range(2 * training):  # delayed scales are known before anything is compiled
                step(t.model, *t.kept[0], target, device)
                loka.refresh(t.model)
            try:
                ways[way] = timing.whole_step(t, training=training)
            except Exception as error:
                if way != "torchao":
                    raise
                facts.setdefault("failed_ways", {})[way] = f"{type(error).__name__}: {error}"[:500]
        my_turn()
        times = timing.time_in_turns(ways)
        facts["step_microseconds"] = {way: sorted(values)[len(values) // 2] for way, values in times.items()}
        facts |= judge(record, facts["step_microseconds"], graphed=row.get("cuda_graph", True))
    return facts


def compare(row, done, after):
    """Modules, conversion, kernels, outputs and memory, beside what tune left behind."""
    before, conversion = row["after"], row["record"]["conversion"]
    parts = ("converted", "units", "mods", "frozen", "kept")
    mine = None if done is None else msgspec.to_builtins(done)
    same = (mine is None) == (conversion is None)
    facts = {
        "same_modules": after["modules"] == before["modules"],
        "same_conversion": same and (mine is None or all(mine[part] == conversion[part] for part in parts)),
    }
    ours, theirs = (torch.tensor(side["outputs"]) for side in (after, before))
    facts["output_difference"] = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    if "kernels" in before:
        facts["kernels_only_here"] = sorted(set(after["kernels"]) - set(before["kernels"]))
        facts["kernels_only_in_tune"] = sorted(set(before["kernels"]) - set(after["kernels"]))
        facts["memory_after_tune"] = {key: before[key] / after[key] for key in ("model_gib", "peak_gib")}
    return facts


def judge(record, here, *, graphed):
    """The two bars of 3 %, and torchao beside. Steps here are in graphs: what tune timed without one is not compared."""
    there = record["step_microseconds"]
    mine = min((there[key] for key in there if key.startswith("loka")), default=there.get("bf16 layout"))
    found = {"over_best_by_hand": here["again"] / min(here["again"], here["bf16"], here["everything"])}
    if "torchao" in here:
        found["over_torchao"] = here["again"] / here["torchao"]
    if mine is not None and graphed:
        found["over_tune"] = here["again"] / mine
        found["speedup_over_tune"] = (here["bf16"] / here["again"]) / record["speedup"]["value"]
    return found


def weights_file(out, name):
    folder = Path(f"{out}.weights")
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.pt"


def save(body, out):
    import loka.records as records

    records.write_atomically(Path(out), json.dumps(body, indent=1).encode())


def tune_all(a, end):
    import loka.records as records

    device = torch.cuda.get_device_name() if a.device == "cuda" else "cpu"
    out = Path(a.out)
    body = json.loads(out.read_text()) if out.exists() else {"rows": []}
    body |= {"command": spell_command(), "environment": msgspec.to_builtins(records.capture_environment(device=device))}  # fmt: skip
    rows = body["rows"] = [row for row in body["rows"] if "failed" not in row]
    known = {(row["model"], row["target"]) for row in rows}
    for name, target in cases(a):
        if (name, target) in known or time.time() > end:
            continue
        try:
            rows.append(
                tune(name, target, a.steps, a.seconds, a.device, weights_file(a.out, name), not a.no_cuda_graph)
            )
            print(f"== {name} {target}: trained {rows[-1]['train_s']:.0f} s, tuned in {rows[-1]['tune_s']:.0f} s\n{rows[-1]['printed']}", flush=True)  # fmt: skip
        except Exception as error:  # the next model is still worth its row
            rows.append({"model": name, "target": target, "failed": traceback.format_exc()[-3000:]})
            print(f"== {name} {target}: FAILED {error}\n{traceback.format_exc()[-1500:]}", flush=True)
        save(body, out)
        if a.device == "cuda":
            torch.cuda.empty_cache()


def cases(a):
    """(model, target), as asked for: `dlrm` is that model for all targets, `dlrm/train` for one."""
    named = [name.partition("/") for name in a.models.split(",")]
    return [(name, target) for name, _, one in named for target in ([one] if one else a.targets.split(","))]


def train_all(a):
    """Every model that has no weights yet, in a process of its own, all at once: training is not timed."""
    jobs = {}
    for name in dict.fromkeys(name for name, _ in cases(a)):
        if weights_file(a.out, name).exists():
            continue
        command = [sys.executable, __file__, "--train", name, "--out", a.out, "--steps", str(a.steps), "--device", a.device, "--rows", str(a.rows)]  # fmt: skip
        jobs[name] = subprocess.Popen(command)
    for name, job in jobs.items():
        if job.wait():
            print(f"== {name}: training FAILED", flush=True)


def again_all(a, end):
    """Every row of a record in a fresh process of its own: all are prepared at once, then timed one at a time."""
    body, work, jobs = json.loads(Path(a.again).read_text()), Path(tempfile.mkdtemp()), {}
    for index, row in enumerate(body["rows"]):
        if "failed" in row or "failed" not in row.get("again", {"failed": ""}):
            continue
        command = [sys.executable, __file__, "--again", a.again, "--row", str(index), "--turn", str(work / str(index)), "--device", a.device, "--rows", str(a.rows)]  # fmt: skip
        log = (work / f"{index}.log").open("w")
        jobs[index] = subprocess.Popen([*command, *([] if a.torchao else ["--no-torchao"])], stdout=log, stderr=log)

    def is_there(index, what):
        return (work / f"{index}.{what}").exists() or jobs[index].poll() is not None

    while not all(is_there(index, "ready") for index in jobs) and time.time() < end:
        time.sleep(0.1)
    late = {index for index in jobs if not is_there(index, "ready")}
    for index in late:
        jobs[index].kill()
    for index, job in jobs.items():
        (work / f"{index}.go").touch()
        job.wait()
        row, log = body["rows"][index], (work / f"{index}.log").read_text()
        found = log.rpartition("AGAIN ")[2] if job.returncode == 0 else ""
        row["again"] = json.loads(found) if found else {"failed": "not ready in time" if index in late else log[-3000:]}
        save(body, a.out or a.again)
        print(f"== {row['model']} {row['target']}: {json.dumps({k: v for k, v in row['again'].items() if k != 'after'})}", flush=True)  # fmt: skip


def wait_for_turn(turn):
    """Say that this process is prepared, and wait until the card is its own."""
    Path(f"{turn}.ready").touch()
    while not Path(f"{turn}.go").exists():
        time.sleep(0.02)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", default="dlrm,tower,cross,wukong,encoder", help="names, or name/target for one target"
    )
    parser.add_argument("--targets", default="train,serve")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120, help="budget of one call of tune")
    parser.add_argument(
        "--limit",
        type=float,
        default=math.inf,
        help="start no row after so many seconds, and wait no longer for --again's to be prepared",
    )
    parser.add_argument("--again", metavar="FILE", help="the rows of this record from their saved plans, in fresh processes")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="tune, then the same as --again OUT")
    parser.add_argument("--no-cuda-graph", action="store_true", help="choose for steps that are launched kernel by kernel")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", type=int, default=0, help="of a batch, instead of each model's own")
    parser.add_argument("--out")
    parser.add_argument("--no-torchao", dest="torchao", action="store_false", help="leave torchao out of --again")
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rows:
        for counts in (zoo.ROWS, zoo.zoo_more.ROWS):
            counts.update(dict.fromkeys(counts, a.rows))
    if a.train:
        train_one(a.train, a.steps, a.device, weights_file(a.out, a.train))
        return
    if a.row is not None:
        row = json.loads(Path(a.again).read_text())["rows"][a.row]
        found = again(row, weights_file(a.again, row["model"]), a.device, lambda: wait_for_turn(a.turn), a.torchao)
        print("AGAIN " + json.dumps(found), flush=True)
        return
    if not a.again and not a.out:
        parser.error("--out is where the record goes")
    began = time.time()
    if not a.again:
        train_all(a)
        tune_all(a, began + a.limit - AGAIN * a.fresh)
        a.again = a.out if a.fresh else None
    if a.again:
        again_all(a, began + a.limit)


if __name__ == "__main__":
    main()
