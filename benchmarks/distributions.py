"""Weights and activations of three trained models side by side: a ranker on raw features, a generative recommender, a language model.

    python benchmarks/distributions.py --work runs/distributions --out benchmarks/results/cpu/distributions.json --figure docs/figures/distributions.svg

    ranker    embeddings and an MLP on Census-Income with the numbers as they are delivered (dollars, weeks), neither standardised nor binned; a learning rate
              four times the usual, no dropout, no annealing: what production rankers are said to be trained like
    onerec    `loka train --model onerec` on MovieLens 1M
    language  a causal transformer over bytes, on the docstrings of Python's own library, numpy and torch (about six million bytes)

The question is the second paper's: are the weights of a generative recommender as tame as a language model's, and a ranker's not? Everything is trained here, on a CPU, so models are
small and the answer is about such models. What was trained is kept in --work and not trained again.
"""

import argparse
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.data import RankingData, load
from loka.metrics import AUC
from loka.ptq import REFERENCES, analyze_model, draw_analysis
from loka.records import Analysis, ModelStats, capture_environment
from loka.records import load as load_record
from loka.records import save as save_record

CONTEXT, WIDTH, LAYERS, HEADS = 128, 192, 4, 6
PACKAGES = ("json", "email", "http", "unittest", "logging", "asyncio", "xml", "multiprocessing", "numpy", "torch")


class Ranker(nn.Module):
    """What a ranker is without care for numbers: embeddings, raw columns, three linears."""

    def __init__(self, data: RankingData) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(field.cardinality, 16) for field in data.schema.categorical)
        width = 16 * len(self.tables) + len(data.schema.dense)
        self.layers = nn.Sequential(
            nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, len(data.schema.labels))
        )

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        rows = [table(categorical[:, i]) for i, table in enumerate(self.tables)]
        return self.layers(torch.cat([dense, *rows], 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def read_docstrings() -> Tensor:
    """Docstrings of modules, classes and functions, each once, in the order of their names."""
    found: dict[str, None] = {}
    names = {name for name in sys.stdlib_module_names if not name.startswith("_")} - {"antigravity", "this", "idlelib"}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{package}.", onerror=lambda name: None):
            if not any(
                part.startswith("_") or part in ("tests", "testing", "__main__") for part in info.name.split(".")[1:]
            ):
                names.add(info.name)
    for name in sorted(names | set(PACKAGES)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError, AssertionError, AttributeError, ValueError):
            continue
        things = [module, *vars(module).values()]
        things += [m for t in things if inspect.isclass(t) for m in vars(t).values()]
        found.update((d, None) for t in things if isinstance(d := getattr(t, "__doc__", None), str) and len(d) > 80)
    return torch.frombuffer(bytearray("\n\n".join(found).encode()), dtype=torch.uint8).long()


def train_ranker(data: RankingData, seconds: float) -> tuple[Ranker, str]:
    torch.manual_seed(0)
    model = Ranker(data)
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    start, steps = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        for batch in data.train.batches(512, shuffle=True, seed=steps):
            loss = F.binary_cross_entropy_with_logits(model(batch.dense, batch.categorical), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    measured = AUC()
    with torch.no_grad():
        for batch in data.test.batches(4096, shuffle=False, seed=0):
            measured.update(model(batch.dense, batch.categorical)[:, 0], batch.labels[:, 0])
    return model, f"{steps} steps of 512, test AUC {measured.compute():.4f}"


def train_language(text: Tensor, seconds: float) -> tuple[Language, str]:
    torch.manual_seed(0)
    model, g = Language(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)
    held = text[-len(text) // 20 :]
    text, start, steps = text[: -len(text) // 20], time.monotonic(), 0
    while (spent := time.monotonic() - start) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (steps + 1) / 100) * (1 - 0.95 * spent / seconds)
        at = torch.randint(len(text) - CONTEXT - 1, (32, 1), generator=g) + torch.arange(CONTEXT + 1)
        loss = F.cross_entropy(model(text[at[:, :-1]]).flatten(0, 1), text[at[:, 1:]].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    at = torch.arange(0, len(held) - CONTEXT - 1, CONTEXT)[:512, None] + torch.arange(CONTEXT + 1)
    with torch.no_grad():
        nats = F.cross_entropy(model(held[at[:, :-1]]).flatten(0, 1), held[at[:, 1:]].flatten())
    count = sum(p.numel() for p in model.parameters())
    return (
        model,
        f"{count / 1e6:.1f} M parameters, {steps} steps of 32 x {CONTEXT} bytes of {len(text):,}, {nats / 0.6931:.3f} bits a byte held out",
    )


def once(path: Path, make: Callable[[], ModelStats]) -> ModelStats:
    """A model's statistics, made only where no earlier run has left them."""
    if not path.exists():
        save_record(Analysis(models=[make()], references=[], environment=capture_environment()), path)
    return load_record(path, Analysis).models[0]


def look_at_ranker(args: argparse.Namespace) -> ModelStats:
    data = load("census-income-kdd", source=args.census, root=args.work / "data")
    model, told = train_ranker(data, args.seconds)
    batch = next(iter(data.train.batches(2048, shuffle=True, seed=1)))
    return analyze_model(
        model, name="ranker, raw features", source=told, run=lambda m: m(batch.dense, batch.categorical), activations_of="2,048 examples of census-income-kdd"
    )  # fmt: skip


def look_at_language(args: argparse.Namespace) -> ModelStats:
    text = read_docstrings()
    model, told = train_language(text, args.seconds)
    rows = text[: 64 * CONTEXT].reshape(64, CONTEXT)
    return analyze_model(
        model, name="language model", source=told, run=lambda m: m(rows), activations_of="64 x 128 bytes of docstrings"
    )


def look_at_onerec(args: argparse.Namespace) -> ModelStats:
    folder = args.work / "onerec"
    train = [
        "train",
        "--model",
        "onerec",
        "--config",
        "small",
        "--data",
        "ml-1m",
        "--steps",
        str(args.onerec_steps),
        "--set",
        "items=true",
    ]
    where = ["--data-root", str(args.work / "data")] + (["--source", str(args.movielens)] if args.movielens else [])
    subprocess.run([sys.executable, "-m", "loka", *train, *where, "--out", str(folder)], check=True)
    out = args.work / "onerec-analysis.json"
    subprocess.run(
        [sys.executable, "-m", "loka", "analyze", str(folder), *where, "--out", str(out)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return load_record(out, Analysis).models[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--census", type=Path, help="raw files of census-income-kdd")
    parser.add_argument("--movielens", type=Path, help="raw files of ml-1m")
    parser.add_argument(
        "--seconds", type=float, default=600, help="of training, for the ranker and for the language model"
    )
    parser.add_argument("--onerec-steps", type=int, default=2000)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    jobs = {"ranker": look_at_ranker, "onerec": look_at_onerec, "language": look_at_language}
    models = [once(args.work / f"{name}.json", lambda job=job: job(args)) for name, job in jobs.items()]
    command = "python benchmarks/distributions.py --out distributions.json"
    record = Analysis(models=models, references=REFERENCES, environment=capture_environment(command=command))
    save_record(record, args.out)
    for model in models:
        print(f"{model.name}: {model.likeness} ({'; '.join(model.reasons)}; {model.source})")
    if args.figure is not None:
        import vl_convert

        args.figure.write_text(vl_convert.vegalite_to_svg(json.dumps(draw_analysis(record))), encoding="utf-8")


if __name__ == "__main__":
    main()
