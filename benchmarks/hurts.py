"""Where naive FP8 hurts: features as they are delivered, a learning rate four times the usual, no annealing, no dropout, many steps. Planned FP8 beside naive FP8 beside bf16.

    python benchmarks/hurts.py --root FOLDER --out hurts.json --seconds 190                                       on a GPU
    python benchmarks/hurts.py --root FOLDER --out x.json --device cpu --steps 40 --seeds 2 --rows 20000          dry run, FP8 emulated
    python benchmarks/hurts.py --root FOLDER --out hurts_2048.json --width 2048 --seeds 2                         one confirmation, wider
    python benchmarks/hurts.py --root FOLDER --out hurts_usual.json --rate 1e-3 --data criteo-like                at the usual rate
    python benchmarks/hurts.py --root FOLDER --out hurts.json --summarise --figure docs/figures/hurts.svg         sums up what was run, and draws it

    criteo-like   a synthetic stream: 13 integers, raw, with the missing share, the mean and deviation of the logarithm and the largest value of each integer column of Criteo's log (8,000 rows of
                  it: only these numbers are here), 16 ids; the label is drawn from a fixed function of logarithms, pairs and ids
    census        Census-Income with dollars, weeks and years as delivered (from the compact copy, which holds log(1 + x) to eight bits), neither standardised nor binned; both labels

The model: one table, raw columns beside its rows, three linears of --width with ReLU and biases, a last one. Adam at 4e-3. Arms, from the same weights on the same batches:

    bf16      autocast
    naive     torchao's tensorwise at every linear but the last, which it cannot take
    planned   Probe watches the first steps of a bf16 run; `report.plan(min_speedup=None)` keeps by name what is not safe; `loka.convert`

Each arm is a process: the step (gathering the batch, forward, backward, AdamW) is compiled and captured once in a CUDA graph that advances by itself, and seeds are trained with it one after another;
arms share the card. Along the way, every twentieth: mean training loss, L2 of the biases, test loss. Stopped at stated power: from --least seeds on, a data set ends when every change of the
test loss, median of the looks of the earlier and of the later half, is decided (its interval excludes zero, or lies within 0.02 %). Nothing is timed.
"""

import argparse
import json
import math
import os
import queue
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from evidence import spell_command

import loka
from loka import records
from loka.metrics import compare_paired

ARMS = ("bf16", "naive", "planned")
# missing, mean and deviation of log(1 + x), largest value: Criteo's thirteen integers
INTEGERS = (
    (0.45, 0.79, 0.97, 214), (0.00, 2.11, 2.13, 18522), (0.20, 2.24, 1.28, 65535), (0.20, 1.73, 0.96, 280), (0.05, 7.28, 2.87, 1618112), (0.25, 3.60, 1.80, 12167),
    (0.05, 1.53, 1.35, 1658), (0.00, 2.05, 1.18, 547), (0.05, 3.62, 1.69, 5639), (0.45, 0.37, 0.39, 4), (0.05, 0.85, 0.74, 79), (0.78, 0.29, 0.60, 98), (0.20, 1.89, 1.06, 770),
)  # fmt: skip
FIELDS, IDS, DIM = 16, 1000, 16
STEPS, BATCH = {"criteo-like": 20_000, "census": 4_000}, {"criteo-like": 2048, "census": 1024}
RATE = 4e-3  # four times 1e-3
LOOKS, WATCHED, WARM = 20, 400, 3
HALVES = ("earlier", "later")
MARGIN = 0.0002


@dataclass(frozen=True)
class Bench:
    """What all runs share."""

    root: Path
    device: str
    width: int
    steps: int | None
    rows: int
    work: Path
    batch: int | None = None
    rate: float = RATE


@dataclass(frozen=True)
class Split:
    """Examples on the device; dense columns are filled up to 16 with zeros, which FP8 libraries need."""

    dense: Tensor
    ids: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def fill(dense: Tensor) -> Tensor:
    return F.pad(dense, (0, -dense.shape[1] % 16)).contiguous()


def draw_criteo(rows: int, seed: int, device: str) -> Split:
    """Raw integers with Criteo's marginals, ids, and labels of a fixed function."""
    g = torch.Generator(device=device).manual_seed(seed)
    shape, t = torch.tensor(INTEGERS, device=device), torch.Generator(device=device).manual_seed(99)
    z = torch.randn(rows, len(INTEGERS), device=device, generator=g)
    raw = torch.expm1((shape[:, 1] + shape[:, 2] * z).clamp(min=0)).round().minimum(shape[:, 3])
    raw *= torch.rand(raw.shape, device=device, generator=g) >= shape[:, 0]
    ids = torch.rand(rows, FIELDS, device=device, generator=g).pow(3).mul(IDS).long().clamp(max=IDS - 1)
    seen = torch.tanh((torch.log1p(raw) - shape[:, 1]) / shape[:, 2])
    alone, pairs = (torch.randn(s, device=device, generator=t) for s in ((13, 1), (13, 13)))
    effects = torch.randn(FIELDS, IDS, device=device, generator=t)
    logit = 0.8 * (seen @ alone)[:, 0] + 0.15 * ((seen @ pairs) * seen).sum(1) - 4.5
    for field in range(FIELDS):
        logit += 0.4 * effects[field][ids[:, field]]
    return Split(fill(raw), ids.int(), torch.bernoulli(torch.sigmoid(logit), generator=g)[:, None])


def read(bench: Bench, name: str) -> tuple[dict[str, Split], list[int]]:
    """The splits, and how many ids each field has."""
    if name == "criteo-like":
        made = {"train": draw_criteo(bench.rows, 1, bench.device), "test": draw_criteo(min(bench.rows, 1 << 19), 2, bench.device)}  # fmt: skip
        return made, [IDS] * FIELDS
    from quality_data import unpack_ranking

    document, rows, columns = unpack_ranking(bench.root / "ranking-census-income-kdd.npz")
    ids = torch.stack([torch.from_numpy(columns[f["name"]].astype("int32")) for f in document["categorical"]], 1)
    dense = fill(torch.expm1(torch.from_numpy(columns["dense"].T.astype("float32"))).round())
    labels = torch.from_numpy(columns["labels"].T.astype("float32"))
    whole = Split(dense, ids, labels)
    first, splits = 0, {}
    for split, count in zip(("train", "valid", "test"), rows.tolist(), strict=True):
        part = slice(first, first + (count if bench.device == "cuda" else min(count, bench.rows)))
        splits[split] = Split(*(getattr(whole, k)[part].to(bench.device) for k in ("dense", "ids", "labels")))
        first += count
    return splits, [field["cardinality"] for field in document["categorical"]]


class Ranker(nn.Module):
    """What a ranker is without care for numbers."""

    def __init__(self, cards: list[int], dense: int, labels: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(sum(cards), DIM)
        self.register_buffer("offsets", torch.tensor([0, *cards[:-1]]).cumsum(0))
        first = dense + DIM * len(cards)
        self.layers = nn.Sequential(
            nn.Linear(first, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, labels),
        )  # fmt: skip

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        return self.layers(torch.cat([dense, self.table(ids + self.offsets).flatten(1)], 1))


def typical(along: list[dict[str, Any]], half: str = "later") -> list[float | None]:
    """The median test loss of half of the looks: without annealing a single look is mostly luck, and a mean is one of them where a look is off by a factor of 50. None where one was not finite."""
    middle = len(along) // 2
    looks = [look["test_losses"] for look in (along[middle:] if half == "later" else along[:middle] or along)]
    return [None if None in values else statistics.median(values) for values in zip(*looks, strict=True)]


class Worker:
    """One arm on one data set: the step captured once, seeds one after another."""

    def __init__(self, bench: Bench, data: str, arm: str, *, captured: bool = True) -> None:
        torch.set_num_threads(1)
        self.bench, self.arm, self.device = bench, arm, bench.device
        self.splits, self.cards = read(bench, data)
        self.batch, self.steps = bench.batch or BATCH[data], bench.steps or STEPS[data]
        train = self.splits["train"]
        if len(train) < self.batch:
            raise ValueError(f"a batch of {self.batch} is larger than the {len(train)} training examples")
        self.model = self.build(0)
        self.facts: dict[str, Any] = {}
        self.lower(bench.work / f"{data}.json")
        self.scales = {n: t.clone() for n, t in loka.placing.scale_state(self.model).items()}
        with torch.device(self.device):
            self.counter, self.total = torch.zeros((), dtype=torch.long), torch.zeros(())
            self.order, self.places = torch.arange(len(train)), torch.arange(self.batch)
        cuda = self.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=bench.rate, weight_decay=0.0, fused=cuda, capturable=cuda)  # fmt: skip
        self.run = torch.compile(self.model, dynamic=False) if cuda else self.model
        self.again = self.capture() if cuda and captured else self.step

    def build(self, seed: int) -> Ranker:
        torch.manual_seed(seed)
        train = self.splits["train"]
        with torch.device(self.device):
            return Ranker(self.cards, train.dense.shape[1], train.labels.shape[1], self.bench.width)

    def lower(self, plan: Path) -> None:
        """The arm, by public calls alone; compared with float32 on one batch before anything is trained."""
        index = torch.arange(self.batch, device=self.device)
        train = self.splits["train"]
        inputs = train.dense[index], train.ids[index]
        with torch.no_grad():
            wanted = self.model(*inputs)
        if self.arm == "naive":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig(emulate=self.device == "cpu")  # its defaults are the tensorwise recipe
            last = f"layers.{len(self.model.layers) - 1}"
            convert_to_float8_training(self.model, config=config, module_filter_fn=lambda m, name: name != last)
        elif self.arm == "planned":
            done = loka.convert(self.model, loka.Plan.load(plan), backend="auto")
            self.facts |= {"converted": done.converted, "kept": done.kept}
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
            for _ in range(2):  # delayed scales are known before anything is compiled
                self.lose(train, index, compiled=False).mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        with torch.no_grad(), torch.autocast(self.device, torch.bfloat16):
            got = self.model(*inputs).float()
        self.facts["output_error"] = float((got - wanted).norm() / wanted.norm())

    def lose(self, split: Split, index: Tensor, *, compiled: bool) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            out = (self.run if compiled else self.model)(split.dense[index], split.ids[index])
        return F.binary_cross_entropy_with_logits(out.float(), split.labels[index], reduction="none").mean(0)

    def step(self) -> None:
        """One step; which batch is counted on the device."""
        train = self.splits["train"]
        index = self.order[(self.counter * self.batch + self.places) % len(train)]
        loss = self.lose(train, index, compiled=True).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.total.add_(loss.detach())
        self.counter.add_(1)

    def capture(self) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
        return self.graph.replay

    @torch.no_grad()
    def begin(self, seed: int) -> None:
        """Everything in place, since the graph holds addresses: weights, scales, the optimizer's state, the order of the batches."""
        fresh = self.build(seed).state_dict()
        for name, p in self.model.named_parameters():
            p.copy_(fresh[name])
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        if self.arm == "planned":
            loka.placing.refresh(self.model)
            loka.placing.load_scale_state(self.model, self.scales)
        generator = torch.Generator(self.device).manual_seed(seed)  # on the host 2^24 numbers take as long as training
        self.order.copy_(torch.randperm(len(self.order), generator=generator, device=self.device))
        self.counter.zero_()
        self.total.zero_()
        self.model.train()

    def train(self, seed: int, deadline: float) -> dict[str, Any]:
        """All steps of a seed, with what was seen along the way."""
        self.begin(seed)
        began, every, seen = time.time(), max(self.steps // LOOKS, 1), []
        for step in range(1, self.steps + 1):
            self.again()
            if step % every and step != self.steps:
                continue
            seen.append({"step": step, "train_loss": float(self.total) / (every if step % every == 0 else step % every), "biases": self.biases(), "test_losses": self.score()})  # fmt: skip
            self.total.zero_()
            if time.time() > deadline:
                raise TimeoutError(f"out of time after {step} of {self.steps} steps")
        return {**self.facts, "steps": self.steps, "along": seen, "log_losses": typical(seen), "seconds": time.time() - began}  # fmt: skip

    @torch.no_grad()
    def biases(self) -> dict[str, float]:
        """L2 of every linear's bias."""
        return {n: float(m.bias.norm()) for n, m in self.model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None}  # fmt: skip

    @torch.no_grad()
    def score(self) -> list[float | None]:
        """Mean log loss of every label on the test split, as the arm computes; None where it is not finite."""
        self.model.eval()
        test = self.splits["test"]
        pieces = torch.arange(len(test), device=self.device).split(1 << 16)
        parts = [self.lose(test, index, compiled=False).double() * len(index) for index in pieces]
        self.model.train()
        return [x if math.isfinite(x) else None for x in (torch.stack(parts).sum(0) / len(test)).tolist()]

    def plan(self, file: Path) -> dict[str, Any]:
        """Probe the first steps of a bf16 run, not compiled; the plan for accuracy, and what it keeps and why."""
        self.begin(0)
        watched = min(WATCHED, self.steps)
        train, probe = self.splits["train"], loka.Probe(self.model, every=max(watched // LOOKS, 1), rows=512)
        for step in range(watched):
            index = self.order[(step * self.batch + self.places) % len(train)]
            self.lose(train, index, compiled=False).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            probe.step()
        probe.detach()
        report = probe.evaluate(samples=10, backends=("reference",), sources=("rows",), judged_on=("rows",))
        plan = report.plan(min_speedup=None)
        plan.save(file)
        kept = {f"{s.site} {c.gemm}": c.reason for s in plan.sites for c in s.choices if not c.quantized}
        return {"share": plan.low_precision_share, "kept": kept, "text": file.read_text(), "printed": str(plan)[:6000]}


def serve(out: Any, enough: Any, bench: Bench, data: str, arm: str, seeds: list[int], deadline: float) -> None:
    """A process: trains the seeds that are still missing, and tells each as it ends."""
    try:
        if arm == "plan":
            worker = Worker(bench, data, "bf16", captured=False)  # Probe hooks into what runs as it is written
            out.put((data, arm, -1, worker.plan(bench.work / f"{data}.json")))
            return
        worker = Worker(bench, data, arm)
        for seed in seeds:
            if enough.is_set() or time.time() > deadline:
                break
            out.put((data, arm, seed, worker.train(seed, deadline)))
    except TimeoutError as error:  # the seeds before it are there
        print(f"{data}/{arm}: {error}", flush=True)
    except Exception as error:
        out.put((data, arm, -1, {"error": f"{type(error).__name__}: {error}"[:1500], "trace": traceback.format_exc()[-2000:]}))  # fmt: skip
    finally:
        out.put((data, arm, None, None))


def compare(pairs: list[tuple[float | None, float | None]], metric: str) -> dict[str, Any]:
    """The relative change over paired seeds; seeds of which a side was not finite are counted and left out."""
    good = [(a, b) for a, b in pairs if a is not None and b is not None]
    row: dict[str, Any] = {"seeds": len(pairs), "diverged": len(pairs) - len(good)}
    if len(good) > 1:
        ours, theirs = (torch.tensor(side, dtype=torch.float64) for side in zip(*good, strict=True))
        seen = compare_paired(ours, theirs, margin=100 * MARGIN, metric=metric, lower_is_better=True, relative=True, method="student")  # fmt: skip
        row |= {metric: [float(ours.mean()), float(theirs.mean())], "change": seen.estimate / 100, "low": seen.low / 100, "high": seen.high / 100, "detectable": seen.mde / 100, "verdict": seen.verdict}  # fmt: skip
    return row


def paired(runs: dict[str, Any]) -> list[tuple[str, str, list[tuple[Any, Any]]]]:
    """Data set, arm, and its runs beside bf16's of the same seeds."""
    found = []
    for data in dict.fromkeys(key.split("/")[0] for key in runs):
        for arm in ARMS[1:]:
            seeds = [s for s in range(1000) if all(f"{data}/{a}/{s}" in runs for a in (arm, "bf16"))]
            found.append((data, arm, [(runs[f"{data}/{arm}/{s}"], runs[f"{data}/bf16/{s}"]) for s in seeds]))
    return found


def summarise(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Per data set, arm, label and half of the run: the change of the test loss over paired seeds."""
    rows = []
    for data, arm, pairs in paired(runs):
        for label in range(len(pairs[0][0]["log_losses"]) if pairs else 0):
            for half in HALVES:
                both = [(typical(a["along"], half)[label], typical(b["along"], half)[label]) for a, b in pairs]
                rows.append({"data": data, "arm": arm, "label": label, "half": half} | compare(both, "log_loss"))
    return rows


def summarise_biases(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Per data set, arm and layer: the change of the bias's L2 at the end, over paired seeds."""
    rows = []
    for data, arm, pairs in paired(runs):
        for layer in pairs[0][0]["along"][-1]["biases"] if pairs else ():
            both = [(a["along"][-1]["biases"][layer], b["along"][-1]["biases"][layer]) for a, b in pairs]
            rows.append({"data": data, "arm": arm, "layer": layer} | compare(both, "bias_l2"))
    return rows


def _tells(row: dict[str, Any]) -> bool:
    if "low" not in row:
        return False
    return bool(row["low"] > 0 or row["high"] < 0 or (row["low"] > -MARGIN and row["high"] < MARGIN))


def is_decided(rows: list[dict[str, Any]], data: str, least: int) -> bool:
    """Whether more seeds would tell nothing new."""
    mine = [row for row in rows if row["data"] == data]
    done = [row["seeds"] >= least and (row["diverged"] > 0 or _tells(row)) for row in mine]
    return len(mine) > 0 and len({row["arm"] for row in mine}) == len(ARMS) - 1 and all(done)


def draw(body: dict[str, Any], data: str, figure: Path) -> None:
    """Test loss and L2 of the first layer's biases along the run: the median over seeds, and the middle half of them."""
    import vl_convert

    rows = []
    for key, run in body["runs"].items():
        name, arm, _ = key.split("/")
        for look in run["along"] if name == data else ():
            layer = next(iter(look["biases"]))
            rows.append({"arm": arm, "step": look["step"], "loss": look["test_losses"][0], "bias": look["biases"][layer]})  # fmt: skip
    ink = {"labelColor": "#1b1f24", "titleColor": "#1b1f24", "grid": False, "domainColor": "#8b949e", "tickColor": "#8b949e", "titleFontWeight": 400}  # fmt: skip
    colour = {"field": "arm", "type": "nominal", "title": None, "scale": {"domain": list(ARMS), "range": ["#8b949e", "#d55e00", "#0072b2"]}}  # fmt: skip
    step = {"field": "step", "type": "quantitative", "title": "step"}
    panels = [
        {
            "width": 400, "height": 260, "title": {"text": title, "anchor": "start", "fontWeight": 600},
            "encoding": {"x": step, "color": colour},
            "layer": [
                {"mark": {"type": "errorband", "extent": "iqr", "opacity": 0.15}, "encoding": {"y": {"field": field, "type": "quantitative", "scale": {"zero": False}, "title": name}}},
                {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": {"field": field, "aggregate": "median", "type": "quantitative"}}},
            ],
        }
        for field, title, name in (("loss", "Test loss", "log loss"), ("bias", "Biases of the first layer", "L2"))
    ]  # fmt: skip
    chart = {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json", "data": {"values": rows}, "hconcat": panels, "background": "#ffffff",
        "config": {"font": "system-ui, sans-serif", "axis": ink, "view": {"stroke": None}, "aria": False},
    }  # fmt: skip
    figure.write_text(vl_convert.vegalite_to_svg(json.dumps(chart)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of quality_data.py, for census")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; written again after every run")
    parser.add_argument("--data", default="criteo-like,census")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--least", type=int, default=4)
    parser.add_argument("--steps", type=int, help=f"instead of {STEPS}")
    parser.add_argument("--batch", type=int, help=f"instead of {BATCH}")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rate", type=float, default=RATE, help="learning rate")
    parser.add_argument("--rows", type=int, default=1 << 24, help="of the synthetic stream, after which it repeats")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no run after this")
    parser.add_argument("--summarise", action="store_true", help="sum up the runs in --out anew; nothing is trained")
    parser.add_argument("--figure", type=Path, help="with --summarise: draw the first data set of --data as SVG")
    a = parser.parse_args()
    if a.summarise:
        body = json.loads(a.out.read_text())
        body["summary"], body["biases"] = summarise(body["runs"]), summarise_biases(body["runs"])
        records.write_atomically(a.out, json.dumps(body, indent=1).encode())
        if a.figure is not None:
            draw(body, a.data.split(",")[0], a.figure)
        return
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    began, body = time.time(), json.loads(a.out.read_text()) if a.out.exists() else {}
    deadline, spent = began + a.seconds, float(body.get("device_seconds", 0.0))
    for part in ("runs", "plans", "failed"):
        body.setdefault(part, {})
    device = torch.cuda.get_device_name() if a.device == "cuda" else a.device
    body["environment"] = msgspec.to_builtins(records.capture_environment(command=spell_command(), device=device))
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(a.root, a.device, a.width, a.steps, a.rows, Path(folder), a.batch, a.rate)
        body["settings"] = {k: v for k, v in asdict(bench).items() if k not in ("root", "work")} | {"batches": BATCH, "least": a.least, "margin": MARGIN}  # fmt: skip
        for data, plan in body["plans"].items():
            (bench.work / f"{data}.json").write_text(plan["text"])
        told, running, enough = context.Queue(), {}, {d: context.Event() for d in a.data.split(",")}

        def start(data: str, arm: str) -> None:
            todo = [s for s in range(a.seeds) if f"{data}/{arm}/{s}" not in body["runs"]]
            if todo:
                process = context.Process(target=serve, args=(told, enough[data], bench, data, arm, todo, deadline), daemon=True)  # fmt: skip
                process.start()
                running[data, arm] = process

        for data in enough:
            start(data, "bf16")
            start(data, "naive")
            start(data, "planned" if data in body["plans"] else "plan")
        while running:
            try:
                data, arm, seed, found = told.get(timeout=max(deadline + 25 - time.time(), 0.1))
            except queue.Empty:
                print(f"given up: {', '.join('/'.join(key) for key in running)}", flush=True)
                break
            if seed is None:
                running.pop((data, arm), None)
                if arm == "plan" and data in body["plans"]:
                    start(data, "planned")
                continue
            if "error" in found:
                body["failed"][f"{data}/{arm}"] = found
                print(f"{data}/{arm}: {found['error']}", flush=True)
            elif arm == "plan":
                body["plans"][data] = found
                print(f"{data}: {found['share']:.1%} of the FLOPs in FP8; kept: {json.dumps(found['kept'])[:2000]}", flush=True)  # fmt: skip
            else:
                body["runs"][f"{data}/{arm}/{seed}"] = found
                body["failed"].pop(f"{data}/{arm}", None)
                print(f"{data}/{arm}/{seed}: {found['log_losses']} in {found['seconds']:.1f} s", flush=True)
            body["summary"], body["biases"] = summarise(body["runs"]), summarise_biases(body["runs"])
            body["device_seconds"] = spent + time.time() - began
            if is_decided(body["summary"], data, a.least):
                enough[data].set()
            records.write_atomically(a.out, json.dumps(body, indent=1).encode())
        for process in running.values():
            process.terminate()
    for row in body.get("summary", []):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
