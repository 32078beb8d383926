"""One run of benchmarks/ablation.py: a Wukong, some mods, a precision, a seed.

The original has what the method blames: LayerNorm between blocks and inside towers, Swish, biases. Mods are applied to it after it was initialised, so that all
variants of a seed start from the same weights (what a mod drops aside), see the same batches in the same order, and drop out alike.

    bf16      autocast
    naive     every linear in FP8, one scale per tensor, all three GEMMs (recipe "tensorwise")
    planned   Probe watches a bf16 run from its first step to its last; every GEMM gets the coarsest recipe whose error is under the limit, or stays in bf16

Training runs a fixed number of steps with the rate annealed to nearly zero: no early stopping, whose luck would be part of every difference.
"""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from quality_ranking import Table, read_tables
from torch import Tensor, nn

from loka import mods, records
from loka.data.batch import Batch
from loka.dispatch import recipe_named
from loka.metrics import AUC
from loka.models import build_ranker
from loka.placing import convert
from loka.probe import Probe
from loka.records import GEMMS, Plan
from loka.training import Optimizers, TrainConfig, learning_rate_factor

ORIGINAL = {"norm": "layer", "tower_norm": "layer", "activation": "silu", "bias": True}
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": (),
    "no_bias": ("no_bias",),
    "block_norm": ("block_norm",),
    "hard_swish": ("hard_swish",),
    "all": mods.CORE,
}
PRECISIONS = ("bf16", "naive", "planned")
SAMPLED_STEPS = 8  # of the run that Probe watches


@dataclass(frozen=True)
class Recipe:
    """How long and how fast."""

    epochs: float
    batch: int
    learning_rate: float
    embedding_learning_rate: float
    dropout: float


RECIPES = {
    "ml-1m": Recipe(1.25, 4096, 1e-3, 1e-3, 0.2),
    "census-income-kdd": Recipe(4, 2048, 2e-3, 2e-2, 0.1),
    "complete-journey": Recipe(1.5, 4096, 1e-3, 2e-3, 0.1),
}


@dataclass(frozen=True)
class Bench:
    """What all runs share."""

    root: Path
    device: str
    size: str = "small"
    shorten: float = 1.0
    plans: Path = Path("plans")
    backend: str = "auto"


def build(bench: Bench, data: str, variant: str, seed: int) -> tuple[Any, dict[str, Table], Recipe]:
    """The model of a variant, with the weights of the seed."""
    torch.set_float32_matmul_precision("high")
    recipe = RECIPES[data]
    schema, tables = read_tables(bench.root, data, bench.device)
    torch.manual_seed(seed)
    model = build_ranker(schema, "wukong", bench.size, sparse=True, dropout=recipe.dropout, **ORIGINAL).to(bench.device)
    if VARIANTS[variant]:
        example = next(iter(tables["train"].batches(torch.arange(8, device=bench.device), 8)))
        mods.apply(model, VARIANTS[variant], example=example)
    return model, tables, recipe


def autocast(device: str) -> torch.autocast:
    # Without its cache: weights cast inside a CUDA graph must be cast again in every replay.
    return torch.autocast(device, torch.bfloat16, cache_enabled=False)


def lose(model: Any, batch: Batch, device: str) -> Tensor:
    with autocast(device):
        logits = model(batch)
    return F.binary_cross_entropy_with_logits(logits, batch.labels)


def shuffled(table: Table, recipe: Recipe, seed: int) -> Any:
    """Batches without end, in an order that depends on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    whole = len(table) // recipe.batch * recipe.batch
    if not whole:
        raise ValueError(f"a batch of {recipe.batch} is larger than the {len(table)} training examples")
    while True:
        order = torch.randperm(len(table), generator=generator)[:whole].to(table.labels.device)
        yield from table.batches(order, recipe.batch)


def configure(bench: Bench, recipe: Recipe, rows: int) -> TrainConfig:
    steps = max(2, round(recipe.epochs * (rows // recipe.batch) / bench.shorten))
    return TrainConfig(
        steps=steps,
        warmup_steps=min(30, steps),
        learning_rate=recipe.learning_rate,
        embedding_learning_rate=recipe.embedding_learning_rate,
        schedule="cosine",
        final_fraction=0.01,
    )


def find_plan(bench: Bench, data: str, variant: str) -> tuple[Plan, float]:
    """The plan of a cell, made once, on whatever device, and kept in a file, and the share of FLOPs that the naive recipe would quantise."""
    file = bench.plans / f"{data}-{variant}.json"
    if not file.exists():
        plan, share = make_plan(bench, data, variant)
        body = {"plan": json.loads(records.to_json(plan)), "naive_share": share}
        waiting = file.with_suffix(f".{os.getpid()}")
        waiting.write_text(json.dumps(body))
        waiting.replace(file)
    body = json.loads(file.read_text())
    return records.from_json(json.dumps(body["plan"]), Plan), float(body["naive_share"])


def make_plan(bench: Bench, data: str, variant: str) -> tuple[Plan, float]:
    model, tables, recipe = build(bench, data, variant, seed=0)
    config = configure(bench, recipe, len(tables["train"]))
    optimizers = Optimizers(model, config)
    probe = Probe(model, every=max(1, config.steps // SAMPLED_STEPS), rows=512)
    batches = shuffled(tables["train"], recipe, seed=0)
    model.train()
    first = next(batches)
    probe.count_flops(lambda: lose(model, first, bench.device).backward())
    optimizers.zero_grad()
    for step in range(config.steps):
        optimizers.set_factor(learning_rate_factor(config, step))
        lose(model, next(batches), bench.device).backward()
        optimizers.step()
        optimizers.zero_grad()
        probe.step()
    probe.detach()
    # Errors come from the emulated GEMM, which times nothing; what runs is then left to the registry, which knows the device.
    report = probe.evaluate(samples=10, backends=("reference",), sources=("rows",), judged_on=("rows",))
    share = sum(site.flops_share for site in report.record.sites)
    return report.plan(min_speedup=None), share


def lower(model: nn.Module, bench: Bench, data: str, variant: str, precision: str) -> dict[str, Any]:
    """Put the model into its precision, in place; says how much of it."""
    if precision == "bf16":
        return {"fp8_share": 0.0}
    plan, naive = find_plan(bench, data, variant)
    if precision == "naive":
        summary = convert(model, recipe="tensorwise", backend=bench.backend)
        used, share = [recipe_named("tensorwise").operands(gemm) for gemm in GEMMS], naive
        pairs = {f"{o.a} @ {o.b}" for o in used if o is not None}
    else:
        summary = convert(model, plan, backend=bench.backend)  # it was made by emulation, on whatever device
        share = plan.low_precision_share
        pairs = {f"{c.a} @ {c.b}" for site in plan.sites for c in site.choices if c.quantized}
    counts = {"converted": len(summary.converted), "kept": len(summary.kept)}
    return {"fp8_share": share, **counts, "operands": sorted(pairs)}


def run(bench: Bench, data: str, variant: str, precision: str, seed: int, *, deadline: float) -> dict[str, Any]:
    """Train one model and score it on the test split."""
    model, tables, recipe = build(bench, data, variant, seed)
    facts = lower(model, bench, data, variant, precision)
    config = configure(bench, recipe, len(tables["train"]))
    torch.manual_seed(seed + 1000)  # whatever was drawn while the model was made: dropout starts alike in all variants
    started = time.perf_counter()
    facts |= train(model, tables["train"], recipe, config, bench, seed, deadline)
    if facts.get("diverged"):
        return facts | {"log_loss": None, "auc": None}
    rows = len(tables["test"]) if bench.shorten == 1 else max(1000, round(len(tables["test"]) / bench.shorten))
    auc, loss = score(model, tables["test"], bench.device, rows)
    finite = math.isfinite(loss)
    facts |= {"train_seconds": time.perf_counter() - started, "diverged": not finite}
    return facts | {"log_loss": loss if finite else None, "auc": auc if finite else None}


def train(
    model: Any, table: Table, recipe: Recipe, config: TrainConfig, bench: Bench, seed: int, deadline: float
) -> dict[str, Any]:
    optimizers = Optimizers(model, config)
    how = ""
    model.train()
    for step, batch in enumerate(shuffled(table, recipe, seed)):
        if not how:
            how = capture(model, batch, bench.device)
            optimizers.zero_grad()
        optimizers.set_factor(learning_rate_factor(config, step))
        loss = lose(model, batch, bench.device)
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        if step + 1 == config.steps:
            break
        if time.time() > deadline:
            raise TimeoutError(f"out of time after {step + 1} of {config.steps} steps")
    last = loss.item()
    return {"steps": config.steps, "forward": how, "train_loss": last if math.isfinite(last) else None,
            "diverged": not math.isfinite(last)}  # fmt: skip


def capture(model: Any, batch: Batch, device: str) -> str:
    """Make the core replay CUDA graphs in training, and say so, or say why not. In evaluation it stays eager."""
    if device != "cuda":
        return "eager: no GPU"
    with autocast(device):
        x = model.embed(batch).detach().requires_grad_()
        try:
            torch.cuda.make_graphed_callables(model.core, (x,), allow_unused_input=True)
        except Exception as error:  # a run without graphs is the same run, only slower; the result says which it was
            torch.cuda.synchronize()
            return f"eager: {type(error).__name__}: {str(error).splitlines()[0]}"
    return "CUDA graphs"


@torch.no_grad()
def score(model: Any, table: Table, device: str, rows: int) -> tuple[float, float]:
    """AUC and log loss of the first label, on the first rows (all of them, but in a shortened test of the script)."""
    model.eval()
    order = torch.arange(min(rows, len(table)), device=table.labels.device)
    with autocast(device):
        logits = torch.cat([model(batch)[:, 0].float() for batch in table.batches(order, 16384)])
    labels = table.labels[: len(order), 0]
    loss = float(F.binary_cross_entropy_with_logits(logits, labels))
    if not math.isfinite(loss):
        return math.nan, loss
    metric = AUC()
    metric.update(logits, labels)
    return metric.compute(), loss
