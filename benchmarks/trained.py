"""The configuration that was timed, trained: what `loka.tune` chooses for a model, beside bf16 of the original; step time, memory and loss of the same object.

    python benchmarks/trained.py --root FOLDER --out trained.json --seeds 64,500 --seconds 330                                   on a GPU: Wukong and DLRM on Census-Income
    python benchmarks/trained.py --root FOLDER --out trained_hstu.json --families hstu --arms bf16,tuned --seconds 230                             the same for HSTU on MovieLens 1M; so for interformer
    python benchmarks/trained.py --root FOLDER --out x.json --device cpu --size tiny --batch 256 --steps 30 --seeds 2            dry run, FP8 emulated, nothing timed

FOLDER holds compact copies of the data: `quality_data.py --only ranking-census-income-kdd,ranking-ml-1m,sequences-ml-1m --no-baselines` writes what is needed here, 16 MiB.
The models (benchmarks/trained_families.py) are plain PyTorch, as a user writes them, and two families of ours; AdamW, learning rate annealed to nearly zero. For every family and data set:

    1  bf16 trains a third of seed 0; `loka.tune` takes that model, chooses on training batches and verifies on rows that nobody trains on. Its plan is what the arm `tuned` runs
    2  every arm trains from the same weights on the same batches for the same number of steps, seed by seed:
           bf16         the original, autocast, compiled           naive        torchao's tensorwise at every linear it can take
           tuned        loka.convert(model, plan)                  layout       bf16 with the mods of that plan, which change nothing but the layout
           mods         bf16 with no_bias, block_norm, hard_swish  tuned-mods   what tune chooses for that architecture
    3  the models as trained are timed: the CUDA graph of the whole step with AdamW that trained them, one arm at a time, in turns, nothing else on the card
    4  the test log loss is compared seed by seed: `tuned` with bf16, `tuned-mods` with `mods` at 0.02 % and with bf16 at 0.1 %

One process an arm (benchmarks/trained_worker.py): it compiles once and trains all seeds with what it compiled; arms share the card while they train, since no loss depends on that. Outputs are
compared with float32 before anything is trained. Power: beside every change stands the smallest one that as many seeds detect (80 %, two-sided 5 %). The file is written as runs end;
finished runs are not repeated, and the plans are in the file: the same call with more --seeds goes on.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from multiprocessing import connection, get_context
from pathlib import Path
from statistics import median, stdev
from typing import Any

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parent))
from evidence import spell_command
from trained_families import FAMILIES, SIZES
from trained_worker import Bench, checkpoint_file, plan_file, serve

from loka import records
from loka.metrics import compare_paired

ARMS = ("bf16", "tuned", "naive", "layout", "mods", "tuned-mods")
SOURCES = {
    "tuned": ("bf16", False),
    "layout": ("bf16", False),
    "tuned-mods": ("mods", True),
}  # whose third tune looks at
AGAINST = {
    "tuned": (("bf16", 0.0002),),
    "naive": (("bf16", 0.0002),),
    "layout": (("bf16", 0.0002),),
    "mods": (("bf16", 0.001),),
    "tuned-mods": (("mods", 0.0002), ("bf16", 0.001)),
}
BEFORE = Path(__file__).parent / "results" / "h200" / "ablation.json"  # what says how much seeds differ
GRACE = 25.0  # seconds after the deadline until what still compiles is given up
TURNS = 5
WRITTEN_EVERY = 2.0  # seconds: hundreds of short runs would otherwise wait for the file


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
    """All of it, in the order that wastes least: plans are made and steps are timed on a quiet card, seeds are trained side by side."""

    def __init__(self, bench: Bench, out: Path, deadline: float) -> None:
        self.bench, self.out, self.deadline = bench, out, deadline
        self.body: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        for part in ("runs", "plans", "tuned", "steps"):
            self.body.setdefault(part, {})
        self.body["settings"] = {key: value for key, value in asdict(bench).items() if key not in ("root", "work")}
        for name, text in self.body["plans"].items():
            (bench.work / name).write_text(text)
        self.workers: dict[str, Process] = {}
        self.waiting: dict[str, Process] = {}  # started early: importing takes ten seconds
        self.began, self.spent, self.written = time.time(), float(self.body.get("device_seconds", 0.0)), 0.0

    def write(self) -> None:
        self.written = time.time()
        self.body["device_seconds"] = self.spent + time.time() - self.began
        self.body["summary"] = summarise(self.body["runs"], self.body["steps"])
        records.write_atomically(self.out, json.dumps(self.body, indent=1).encode())

    def work(self, jobs: dict[str, list[tuple[str, tuple[Any, ...]]]]) -> None:
        """Give every arm its list, all at once; keep what comes back."""
        busy = {}
        for name, todo in jobs.items():
            if todo and time.time() < self.deadline:
                worker = self.workers.get(name) or self.start(name)
                self.workers[name], worker.todo = worker, list(todo)
                worker.send()
                busy[worker.pipe] = worker
        while busy:
            answered = connection.wait(list(busy), timeout=max(self.deadline + GRACE - time.time(), 0.0))
            if not answered:
                for worker in busy.values():
                    print(f"{worker.name}: given up {GRACE:.0f} s after the deadline", flush=True)
                    self.workers.pop(worker.name).process.terminate()
                break
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
                if worker.todo and time.time() < self.deadline:
                    worker.send()
                else:
                    del busy[pipe]
                if time.time() - self.written > WRITTEN_EVERY:
                    self.write()
        self.write()

    def start(self, name: str) -> Process:
        """The process that waits for its first task, or a new one."""
        return self.waiting.pop(name, None) or Process(self.bench, name)

    def seeds(self, name: str, count: int) -> list[tuple[str, tuple[Any, ...]]]:
        keys = [(f"{name}/{seed}", ("train", seed, self.deadline)) for seed in range(count)]
        return [(key, message) for key, message in keys if "log_loss" not in self.body["runs"].get(key, {})]

    def make_plans(self, cells: list[tuple[str, bool]]) -> None:
        """One after another: tune times what it chooses, so the card must be its own."""
        for cell, architecture in cells:
            file = plan_file(self.bench, *cell.split("/"), architecture)
            if file.exists() or not checkpoint_file(file).exists() or time.time() > self.deadline:
                continue
            process = self.start(f"{cell}/plan")
            found = process.ask("plan", architecture, until=self.deadline + GRACE)
            process.process.terminate()
            self.body["tuned"][file.stem] = found
            if "error" in found:
                print(f"{cell}: {found['error']}\n{found.get('trace', '')}", flush=True)
            else:
                self.body["plans"][file.name] = file.read_text()
            self.write()

    def time_arms(self, names: list[str]) -> None:
        """Steps of the models as trained, in turns, family by family."""
        ready = []
        for name in names:
            worker = self.workers[name]
            answer = worker.ask("ready", until=self.deadline + GRACE)
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

    def run(self, cells: list[str], arms: list[str], seeds: dict[str, int]) -> None:
        """What tune looks at; the plans, alone on the card; all seeds of all arms at once; the times, alone again."""
        wanted = dict.fromkeys((cell, *SOURCES[arm]) for cell in cells for arm in arms if arm in SOURCES)
        missing = [w for w in wanted if not plan_file(self.bench, *w[0].split("/"), w[2]).exists()]
        early = [f"{cell}/plan" for cell, _, _ in missing] + [f"{cell}/{arm}" for cell in cells for arm in arms]
        self.waiting = {name: Process(self.bench, name) for name in dict.fromkeys(early)}
        self.work({f"{cell}/{source}": [("", ("save", 0, self.deadline))] for cell, source, _ in missing})
        self.make_plans([(cell, architecture) for cell, _, architecture in wanted])
        names = [f"{cell}/{arm}" for cell in cells for arm in arms]
        able = [n for n in names if self.has_plan(n)]
        # what is done already is still to be timed beside the others
        again = [("", ("train", 0, self.deadline))] if self.bench.device == "cuda" else []
        self.work({n: self.seeds(n, seeds[n.partition("/")[0]]) or again for n in able})
        if self.bench.device == "cuda":
            self.time_arms([n for n in able if n in self.workers])
        self.close()
        self.write()

    def has_plan(self, name: str) -> bool:
        family, data, arm = name.split("/")
        return arm not in SOURCES or plan_file(self.bench, family, data, SOURCES[arm][1]).exists()

    def close(self) -> None:
        for worker in (*self.workers.values(), *self.waiting.values()):
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
    parser.add_argument("--out", type=Path, required=True, help="JSON file; written as runs end")
    parser.add_argument("--families", default="wukong,dlrm", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--data", help="instead of each family's own data set")
    parser.add_argument("--arms", default="bf16,tuned,naive")
    parser.add_argument("--seeds", default="8", help="how many: one number, or one for each family in order (48,256)")
    parser.add_argument("--steps", type=int, help="instead of each family's own")
    parser.add_argument("--batch", type=int, help="instead of each family's own")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--size", default="wide", choices=tuple(SIZES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no run after this")
    parser.add_argument("--tune-seconds", type=float, help="instead of each family's own")
    a = parser.parse_args()
    for asked, known in ((a.arms, ARMS), (a.families, tuple(FAMILIES))):
        if unknown := [name for name in asked.split(",") if name not in known]:
            parser.error(f"unknown {', '.join(unknown)}: expected some of {', '.join(known)}")
    families, counts = a.families.split(","), [int(n) for n in a.seeds.split(",")]
    if len(counts) not in (1, len(families)):
        parser.error(f"--seeds {a.seeds}: expected one number, or one for each of {', '.join(families)}")
    seeds = dict(zip(families, counts * len(families) if len(counts) == 1 else counts, strict=True))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(a.root, a.device, a.size, a.batch, a.steps, a.learning_rate, a.tune_seconds, Path(folder))
        campaign = Campaign(bench, a.out, time.time() + a.seconds)
        device = torch.cuda.get_device_name() if a.device == "cuda" else a.device
        campaign.body["environment"] = msgspec.to_builtins(records.capture_environment(command=spell_command(), device=device))  # fmt: skip
        cells = [f"{f}/{name}" for f in families for name in (a.data or FAMILIES[f].data).split(",")]
        named = dict.fromkeys(c.split("/")[1] for c in cells if not c.startswith("hstu"))
        campaign.body["power"] = {data: find_power(data, min(counts)) for data in named}
        campaign.run(cells, a.arms.split(","), seeds)
    for row in campaign.body["summary"]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
