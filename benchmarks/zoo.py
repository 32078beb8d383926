"""Models that nobody rewrote, through the public API, beside the best an expert would take: whole training steps with AdamW, or inference, in CUDA graphs.

    python benchmarks/zoo.py --out zoo.json                                     every model, both modes, every way
    python benchmarks/zoo.py --models dlrm,tower --modes infer --ways bf16,bf16+max,loka --out zoo.json
    python benchmarks/zoo.py --models mmoe,llama --out zoo.json                 those of zoo_more.py are asked for by name, a few at a time

Ways, each compiled statically, `+max` with mode="max-autotune-no-cudagraphs", `+descent` with coordinate_descent_tuning (which torchao switches on for all that is compiled after it):

    bf16                    the model as it is, autocast in training, bf16 weights in inference
    fp32, tf32              the model as it is in float32, in training; products in float32, or in TF32
    torchao-RECIPE          torchao's own conversion of linears of 256 and more: tensorwise, rowwise, rowwise_with_gw_hp
    torchao-auto-RECIPE     the same where torchao's own filter finds it worth it
    all-BACKEND             `loka.convert` with the one recipe of a library on all of these: all-fbgemm rowwise, all-deepgemm blockwise; refused by name where it is not installed
    plan-NAME               `loka.convert(model, plan)` with NAME.json of --plans
    loka                    `loka.convert(model, plan)` with the units that `loka.units.discover` finds, after the mods that change nothing but the layout
    loka-towers             the same units without those mods: chains of linears in FP8 and nothing else
    bf16-layout             those mods alone, in bf16: what is not FP8's share
    loka-mods               no_bias, block_norm and hard_swish first: another architecture
    bf16-mods               that architecture and those mods, in bf16
    loka-tune               `loka.tune`, which chooses between all of these
    bf16-before             bf16 in the checkout that `--before` names, for the two families of ours (interformer, hstu), which are asked for by name

One process a case; all prepare at once, then are timed one after another, in turns (ABAB), on an idle GPU. Outputs are compared with float32 before anything is timed; in training the gradients
too. A case that fails is a row with its reason. `host_ms`: what the host takes to launch a step that is in no graph. `activations_gib`: the peak of a step above weights, gradients, optimizer state and inputs.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import zoo_more
from evidence import spell_command

PLANS = "LOKA_ZOO_PLANS"  # in the environment of a case: the folder of --plans
RECIPE_OF = {"fbgemm": "rowwise", "deepgemm": "blockwise", "torch": "rowwise", "triton": "rowwise"}  # of all-BACKEND
COMPILERS = {
    "": {},
    "max": {"mode": "max-autotune-no-cudagraphs"},
    "descent": {"options": {"coordinate_descent_tuning": True}},
}
IN_FLOAT32 = False  # set in the process of a case that runs without autocast
ROWS = {"wukong": 8192, "dlrm": 16384, "tower": 6144, "cross": 8192, "encoder": 64}


class FactorizationMachineBlock(nn.Module):
    def __init__(self, n, d, k, h, n_f):
        super().__init__()
        self.n_f, self.d = n_f, d
        self.y = nn.Parameter(torch.randn(n, k) / n**0.5)
        self.norm = nn.LayerNorm(n * k)
        self.mlp = nn.Sequential(nn.Linear(n * k, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, n_f * d))

    def forward(self, x):
        products = torch.bmm(x, torch.einsum("bnd,nk->bdk", x, self.y)).flatten(1)
        return self.mlp(self.norm(products)).view(-1, self.n_f, self.d)


class WukongLayer(nn.Module):
    def __init__(self, n, d, k, h, n_l, n_f):
        super().__init__()
        self.fmb = FactorizationMachineBlock(n, d, k, h, n_f)
        self.lcb = nn.Linear(n, n_l, bias=False)
        self.residual = nn.Linear(n, n_l + n_f, bias=False) if n != n_l + n_f else None
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        compressed = self.lcb(x.transpose(1, 2)).transpose(1, 2)
        residual = x if self.residual is None else self.residual(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(torch.cat([self.fmb(x), compressed], 1) + residual)


class Wukong(nn.Module):
    """As a user writes it: LayerNorms, biases, transposes."""

    def __init__(self, n0=128, d=128, k=24, h=2048, n_l=32, n_f=32, layers=6):
        super().__init__()
        sizes = [n0] + [n_l + n_f] * (layers - 1)
        self.layers = nn.ModuleList(WukongLayer(n, d, k, h, n_l, n_f) for n in sizes)
        self.top = nn.Sequential(
            nn.Linear((n_l + n_f) * d, h), nn.ReLU(), nn.Linear(h, h // 2), nn.ReLU(), nn.Linear(h // 2, 1)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.top(x.flatten(1))


class DLRM(nn.Module):
    """Dense arch, pairwise dots, over arch; ReLU, biases, no norms."""

    def __init__(self, f=26, d=128, top=(1024, 1024, 512, 256)):
        super().__init__()
        self.dense = nn.Sequential(
            nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, d), nn.ReLU()
        )
        n = f + 1
        i, j = torch.triu_indices(n, n, 1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)
        widths = [d + n * (n - 1) // 2, *top]
        layers = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.over = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, dense, sparse):
        d = self.dense(dense)
        x = torch.cat([d[:, None], sparse], 1)
        dots = torch.bmm(x, x.transpose(1, 2))[:, self.i, self.j]
        return self.over(torch.cat([d, dots.to(d.dtype)], 1))


class Tower(nn.Module):
    """LayerNorm + SiLU behind every linear."""

    def __init__(self, w=3072, n=5, inp=2560):
        super().__init__()
        layers = []
        a = inp
        for _ in range(n):
            layers += [nn.Linear(a, w), nn.LayerNorm(w), nn.SiLU()]
            a = w
        self.net = nn.Sequential(*layers)
        self.head = nn.Linear(w, 3)

    def forward(self, x):
        return self.head(self.net(x))


class CrossNet(nn.Module):
    """DCNv2's full-rank cross layers beside a deep tower."""

    def __init__(self, width=3456, layers=3, deep=(2048, 2048, 1024)):
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        parts, a = [], width
        for b in deep:
            parts += [nn.Linear(a, b), nn.ReLU()]
            a = b
        self.deep = nn.Sequential(*parts)
        self.last = nn.Linear(width + a, 1)

    def forward(self, x):
        at = x
        for layer in self.cross:
            at = x * layer(at) + at
        return self.last(torch.cat([at, self.deep(x)], 1))


class Encoder(nn.Module):
    """torch's own encoder over a history of 256 items, GELU."""

    def __init__(self, d=1024, heads=8, layers=4):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            d, heads, 4 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.last = nn.Linear(d, 1)

    def forward(self, x):
        return self.last(self.encoder(x).mean(1))


def make(name, device):
    g = torch.Generator(device=device).manual_seed(1)
    if name in zoo_more.MODELS:
        return zoo_more.make(name, device, g)
    if name not in ROWS:
        import zoo_families

        return zoo_families.make(name, device, g)
    b = ROWS[name]

    def r(*s):
        return torch.randn(*s, device=device, generator=g)

    if name == "wukong":
        return Wukong(), (r(b, 128, 128),)
    if name == "dlrm":
        return DLRM(), (r(b, 13), r(b, 26, 128))
    if name == "tower":
        return Tower(), (r(b, 2560),)
    if name == "cross":
        return CrossNet(), (r(b, 3456),)
    if name == "encoder":
        return Encoder(), (r(b, 256, 1024),)
    raise ValueError(name)


def _floats(inputs, do):
    """What is an activation changes, and lengths and times stay."""
    return tuple(do(x) if x.is_floating_point() else x for x in inputs)


def _is_wide(module, name):
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0 and min(module.in_features, module.out_features) >= 256  # fmt: skip


def run_step(model, inputs, mode):
    if mode == "infer":
        with torch.no_grad():
            return model(*inputs)
    with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=not IN_FLOAT32):
        y = model(*inputs)
    y.float().square().mean().backward()
    return y


def prepare(model, way, inputs, mode, facts):
    """The way, through public calls only."""
    global IN_FLOAT32
    if way in ("bf16", "bf16-before"):
        return model
    if way in ("fp32", "tf32"):
        if mode != "train":
            raise ValueError(f"{way} is a way to train; inference here has bf16 weights")
        IN_FLOAT32 = True
        torch.set_float32_matmul_precision("high" if way == "tf32" else "highest")
        return model
    if way.startswith("torchao"):
        recipe, keep = way.rpartition("-")[2], _is_wide
        if mode == "train":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            if "-auto-" in way:
                from torchao.float8 import _auto_filter_for_recipe

                keep = _auto_filter_for_recipe(recipe, filter_fqns=[])
            config = Float8LinearConfig.from_recipe_name(recipe)
            convert_to_float8_training(model, config=config, module_filter_fn=keep)
            facts["converted"] = sum(type(m).__name__ == "Float8Linear" for m in model.modules())
        else:
            from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, PerTensor, quantize_

            granularity = PerRow() if recipe == "rowwise" else PerTensor()
            quantize_(model, Float8DynamicActivationFloat8WeightConfig(granularity=granularity), filter_fn=_is_wide)
        return model
    import loka

    example = inputs if len(inputs) > 1 else inputs[0]
    if way.startswith("all-"):
        backend = way.removeprefix("all-")
        done = loka.convert(model, recipe=RECIPE_OF[backend], backend=backend, module_filter_fn=_is_wide)
        facts["summary"] = str(done)[:4000]
        return model
    if way.startswith("plan-"):
        plan = loka.Plan.load(Path(os.environ[PLANS]) / f"{way.removeprefix('plan-')}.json")
        facts["summary"] = str(loka.convert(model, plan, example=example, freeze=mode == "infer"))[:4000]
        return model
    architecture = ["no_bias", "block_norm", "hard_swish"] if way in ("loka-mods", "bf16-mods") else []
    if way in ("bf16-layout", "bf16-mods"):
        facts["summary"] = str(loka.mods.apply(model, [*architecture, *loka.mods.FREE], example=example))[:4000]
        return model
    if way == "loka-tune":
        batches = [(inputs, None)] * 4
        tuned = loka.tune(
            model, batches, lambda out, _: out.float().square().mean(), target="serve" if mode == "infer" else "train"
        )
        facts["summary"] = str(tuned)[:6000]
        return tuned.model
    mods = [] if way == "loka-towers" else [*architecture, *loka.mods.FREE]
    plan = loka.placing.plan_everything(model, example, mods=mods, serving=mode == "infer", linears=256)
    conversion = loka.convert(model, plan, example=example, freeze=mode == "infer")
    facts["summary"] = str(conversion)[:4000]
    return model


def warm_up(model, inputs, mode):
    """What a user does anyway before a step is compiled: two steps, so that delayed scales are known."""
    if mode == "infer":
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        run_step(model, inputs, mode)
        optimizer.step()
        optimizer.zero_grad()


def relative(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30))


def case(name, mode, way, barrier, out):
    device = "cuda"
    way, plus, more = way.partition("+")
    torch.manual_seed(0)
    facts = {"model": name, "mode": mode, "way": way + plus + more}
    try:
        with torch.device(device):
            model, inputs = make(name, device)
        reference, gradients = _when_there_is_room(lambda: _reference(model, inputs, mode))
        if mode == "infer":
            model = model.eval().requires_grad_(False).to(torch.bfloat16)
            inputs = _floats(inputs, lambda x: x.to(torch.bfloat16))
        began = time.time()
        model = prepare(model, way, inputs, mode, facts)
        warm_up(model, inputs, mode)
        facts["prepare_s"] = time.time() - began
        torch._dynamo.config.cache_size_limit = 64
        run = torch.compile(model, dynamic=False, **COMPILERS[more])
        began = time.time()
        facts["error"] = relative(run_step(run, inputs, mode).detach(), reference)
        facts["compile_s"] = time.time() - began
        if mode == "train":
            errors = {
                n: relative(p.grad, gradients[n])
                for n, p in model.named_parameters()
                if p.grad is not None and n in gradients
            }
            facts["gradient_error"] = statistics.median(errors.values())
            facts["worst_gradient"] = max((e, n) for n, e in errors.items())
        go = _graph(model, run, inputs, mode, facts)
        torch.cuda.synchronize()
        facts["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        facts["kernels"] = _profile(go)
    except Exception as error:
        facts["failed"] = f"{type(error).__name__}: {error}"[:1500]
        facts["trace"] = traceback.format_exc()[-2500:]
        Path(out).write_text(json.dumps(facts))
        Path(barrier + ".ready").write_text("x")
        return
    Path(barrier + ".ready").write_text("x")
    times = []
    for turn in range(TURNS):
        while not Path(f"{barrier}.go{turn}").exists():
            time.sleep(0.005)
        times += _time(go, 3, REPEATS)
        Path(f"{barrier}.done{turn}").write_text("x")
    facts["times"] = times
    facts["ms"] = statistics.median(times)
    Path(out).write_text(json.dumps(facts))


TURNS, REPEATS = 3, 12


def _when_there_is_room(do, tries=8):
    """All cases compute in float32 at the start, and not all of them fit on one card at once."""
    for left in reversed(range(tries)):
        try:
            return do()
        except torch.OutOfMemoryError:
            if not left:
                raise
        finally:
            torch.cuda.empty_cache()
        time.sleep(4)
    raise AssertionError("tries is positive")


def _reference(model, inputs, mode):
    """float32 outputs and gradients."""
    torch.backends.cuda.matmul.allow_tf32 = False
    y = model.train(mode == "train")(*inputs)  # statistics of a batch norm and dropout belong to training
    gradients = {}
    if mode == "train":
        y.float().square().mean().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
    return y.detach(), gradients


def _graph(model, run, inputs, mode, facts):
    optimizer = None
    if mode == "train":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
        inputs = _floats(inputs, lambda x: x.clone().requires_grad_())

    def step():
        run_step(run, inputs, mode)
        if optimizer is not None:
            optimizer.step()
            for p in (*model.parameters(), *inputs):
                p.grad = None

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        facts["host_ms"] = 1000 * (time.perf_counter() - began)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    if optimizer is not None:
        facts["activations_gib"] = _activations(model, run, inputs)
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return graph.replay


def _activations(model, run, inputs):
    """With all gradients there already, what a step still takes is activations and temporaries."""
    held = (*model.parameters(), *(x for x in inputs if x.requires_grad))
    for p in held:
        p.grad = torch.zeros_like(p)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_step(run, inputs, "train")
    torch.cuda.synchronize()
    for p in held:
        p.grad = None
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _profile(go, count=30):
    """Microseconds by kernel in one step, the largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        go()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return [[e.key[:120], e.count, round(e.self_device_time_total, 1)] for e in rows[:count]]


def _time(go, warm, repeats):
    for _ in range(warm):
        go()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        go()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(ROWS))
    parser.add_argument("--modes", default="infer,train")
    parser.add_argument("--ways", default="bf16,bf16+max,torchao-tensorwise,torchao-rowwise,loka,loka+max")
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--wait", type=float, default=330, help="seconds until cases that are still compiling are given up"
    )
    parser.add_argument("--before", help="another checkout's src, for the way bf16-before")
    parser.add_argument("--plans", default="", help="folder of the plans that ways name")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--barrier", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.case:
        case(*a.case.split("/"), a.barrier, a.out)
        return
    work, began, procs = Path(tempfile.mkdtemp()), time.time(), {}
    cases = [f"{m}/{k}/{w}" for m in a.models.split(",") for k in a.modes.split(",") for w in a.ways.split(",")]
    threads = str(max(2, (os.cpu_count() or 2) // len(cases)))
    for c in cases:
        key = c.replace("/", "_")
        log = (work / f"{key}.log").open("w")
        env = {**os.environ, "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": threads, PLANS: a.plans}
        command = [
            sys.executable,
            __file__,
            "--case",
            c,
            "--barrier",
            str(work / key),
            "--out",
            str(work / f"{key}.json"),
        ]
        if "-before" in c:
            env["PYTHONPATH"] = os.pathsep.join([a.before, *env.get("PYTHONPATH", "").split(os.pathsep)])
        procs[c] = (subprocess.Popen(command, stdout=log, stderr=log, env=env), key)

    def waiting():
        return [c for c, (p, k) in procs.items() if not (work / f"{k}.ready").exists() and p.poll() is None]

    while waiting() and time.time() - began < a.wait:
        time.sleep(0.2)
    late = waiting()
    for c in late:
        procs[c][0].kill()
    print(f"ready after {time.time() - began:.0f} s; late: {late}", flush=True)
    alive = [c for c, (p, _) in procs.items() if c not in late and p.poll() is None]
    for turn in range(TURNS):  # in turns: what the card does meanwhile hits all alike
        for c in alive:
            key = procs[c][1]
            (work / f"{key}.go{turn}").write_text("x")
            end = time.time() + 60
            while not (work / f"{key}.done{turn}").exists() and procs[c][0].poll() is None:
                time.sleep(0.005)
                if time.time() > end:  # a case that hangs is a row with its reason, and nobody waits for it again
                    procs[c][0].kill()
                    procs[c][0].wait()
    rows = []
    for c, (p, key) in procs.items():
        file = work / f"{key}.json"
        with contextlib.suppress(subprocess.TimeoutExpired):
            p.wait(60)
        if file.exists():
            rows.append(json.loads(file.read_text()))
        else:
            m, k, w = c.split("/")
            why = "still compiling" if c in late else (work / f"{key}.log").read_text()[-1500:]
            rows.append({"model": m, "mode": k, "way": w, "failed": why})
    import loka.records as records

    environment = records.capture_environment(command=spell_command(), device=torch.cuda.get_device_name())
    import msgspec

    head = {"command": spell_command(), "environment": msgspec.to_builtins(environment)}
    Path(a.out).write_text(json.dumps({**head, "rows": rows}, indent=1))
    for row in rows:
        same = [r for r in rows if (r["model"], r["mode"]) == (row["model"], row["mode"]) and "ms" in r]
        base = min(
            (r["ms"] for r in same if r["way"].partition("+")[0] in ("bf16", "bf16-before")), default=float("nan")
        )
        label = f"{row['model']:8} {row['mode']:5} {row['way']:22}"
        if "ms" in row:
            gradient = f" grad {row['gradient_error']:.3f}" if "gradient_error" in row else ""
            print(
                f"{label} {row['ms']:8.3f} ms {base / row['ms']:.3f}x  mem {row['peak_gib']:.2f}  prep {row['prepare_s']:.0f}s compile {row['compile_s']:.0f}s  error {row['error']:.4f}{gradient}"
            )
        else:
            print(f"{label} FAILED {row['failed'][-300:]}")


if __name__ == "__main__":
    main()
