"""The configuration that was timed, trained: what `loka.tune` chooses for a model, beside bf16 of the original; step time, memory and loss of the same object.

    python benchmarks/trained.py --root FOLDER --out trained.json --seeds 48,256 --seconds 330                                   on a GPU: Wukong and DLRM on Census-Income
    python benchmarks/trained.py --root FOLDER --out x.json --device cpu --size tiny --steps 30 --seeds 2                        dry run, FP8 emulated, nothing timed

The models are plain PyTorch, as a user writes them (benchmarks/zoo.py, behind one embedding table): Wukong with 4 layers, 32 + 32 outputs, k = 24 and 2048-wide MLPs, DLRM with a
1024-1024-512-256 over arch; batches of 4096 and 8192, AdamW, learning rate annealed to nearly zero. For every family and data set:

    1  bf16 trains a third of seed 0; `loka.tune` takes that model, chooses on training batches and verifies on rows that nobody trains on. Its plan is what the arm `tuned` runs
    2  every arm trains from the same weights on the same batches for the same number of steps, seed by seed:
           bf16         the original, autocast, compiled           naive        torchao's tensorwise at every linear it can take
           tuned        loka.convert(model, plan)                  layout       bf16 with the mods of that plan, which change nothing but the layout
           mods         bf16 with no_bias, block_norm, hard_swish  tuned-mods   what tune chooses for that architecture
    3  the models as trained are timed: the whole step with AdamW in a CUDA graph, one arm at a time, in turns, nothing else on the card
    4  the test log loss is compared seed by seed: `tuned` with bf16, `tuned-mods` with `mods` at 0.02 % and with bf16 at 0.1 %

One process an arm: it compiles once and trains all seeds with what it compiled; arms share the card while they train, since no loss depends on that. Outputs are compared with float32 before
anything is trained. Power: beside every change stands the smallest one that as many seeds detect (80 %, two-sided 5 %). The file is written again after every run; finished runs are not
repeated, and the plans are in the file.
"""

import argparse
import copy
import itertools
import json
import math
import os
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from multiprocessing import connection, get_context
from pathlib import Path
from statistics import median, stdev
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import zoo
from evidence import spell_command
from quality_ranking import read_tables

import loka
from loka import mods, records
from loka.metrics import AUC, compare_paired

ARMS = ("bf16", "tuned", "naive", "layout", "mods", "tuned-mods")
UNPLANNED = ("bf16", "mods", "naive")  # need no plan
AGAINST = {
    "tuned": (("bf16", 0.0002),),
    "naive": (("bf16", 0.0002),),
    "layout": (("bf16", 0.0002),),
    "mods": (("bf16", 0.001),),
    "tuned-mods": (("mods", 0.0002), ("bf16", 0.001)),
}
SIZES = {
    "wide": {"d": 128, "k": 24, "h": 2048, "layers": 4, "n": 32, "top": (1024, 1024, 512, 256)},
    "tiny": {"d": 16, "k": 8, "h": 64, "layers": 2, "n": 8, "top": (64, 64, 32)},
}
DENSE_VECTORS = 9  # that the dense features become: 39 fields and these are 48 vectors
BATCH = {"wukong": 4096, "dlrm": 8192}
STEPS = {
    "wukong": 240,
    "dlrm": 100,
}  # ten epochs of a wide DLRM learn its training data by heart: test loss 0.122 to 0.131 over seeds, where Wukong has 0.111
HELD = 32768  # rows of the training split that nobody trains on, for verifying
BEFORE = Path(__file__).parent / "results" / "h200" / "ablation.json"  # what says how much seeds differ
TABLE_RATE = 10.0  # learning rate of the table over that of the rest
GRACE = 25.0  # seconds after the deadline until what still compiles is given up
TURNS, REPEATS = 5, 8


@dataclass(frozen=True)
class Bench:
    """What all runs share."""

    root: Path
    device: str
    size: str
    batch: int | None
    steps: int | None
    learning_rate: float
    tune_seconds: float
    work: Path

    def rows(self, family: str) -> int:
        """Of a batch."""
        return self.batch or BATCH[family]

    def length(self, family: str) -> int:
        """Of a run, in steps."""
        return self.steps or STEPS[family]


class Ranker(nn.Module):
    """One table for all fields in front of a plain model: what somebody writes who never heard of FP8."""

    def __init__(self, family: str, cards: list[int], dense: int, labels: int, size: str) -> None:
        super().__init__()
        s = SIZES[size]
        self.table = nn.Embedding(sum(cards), s["d"])
        self.register_buffer("offsets", torch.tensor([0, *itertools.accumulate(cards[:-1])]))
        nn.init.normal_(self.table.weight, std=s["d"] ** -0.5)
        self.family, self.d = family, s["d"]
        if family == "wukong":
            self.dense = nn.Linear(dense, DENSE_VECTORS * s["d"])
            n0 = len(cards) + DENSE_VECTORS
            self.core = zoo.Wukong(n0=n0, d=s["d"], k=s["k"], h=s["h"], n_l=s["n"], n_f=s["n"], layers=s["layers"])
            self.core.top[-1] = nn.Linear(s["h"] // 2, labels)
        elif family == "dlrm":
            self.core = zoo.DLRM(f=len(cards), d=s["d"], top=s["top"])
            self.core.dense[0] = nn.Linear(dense, self.core.dense[0].out_features)
            self.core.over[-1] = nn.Linear(s["top"][-1], labels)
        else:
            raise ValueError(f"family {family!r}: expected wukong or dlrm")

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.table(ids + self.offsets)
        if self.family == "dlrm":
            return self.core(dense, x)
        return self.core(torch.cat([x, self.dense(dense).view(-1, DENSE_VECTORS, self.d)], 1))


class Data:
    """A data set on the device: batches by index, the same for every arm of a seed."""

    def __init__(self, bench: Bench, family: str, name: str) -> None:
        self.schema, self.tables = read_tables(bench.root, name, bench.device)
        if self.schema.sequences:
            raise ValueError(f"{name} has sequences; these models take fields and dense features alone")
        self.batch, self.device = bench.rows(family), bench.device
        rows = len(self.tables["train"])
        self.rows = rows - HELD
        if self.rows < self.batch:
            raise ValueError(f"a batch of {self.batch} and {HELD} rows to verify on are more than {rows} training rows")

    def model(self, family: str, size: str, seed: int) -> Ranker:
        torch.manual_seed(seed)
        cards = [field.cardinality for field in self.schema.categorical]
        with torch.device(self.device):
            return Ranker(family, cards, len(self.schema.dense), len(self.schema.labels), size)

    def take(self, split: str, index: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        table = self.tables[split]
        return (table.dense[index], table.categorical[index]), table.labels[index]

    def stream(self, seed: int) -> Any:
        """Batches without end, in an order of the seed's."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(self.rows, generator=generator).to(self.device)
            for index in order.split(self.batch)[: self.rows // self.batch]:
                yield self.take("train", index)

    def for_tuning(self) -> list[Any]:
        """Training batches to choose on; as many that were never trained on to verify on."""
        held = torch.arange(self.rows, len(self.tables["train"]), device=self.device).split(self.batch)
        valid = torch.arange(len(self.tables["valid"]), device=self.device).split(self.batch)
        verify = [self.take("train", i) for i in held if len(i) == self.batch]
        verify += [self.take("valid", i) for i in valid if len(i) == self.batch]
        return [*itertools.islice(self.stream(0), len(verify)), *verify]


def losses(output: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output.float(), labels, reduction="none").mean(1)


def lower(model: Ranker, arm: str, plan: Path, example: Any, device: str) -> dict[str, Any]:
    """Turn the original into an arm, in place, by public calls alone."""
    if arm == "bf16":
        return {}
    if arm == "naive":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        able = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.in_features % 16 == 0 == m.out_features % 16]  # fmt: skip
        config = Float8LinearConfig(emulate=device == "cpu")  # its defaults are the tensorwise recipe
        convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name in able)
        return {"converted": len(able)}
    if arm == "mods":
        done = mods.apply(model, [*mods.CORE, *mods.FREE], example=example)
        return {"mods": sorted({change.mod for change in done.summary.changed})}
    chosen = loka.Plan.load(plan)
    if arm == "layout":
        mods.apply(model, [mods.parse(name) for name in chosen.mods], example=example)
        return {"mods": list(chosen.mods)}
    done = loka.convert(model, chosen, example=example)
    return {"share": done.low_precision_share, "units": len(chosen.units), "mods": list(chosen.mods), "converted": len(done.converted)}  # fmt: skip


class Worker:
    """One arm of one family and data set: compiled once, trained seed by seed, then timed."""

    def __init__(self, bench: Bench, family: str, data: str, arm: str) -> None:
        torch.set_num_threads(1)
        self.bench, self.family, self.arm, self.device = bench, family, arm, bench.device
        self.data = Data(bench, family, data)
        self.plan = plan_file(bench, family, data, arm.endswith("mods"))
        self.model = self.data.model(family, bench.size, 0)
        self.inputs, self.labels = next(self.data.stream(0))
        wanted = self.reference()
        self.facts = lower(self.model, arm, self.plan, self.inputs, self.device)
        self.warm_up()
        self.scales = {name: t.clone() for name, t in loka.placing.scale_state(self.model).items()}
        torch.set_float32_matmul_precision("high")
        compiled = torch.compile(self.model, dynamic=False) if self.device == "cuda" else self.model
        self.run = compiled
        began = time.time()
        got = self.lose(self.inputs, self.labels, True)[1].detach().float()
        self.model.zero_grad(set_to_none=True)
        self.facts |= {"compile_s": time.time() - began, "output_error": float((got - wanted).norm() / wanted.norm())}
        if not self.facts["output_error"] < 0.5:
            raise ValueError(f"{family} {arm}: outputs differ from float32's by {self.facts['error']:.3f} before any training")  # fmt: skip
        self.trained: int | None = None

    @torch.no_grad()
    def reference(self) -> Tensor:
        """Outputs in float32 of the same architecture."""
        torch.set_float32_matmul_precision("highest")
        model = copy.deepcopy(self.model)
        if self.arm == "mods":
            mods.apply(model, list(mods.CORE), example=self.inputs)
        elif self.arm == "tuned-mods":
            mods.apply(model, [mods.parse(n) for n in loka.Plan.load(self.plan).mods], example=self.inputs)
        return model(*self.inputs).float()

    def lose(self, inputs: Any, labels: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device, torch.bfloat16):
            out = (self.run if compiled else self.model)(*inputs)
        return losses(out, labels).mean(), out

    def warm_up(self) -> None:
        """Two steps that change nothing, so that delayed scales are known before anything is compiled."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        for _ in range(2):
            self.lose(self.inputs, self.labels, False)[0].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """The weights of a seed, and scales as they were before the first step."""
        state = self.data.model(self.family, self.bench.size, seed).state_dict()
        for name, p in self.model.named_parameters():
            if name not in state or state[name].shape != p.shape:
                raise ValueError(f"{name} {tuple(p.shape)} is no parameter of the original; seeds cannot start alike")
            p.copy_(state[name])
            p.grad = None
        if self.arm.startswith("tuned"):
            loka.placing.refresh(self.model)
            loka.placing.load_scale_state(self.model, self.scales)
        self.model.train()

    def groups(self) -> list[dict[str, Any]]:
        """Tables learn faster than the rest, and do not decay."""
        rate, table = self.bench.learning_rate, self.model.table.weight
        rest = [p for p in self.model.parameters() if p is not table]
        return [
            {"params": rest, "weight_decay": 0.01},
            {"params": [table], "lr": TABLE_RATE * rate, "weight_decay": 0.0},
        ]

    def train(self, seed: int, deadline: float, stop: int | None = None) -> dict[str, Any]:
        """All steps of a seed (or the first `stop`), and the test loss."""
        self.begin(seed)
        steps, rate, cuda = self.bench.length(self.family), self.bench.learning_rate, self.device == "cuda"
        optimizer = torch.optim.AdamW(self.groups(), lr=rate, fused=cuda)
        rates = [group["lr"] for group in optimizer.param_groups]
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        began, warm = time.time(), min(20, max(steps // 5, 1))
        for step, (inputs, labels) in enumerate(itertools.islice(self.data.stream(seed), stop or steps)):
            along = max(step - warm, 0) / max(steps - warm, 1)
            factor = (step + 1) / warm if step < warm else 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * along))
            for group, peak in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = peak * factor
            loss = self.lose(inputs, labels, True)[0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 20 == 19 and time.time() > deadline:
                raise TimeoutError(f"out of time after {step + 1} of {steps} steps")
        found = {
            **self.facts,
            "steps": stop or steps,
            "train_loss": float(loss.detach()),
            "train_s": time.time() - began,
        }
        if cuda:
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.trained = seed
        return found if stop else found | self.score()

    @torch.no_grad()
    def score(self) -> dict[str, Any]:
        """Log loss of every label on the test split, and AUC of the first; the model as it trained, not compiled."""
        self.model.eval()
        table = self.data.tables["test"]
        out = []
        for index in torch.arange(len(table), device=self.device).split(self.data.batch):
            with torch.autocast(self.device, torch.bfloat16):
                out.append(self.model(*self.data.take("test", index)[0]).float())
        self.model.train()
        logits, metric = torch.cat(out), AUC()
        each = F.binary_cross_entropy_with_logits(logits.double(), table.labels.double(), reduction="none").mean(0)
        metric.update(logits[:, 0], table.labels[:, 0])
        return {"log_loss": float(each[0]), "log_losses": each.tolist(), "auc": metric.compute()}

    def save(self, seed: int, deadline: float) -> dict[str, Any]:
        """A third of the training, for tune to look at."""
        found = self.train(seed, deadline, stop=max(2, self.bench.length(self.family) // 3))
        torch.save(self.model.state_dict(), checkpoint_file(self.plan))
        return found

    def capture(self) -> None:
        """The step of the model as trained, with AdamW, in a CUDA graph."""
        if self.trained is None:
            raise RuntimeError("no seed was trained in this process: nothing to time")
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True, capturable=True)

        def step() -> None:
            self.lose(self.inputs, self.labels, True)[0].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()

    def clock(self) -> list[float]:
        """Milliseconds of the captured step."""
        return zoo._time(self.graph.replay, 3, REPEATS)


def plan_file(bench: Bench, family: str, data: str, architecture: bool) -> Path:
    return bench.work / f"{family}-{data}{'-mods' if architecture else ''}.json"


def checkpoint_file(plan: Path) -> Path:
    return plan.with_suffix(".pt")


def make_plan(bench: Bench, family: str, data: str, architecture: bool) -> dict[str, Any]:
    """Tune the model that was trained a third; save the plan. Returns what tune found."""
    torch.set_float32_matmul_precision("high")
    source = Data(bench, family, data)
    model = source.model(family, bench.size, 0)
    batches = source.for_tuning()
    if architecture:
        mods.apply(model, [*mods.CORE, *mods.FREE], example=batches[0][0])
    out = plan_file(bench, family, data, architecture)
    model.load_state_dict(torch.load(checkpoint_file(out)))
    tuned = loka.tune(model, batches, losses, seconds=bench.tune_seconds, autocast=torch.bfloat16, progress=False)
    tuned.plan.save(out)
    print(f"== {family} {data}{' with mods' if architecture else ''}\n{tuned}", flush=True)
    return {"printed": str(tuned), "record": msgspec.to_builtins(tuned.record)}


def serve(pipe: Any, bench: Bench, family: str, data: str, arm: str) -> None:
    """A worker's process: does what it is told, and says how it went; what fails is an answer too."""
    worker: Worker | None = None
    while True:
        word, *given = pipe.recv()
        try:
            if word == "stop":
                return
            if word == "plan":
                answer: Any = make_plan(bench, family, data, *given)
            else:
                worker = worker or Worker(bench, family, data, arm)
                answer = getattr(worker, word)(*given)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:1500], "trace": traceback.format_exc()[-1500:]}
        pipe.send(answer)


class Process:
    """A worker seen from here: what it has still to do, in order."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.name = name
        self.todo: list[tuple[str, tuple[Any, ...]]] = []
        context = get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, bench, *name.split("/")), daemon=True)
        self.process.start()
        other.close()

    def send(self) -> None:
        self.pipe.send(self.todo[0][1])

    def ask(self, *message: Any, until: float) -> Any:
        """One thing, waited for."""
        try:
            self.pipe.send(message)
            if not self.pipe.poll(max(until - time.time(), 0.0)):
                return {"error": f"TimeoutError: no answer to {message[0]} in time"}
            return self.pipe.recv()
        except (EOFError, OSError):
            return {"error": f"the process ended with {self.process.exitcode}"}


class Campaign:
    """All of it, in the order that wastes least: a third of a run for each plan, the plans on a quiet card, all arms side by side, the times on a quiet card."""

    def __init__(self, bench: Bench, out: Path, deadline: float) -> None:
        self.bench, self.out, self.deadline = bench, out, deadline
        self.body: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        for part in ("runs", "plans", "tuned", "steps"):
            self.body.setdefault(part, {})
        self.body["settings"] = {key: value for key, value in asdict(bench).items() if key not in ("root", "work")}
        for name, text in self.body["plans"].items():
            (bench.work / name).write_text(text)
        self.workers: dict[str, Process] = {}
        self.began, self.spent = time.time(), float(self.body.get("device_seconds", 0.0))

    def write(self) -> None:
        self.body["device_seconds"] = self.spent + time.time() - self.began
        self.body["summary"] = summarise(self.body["runs"], self.body["steps"])
        records.write_atomically(self.out, json.dumps(self.body, indent=1).encode())

    def work(self, jobs: dict[str, list[tuple[str, tuple[Any, ...]]]]) -> None:
        """Give every arm its list, all at once; keep what comes back."""
        busy = {}
        for name, todo in jobs.items():
            if todo and time.time() < self.deadline:
                worker = self.workers.get(name) or Process(self.bench, name)
                self.workers[name], worker.todo = worker, list(todo)
                worker.send()
                busy[worker.pipe] = worker
        while busy:
            answered = connection.wait(list(busy), timeout=max(self.deadline + GRACE - time.time(), 0.0))
            if not answered:
                for worker in busy.values():
                    print(f"{worker.name}: given up {GRACE:.0f} s after the deadline", flush=True)
                    self.workers.pop(worker.name).process.terminate()
                return
            for pipe in answered:
                worker = busy[pipe]
                key = worker.todo.pop(0)[0]
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):
                    answer = {"error": f"the process ended with {worker.process.exitcode}"}
                    worker.todo.clear()
                    self.workers.pop(worker.name)
                if key:
                    self.body["runs"][key] = answer
                if "error" in answer:
                    print(f"{worker.name} {key}: {answer['error']}", flush=True)
                    worker.todo.clear()  # the next call tries again; another seed would most likely fail alike
                self.write()
                if worker.todo and time.time() < self.deadline:
                    worker.send()
                else:
                    del busy[pipe]

    def seeds(self, name: str, count: int) -> list[tuple[str, tuple[Any, ...]]]:
        keys = [(f"{name}/{seed}", ("train", seed, self.deadline)) for seed in range(count)]
        return [(key, message) for key, message in keys if "log_loss" not in self.body["runs"].get(key, {})]

    def make_plans(self, cells: list[tuple[str, bool]]) -> None:
        """One after another: tune times what it chooses, so the card must be its own."""
        for cell, architecture in cells:
            file = plan_file(self.bench, *cell.split("/"), architecture)
            if file.exists() or not checkpoint_file(file).exists() or time.time() > self.deadline:
                continue
            process = Process(self.bench, f"{cell}/plan")
            found = process.ask("plan", architecture, until=self.deadline + GRACE)
            process.process.terminate()
            self.body["tuned"][file.stem] = found
            if "error" in found:
                print(f"{cell}: {found['error']}\n{found.get('trace', '')}", flush=True)
            else:
                self.body["plans"][file.name] = file.read_text()
            self.write()

    def time_arms(self) -> None:
        """Steps of the models as trained, in turns, family by family."""
        ready = []
        for name, worker in self.workers.items():
            answer = worker.ask("capture", until=self.deadline + GRACE)
            if answer is None:
                ready.append(name)
            else:
                print(f"{name} not timed: {answer['error']}", flush=True)
        times: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(TURNS):
            for name in ready:
                answer = self.workers[name].ask("clock", until=self.deadline + 2 * GRACE)
                times[name] += answer if isinstance(answer, list) else []
        timed = {name for name, taken in times.items() if taken}
        for cell in {
            name.rpartition("/")[0] for name in timed
        }:  # a ratio is of one run: all arms are replaced, or none
            missing = {name for name in self.body["steps"] if name.rpartition("/")[0] == cell} - timed
            if missing:
                print(
                    f"{cell}: the times of before are kept, {', '.join(sorted(missing))} was not timed again",
                    flush=True,
                )
                timed = {name for name in timed if name.rpartition("/")[0] != cell}
        for name, taken in times.items():
            if name in timed:
                low, high = torch.tensor(taken).quantile(torch.tensor([0.25, 0.75])).tolist()
                self.body["steps"][name] = {"ms": median(taken), "quartiles": [low, high], "repeats": len(taken)}
        self.write()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.process.terminate()


def find_power(data: str, seeds: int) -> dict[str, Any] | None:
    """What so many seeds can tell, from how much paired seeds differed in an earlier record of the same data set (a smaller Wukong, planned FP8 beside bf16)."""
    if not BEFORE.exists():
        return None
    runs = {(r["precision"], r["seed"]): r["log_loss"] for r in json.loads(BEFORE.read_text())["runs"] if r["data"] == data and r["variant"] == "none"}  # fmt: skip
    pairs = [(x, runs["bf16", s]) for (kind, s), x in runs.items() if kind == "planned" and ("bf16", s) in runs]
    if len(pairs) < 3:
        return None
    spread = stdev(ours / theirs - 1 for ours, theirs in pairs)
    return {"paired_seeds_before": len(pairs), "spread": spread, "seeds": seeds, "standard_error": spread / seeds**0.5, "detectable": 2.8 * spread / seeds**0.5}  # fmt: skip


def summarise(runs: dict[str, Any], steps: dict[str, Any]) -> list[dict[str, Any]]:
    """Per family, data set and arm: the change of the loss over paired seeds, step time and memory beside what it is compared with."""
    rows = []
    for name in dict.fromkeys(key.rpartition("/")[0] for key in runs):
        cell, _, arm = name.rpartition("/")
        for other, margin in AGAINST.get(arm, ()):
            against = f"{cell}/{other}"
            seeds = [s for s in range(1000) if all("log_loss" in runs.get(f"{n}/{s}", {}) for n in (name, against))]
            if len(seeds) < 2:
                continue
            pairs = [[runs[f"{n}/{s}"] for s in seeds] for n in (name, against)]
            row: dict[str, Any] = {"cell": cell, "arm": arm, "against": other, "margin": margin, "seeds": len(seeds)}
            for label in range(len(pairs[0][0]["log_losses"])):
                ours, theirs = (torch.tensor([r["log_losses"][label] for r in side], dtype=torch.float64) for side in pairs)  # fmt: skip
                seen = compare_paired(
                    ours, theirs, margin=100 * margin, metric="log loss", lower_is_better=True, relative=True, method="student",
                )  # fmt: skip
                row[f"label {label}"] = {
                    "log_loss": [float(ours.mean()), float(theirs.mean())], "change": seen.estimate / 100, "low": seen.low / 100, "high": seen.high / 100,
                    "detectable": seen.mde / 100, "verdict": seen.verdict,
                }  # fmt: skip
            if all("peak_gib" in r for side in pairs for r in side):
                row["peak_gib"] = [median(r["peak_gib"] for r in side) for side in pairs]
            if name in steps and against in steps:
                row["step_ms"] = [steps[name]["ms"], steps[against]["ms"]]
                row["speedup"] = steps[against]["ms"] / steps[name]["ms"]
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of quality_data.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; written again after every run")
    parser.add_argument("--families", default="wukong,dlrm")
    parser.add_argument("--data", default="census-income-kdd")
    parser.add_argument("--arms", default="bf16,tuned,naive")
    parser.add_argument("--seeds", default="8", help="how many: one number, or one for each family in order (48,256)")
    parser.add_argument("--steps", type=int, help=f"instead of {STEPS}")
    parser.add_argument("--batch", type=int, help=f"instead of {BATCH}")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--size", default="wide", choices=tuple(SIZES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no run after this")
    parser.add_argument("--tune-seconds", type=float, default=75)
    a = parser.parse_args()
    arms, deadline = a.arms.split(","), time.time() + a.seconds
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"unknown arms {', '.join(unknown)}: arms are {', '.join(ARMS)}")
    families, counts = a.families.split(","), [int(n) for n in a.seeds.split(",")]
    if len(counts) not in (1, len(families)):
        parser.error(f"--seeds {a.seeds}: expected one number, or one for each of {', '.join(families)}")
    seeds = dict(zip(families, counts * len(families) if len(counts) == 1 else counts, strict=True))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(a.root, a.device, a.size, a.batch, a.steps, a.learning_rate, a.tune_seconds, Path(folder))
        campaign = Campaign(bench, a.out, deadline)
        device = torch.cuda.get_device_name() if a.device == "cuda" else a.device
        campaign.body["environment"] = msgspec.to_builtins(records.capture_environment(command=spell_command(), device=device))  # fmt: skip
        campaign.body["power"] = {data: find_power(data, min(counts)) for data in a.data.split(",")}
        cells = [f"{family}/{data}" for family in families for data in a.data.split(",")]
        sources = [(arm, arch) for arm, arch, used in (("bf16", False, ("tuned", "layout")), ("mods", True, ("tuned-mods",))) if any(u in arms for u in used)]  # fmt: skip
        wanted = [(cell, arm, arch) for arm, arch in sources for cell in cells]
        missing = {f"{cell}/{arm}" for cell, arm, arch in wanted if not plan_file(bench, *cell.split("/"), arch).exists()}  # fmt: skip
        names = [f"{cell}/{arm}" for cell in cells for arm in arms]
        sizes = {name: campaign.seeds(name, seeds[name.partition("/")[0]]) for name in names}
        campaign.work({name: [("", ("save", 0, deadline))] for name in sorted(missing)})
        campaign.make_plans([(cell, arch) for cell, _, arch in wanted])
        able = [n for n in names if n.rpartition("/")[2] in UNPLANNED or plan_file(bench, *n.split("/")[:2], n.endswith("-mods")).exists()]  # fmt: skip
        again = (
            [("", ("train", 0, deadline))] if a.device == "cuda" else []
        )  # what is done already is still to be timed beside the others
        campaign.work({n: sizes[n] or again for n in able})
        if a.device == "cuda":
            campaign.time_arms()
        campaign.close()
        campaign.write()
    for row in campaign.body["summary"]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
