"""Weights and activations of three trained models side by side: a ranker on raw features, a generative recommender, a language model.

    python benchmarks/distributions.py --root FOLDER --work runs/distributions --out distributions.json --figure docs/figures/distributions.svg         two cores, 5 minutes each
    python benchmarks/distributions.py --root FOLDER --work /tmp/d --out distributions.json --device cuda --size large --seconds 50                   on a GPU, larger

    ranker    one table and an MLP, 512 wide, on Census-Income with dollars, weeks and years as they are delivered, neither standardised nor binned; a learning rate four times the usual,
              no dropout, no annealing: what production rankers are said to be trained like (benchmarks/hurts.py)
    onerec    next items of MovieLens 1M as semantic ids (benchmarks/quality_sequences.py)
    language  a causal transformer over bytes, on the docstrings of Python's own library, numpy and torch, read from their files

The question is the second paper's: are the weights of a generative recommender as tame as a language model's, and a ranker's not? Everything is trained here, for --seconds each, so models are
small and the answer is about such models; every model's line says how long it trained and what it reached on examples it had not seen. FOLDER holds ranking-census-income-kdd.npz and
sequences-ml-1m.npz of benchmarks/quality_data.py. What was trained and looked at is kept in --work, a file a model, and not done again.
"""

import argparse
import ast
import importlib.util
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import hurts
import quality_sequences
from evidence import spell_command

from loka.metrics import AUC
from loka.ptq import REFERENCES, analyze_model
from loka.records import Analysis, ModelStats, capture_environment
from loka.records import load as load_record
from loka.records import save as save_record
from loka.training import TrainConfig

ONEREC_DATA = "ml-1m"
# bytes in a row, width, layers, heads, rows in a batch of the language model; prefixes in a batch of OneRec (None: as its recipe has it)
SIZES = {"tiny": (32, 32, 2, 2, 8, 16), "small": (128, 128, 3, 4, 16, 128), "large": (256, 512, 8, 8, 128, None)}
LEARNED = {
    "ranker": 0.9,
    "language": 3.0,
}  # AUC and bits a byte of what counts as trained; of OneRec twice the hits of popularity. Without there is no verdict
STATISTICS = (("variance", "variance"), ("absmax", "largest magnitude"), ("abs_p99", "99th percentile of magnitude"))
LEFT_OUT = ("site-packages", "test", "tests", "testing", "idlelib", "lib2to3")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Language(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks, self.last = nn.ModuleList(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)  # as language models have it

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def read_docstrings() -> Tensor:
    """Docstrings of modules, classes and functions, each once, in the order of their files; nothing is imported."""
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    roots += [Path(spec.origin).parent for n in ("numpy", "torch") if (spec := importlib.util.find_spec(n)) and spec.origin]  # fmt: skip
    found: dict[str, None] = {}
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            if any(part in LEFT_OUT for part in file.relative_to(root).parts):
                continue
            try:
                tree = ast.parse(file.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError, ValueError, OSError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text and len(text) > 80:
                        found[text] = None
    return torch.frombuffer(bytearray("\n\n".join(found).encode()), dtype=torch.uint8).long()


def look_at_ranker(a: argparse.Namespace) -> ModelStats:
    width = 64 if a.size == "tiny" else 512
    bench = hurts.Bench(a.root, a.device, width, None, 1 << 30, a.work)
    splits, cards = hurts.read(bench, "census")
    torch.manual_seed(0)
    train, test = splits["train"], splits["test"]
    with torch.device(a.device):
        model = hurts.Ranker(cards, train.dense.shape[1], train.labels.shape[1], width)
    optimizer, steps, start = torch.optim.Adam(model.parameters(), hurts.RATE), 0, time.monotonic()
    seconds = a.ranker_seconds or a.seconds
    while time.monotonic() - start < seconds:
        for index in torch.randperm(len(train), device=a.device).split(512):
            loss = F.binary_cross_entropy_with_logits(model(train.dense[index], train.ids[index]), train.labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % 50 == 0 and time.monotonic() - start > seconds:
                break
    measured = AUC()
    with torch.no_grad():
        for index in torch.arange(len(test), device=a.device).split(1 << 14):
            measured.update(model(test.dense[index], test.ids[index])[:, 0], test.labels[index, 0])
    auc = measured.compute()
    told = f"{steps} steps of 512, test AUC {auc:.4f}"
    return analyze_model(
        model, name="ranker, raw features", source=told, run=lambda m: m(train.dense[:2048], train.ids[:2048]), activations_of="2,048 examples of census-income-kdd",
        trained=auc > LEARNED["ranker"],
    )  # fmt: skip


def look_at_language(a: argparse.Namespace) -> ModelStats:
    context, width, layers, heads, rows, _ = SIZES[a.size]
    text = read_docstrings()
    held, text = text[-len(text) // 20 :].to(a.device), text[: -len(text) // 20].to(a.device)
    torch.manual_seed(0)
    with torch.device(a.device):
        model = Language(context, width, layers, heads)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    window, start, steps = torch.arange(context + 1, device=a.device), time.monotonic(), 0
    seconds = a.language_seconds or a.seconds
    while (spent := time.monotonic() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (steps + 1) / 100) * (1 - 0.95 * spent / seconds)
        at = torch.randint(len(text) - context - 1, (rows, 1), device=a.device) + window
        with torch.autocast(a.device, torch.bfloat16, enabled=a.device == "cuda"):
            loss = F.cross_entropy(model(text[at[:, :-1]]).flatten(0, 1).float(), text[at[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    at = torch.arange(0, len(held) - context - 1, context, device=a.device)[:512, None] + window
    with torch.no_grad():
        nats = sum(float(F.cross_entropy(model(held[i[:, :-1]]).flatten(0, 1), held[i[:, 1:]].flatten())) * len(i) for i in at.split(64)) / len(at)  # fmt: skip
    count = sum(p.numel() for p in model.parameters())
    told = f"{count / 1e6:.1f} M parameters, {steps} steps of {rows} x {context} bytes of {len(text):,}, {nats / 0.6931:.3f} bits a byte held out"
    shown = text[: 64 * context].reshape(64, context)
    return analyze_model(
        model, name="language model", source=told, run=lambda m: m(shown), activations_of=f"64 x {context} bytes of docstrings", trained=nats / 0.6931 < LEARNED["language"],
    )  # fmt: skip


def look_at_onerec(a: argparse.Namespace) -> ModelStats:
    events = quality_sequences.read_events(a.root, ONEREC_DATA, a.device)
    recipe = quality_sequences.RECIPES["onerec", ONEREC_DATA][0]
    batch = SIZES[a.size][-1] or recipe.batch
    recipe = replace(recipe, batch=batch, evaluations=3, patience=10, steps=recipe.steps if a.size == "large" else a.onerec_steps)  # fmt: skip
    torch.manual_seed(0)
    task = quality_sequences.NextId(events, recipe)
    task.model.to(a.device)
    config = TrainConfig(
        steps=recipe.steps, warmup_steps=min(100, recipe.steps), learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay, schedule="cosine", final_fraction=0.02
    )  # fmt: skip
    best = quality_sequences.train(task, recipe, config, a.device, time.time() + a.seconds)
    task.model.load_state_dict(best.pop("state"))
    count, beaten = sum(p.numel() for p in task.model.parameters()), quality_sequences.measure_baselines(a.root, ONEREC_DATA, "cpu")  # fmt: skip
    told = f"{count / 1e6:.1f} M parameters, {best['best_step']} steps of {batch} prefixes, validation HR@10 {best['valid_hr10']:.3f} (test popularity {beaten['popularity']:.3f})"
    examples = task.examples[torch.randperm(len(task.examples), device=a.device)[:batch]]
    return analyze_model(
        task.model, name="OneRec", source=told, run=lambda m: task.loss(examples), activations_of=f"{batch} prefixes of {ONEREC_DATA}",
        trained=best["valid_hr10"] > 2 * beaten["popularity"],
    )  # fmt: skip


def once(path: Path, make: Callable[[], ModelStats]) -> ModelStats:
    """A model's statistics, made only where no earlier run has left them."""
    if not path.exists():
        save_record(Analysis(models=[make()], references=[], environment=capture_environment()), path)
    return load_record(path, Analysis).models[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder of quality_data.py")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--draw-only", action="store_true", help="draw --figure of the record that --out names")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cpu")
    parser.add_argument("--seconds", type=float, default=300, help="of training, for each model")
    parser.add_argument("--ranker-seconds", type=float, help="instead of --seconds, for the ranker")
    parser.add_argument("--language-seconds", type=float, help="instead of --seconds, for the language model")
    parser.add_argument("--onerec-steps", type=int, default=1000, help="of a small one, if the time is enough")
    a = parser.parse_args()
    if a.draw_only:
        draw(load_record(a.out, Analysis), a.figure)
        return
    a.work.mkdir(parents=True, exist_ok=True)
    jobs = {"ranker": look_at_ranker, "onerec": look_at_onerec, "language": look_at_language}
    models = [once(a.work / f"{name}.json", lambda job=job: job(a)) for name, job in jobs.items()]
    device = torch.cuda.get_device_name() if a.device == "cuda" else a.device
    environment = capture_environment(command=spell_command(), device=device)
    record = Analysis(models=models, references=REFERENCES, environment=environment)
    save_record(record, a.out)
    for model in models:
        print(f"{model.name}: {model.likeness} ({'; '.join(model.reasons)}; {model.source})")
    if a.figure is not None:
        draw(record, a.figure)


def draw(record: Analysis, figure: Path) -> None:
    """The chart as an SVG, in the colours of the other figures."""
    import vl_convert

    text = {"labelColor": "#1b1f24", "titleColor": "#1b1f24", "grid": False, "domainColor": "#8b949e", "tickColor": "#8b949e", "titleFontWeight": 400}  # fmt: skip
    config = {"font": "system-ui, sans-serif", "axis": text, "range": {"category": ["#0072b2", "#8b949e", "#d55e00"]}, "view": {"stroke": None}, "aria": False}  # fmt: skip
    chart = draw_analysis(record) | {"background": "#ffffff", "config": config}
    figure.write_text(vl_convert.vegalite_to_svg(json.dumps(chart)), encoding="utf-8")


def draw_analysis(analysis: Analysis) -> dict[str, Any]:
    """Four charts for each kind (weights, activations), two in a row, data inline: a Vega-Lite specification."""
    rows: list[dict[str, Any]] = []
    for model in analysis.models:
        counts = {"weight": 0, "activation": 0}
        for layer in model.layers:
            base = {"model": model.name, "layer": layer.name, "kind": layer.kind, "place": counts[layer.kind]}
            counts[layer.kind] += 1
            rows.append(
                base
                | {"variance": layer.variance, "absmax": layer.absmax, "abs_p99": layer.abs_p99}
                | {
                    "kurtosis": layer.kurtosis,
                    "crest": next(g.crest_bits for g in layer.groups if g.spec == "e4m3:row"),
                }
            )
    kinds = [kind for kind in ("weight", "activation") if any(row["kind"] == kind for row in rows)]
    charts = [
        {"columns": 2, "concat": [_panel(analysis, kind, field, title) for field, title in (*STATISTICS, ("crest", "crest inside a row, bits"))]}
        for kind in kinds
    ]  # fmt: skip
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": "Distribution of weights and activations by layer, models side by side",
        "data": {"values": rows},
        "vconcat": charts,
    }


def _panel(analysis: Analysis, kind: str, field: str, title: str) -> dict[str, Any]:
    scale = {"type": "linear"} if field == "crest" else {"type": "log"}
    y = {"field": field, "type": "quantitative", "scale": scale, "title": title}
    tooltip = [{"field": name} for name in ("model", "layer", "variance", "absmax", "abs_p99", "kurtosis")]
    layers: list[dict[str, Any]] = [
        {
            "transform": [{"filter": f"datum.kind == '{kind}' && (datum.{field} > 0 || '{field}' == 'crest')"}],
            "mark": {"type": "point", "filled": True, "size": 28, "opacity": 0.7},
            "encoding": {
                "x": {"field": "place", "type": "quantitative", "title": f"{kind}, in model order"},
                "y": y,
                "color": {"field": "model", "type": "nominal", "legend": {"orient": "top", "title": None}},
                "tooltip": tooltip,
            },
        }
    ]
    for line in analysis.references if kind == "weight" else []:
        if line.statistic == field:
            here = {"data": {"values": [{"at": line.value, "label": line.label}]}}
            at = {"field": "at", "type": "quantitative", "scale": scale}
            layers.append({**here, "mark": {"type": "rule", "strokeDash": [5, 4]}, "encoding": {"y": at}})
            text = {"type": "text", "align": "left", "dy": -5, "x": 4, "fontSize": 9}
            layers.append({**here, "mark": text, "encoding": {"y": at, "text": {"field": "label"}}})
    return {"width": 280, "height": 200, "layer": layers}


if __name__ == "__main__":
    main()
