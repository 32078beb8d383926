"""One ranking run of benchmarks/quality.py: a whole split on the device, the optimisers and schedule of loka.training, early stopping.

A batch is a gather by index. Ragged histories need the number of values of every batch on the host; that is one read per epoch, for all its
batches at once, so the queue of launches never runs dry. On a GPU the core's forward and backward are replayed as CUDA graphs.

Besides standardised, every dense feature enters as a bin (edges from the training split): the logistic regression of the bar sees one-hot bins too.
Candidate recipes of a data set compete on the validation split with the first seed; all seeds are then run with the winner.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from quality_data import unpack_ranking
from torch import Tensor

from loka.data.batch import Batch, Jagged
from loka.data.schema import Field, Schema, SequenceField
from loka.metrics import AUC
from loka.models import build_ranker
from loka.training import Optimizers, TrainConfig, learning_rate_factor

SPLITS = ("train", "valid", "test")


BINS = 64


@dataclass(frozen=True)
class Recipe:
    """How long and how fast."""

    epochs: float
    batch: int = 4096
    learning_rate: float = 1e-3
    embedding_learning_rate: float = 5e-3
    weight_decay: float = 0.0
    dropout: float = 0.0
    evaluations_per_epoch: int = 4
    patience: int = 4


RECIPES = {
    "ml-1m": (
        Recipe(1.5, embedding_learning_rate=1e-3, dropout=0.2),
        Recipe(1.5, learning_rate=5e-4, embedding_learning_rate=1e-3, dropout=0.3),
        Recipe(1.5, embedding_learning_rate=2e-3, dropout=0.1),
    ),
    "census-income-kdd": (
        Recipe(5, batch=2048, learning_rate=2e-3, embedding_learning_rate=2e-2, dropout=0.1),
        Recipe(6, batch=2048, embedding_learning_rate=1e-2, dropout=0.3),
    ),
    "complete-journey": (
        Recipe(2, embedding_learning_rate=2e-3, dropout=0.1),
        Recipe(3, embedding_learning_rate=1e-3, dropout=0.3),
    ),
}


# What won where the candidates competed before; InterFormer takes too long to let them compete in every record.
CHOSEN = {
    ("interformer", "ml-1m"): RECIPES["ml-1m"][:1],
    ("interformer", "complete-journey"): RECIPES["complete-journey"][1:],
}


@dataclass(frozen=True)
class Table:
    """One split on the device."""

    dense: Tensor
    categorical: Tensor
    labels: Tensor
    sequences: dict[str, tuple[Tensor, Tensor, Tensor]]
    """values, and start and length of every example's window"""

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: Tensor, size: int) -> Iterator[Batch]:
        pieces = order.split(size)
        totals = {n: [int(x) for x in self._count(length[order], size)] for n, (_, _, length) in self.sequences.items()}
        for number, index in enumerate(pieces):
            rows = {name: self._cut(name, index, totals[name][number]) for name in self.sequences}
            yield Batch(self.dense[index], self.categorical[index], rows, self.labels[index], index)

    @staticmethod
    def _count(lengths: Tensor, size: int) -> list[int]:
        counts: list[int] = torch.stack([piece.sum() for piece in lengths.split(size)]).tolist()
        return counts

    def _cut(self, name: str, index: Tensor, total: int) -> Jagged:
        values, start, length = self.sequences[name]
        at, offsets = gather_windows(start[index], length[index], total)
        return Jagged(values[at], offsets)


def gather_windows(start: Tensor, length: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Positions of the values of windows (start, length), one window after another, and their offsets; total = sum(length), known to the host."""
    offsets = F.pad(length.cumsum(0), (1, 0))
    at = torch.repeat_interleave(start - offsets[:-1], length, output_size=total)
    return at + torch.arange(total, device=at.device), offsets


@lru_cache(maxsize=4)
def read_tables(root: Path, data: str, device: str) -> tuple[Schema, dict[str, Table]]:
    """The splits of a data set on the device; dense features standardised by the training split."""
    document, rows, columns = unpack_ranking(root / f"ranking-{data}.npz")
    schema = Schema(
        tuple(document["dense"]),
        tuple(Field(**field) for field in document["categorical"]),
        tuple(SequenceField(**field) for field in document["sequences"]),
        tuple(document["labels"]),
    )
    n = int(rows[0])
    dense = torch.from_numpy(columns["dense"].T).to(device).float()
    spread = dense[:n].std(0)
    dense = (dense - dense[:n].mean(0)) / torch.where(spread > 0, spread, 1.0)

    def column(name: str) -> Tensor:
        return torch.from_numpy(columns[name].astype("int64")).to(device)

    binned = [bin_column(values, n) for values in dense.T]
    fields = tuple(Field(f"bin of {name}", size) for name, (_, size) in zip(schema.dense, binned, strict=True))
    ids = torch.stack([*(column(field.name) for field in schema.categorical), *(b[0] for b in binned)], 1)
    schema = replace(schema, categorical=schema.categorical + fields)
    labels = torch.from_numpy(columns["labels"].T).to(device).float()
    windows = {
        s.name: (column(f"values:{s.name}"), column(f"start:{s.name}"), column(f"length:{s.name}"))
        for s in schema.sequences
    }
    tables, first = {}, 0
    for split, count in zip(SPLITS, rows.tolist(), strict=True):
        part = slice(first, first + count)
        cut = {name: (values, start[part], length[part]) for name, (values, start, length) in windows.items()}
        tables[split] = Table(dense[part], ids[part], labels[part], cut)
        first += count
    return schema, tables


def bin_column(column: Tensor, rows: int) -> tuple[Tensor, int]:
    """Ids from 1 of a dense column, and their number: edges are quantiles of the training values and of the different ones among them."""
    values = column[:rows].double().cpu()
    cuts = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]
    edges = torch.cat([values.quantile(cuts), values.unique().quantile(cuts)]).unique()
    return torch.bucketize(column.double().contiguous(), edges.to(column.device), right=True) + 1, len(edges) + 2


def run(
    root: Path,
    family: str,
    data: str,
    seed: int,
    device: str,
    *,
    deadline: float,
    recipe: Recipe,
) -> dict[str, Any]:
    """Train one model and score it on the test split."""
    torch.set_float32_matmul_precision("high")
    schema, tables = read_tables(root, data, device)
    torch.manual_seed(seed)
    model = build_ranker(schema, family, "small", sparse=True, dropout=recipe.dropout).to(device)
    steps_per_epoch = len(tables["train"]) // recipe.batch
    steps = max(1, round(recipe.epochs * steps_per_epoch))
    config = TrainConfig(
        steps=steps,
        warmup_steps=min(50, steps),
        learning_rate=recipe.learning_rate,
        embedding_learning_rate=recipe.embedding_learning_rate,
        weight_decay=recipe.weight_decay,
        schedule="cosine",
        final_fraction=0.05,
    )
    best = train(
        model, tables, recipe, config, every=max(1, steps_per_epoch // recipe.evaluations_per_epoch), deadline=deadline
    )
    model.load_state_dict(best.pop("state"))
    auc, loss = score(model, tables["test"])
    dense = sum(p.numel() for p in model.parameters()) - model.embedding.table.weight.numel()
    return {"auc": auc, "log_loss": loss, **best, "dense_parameters": dense, "recipe": asdict(recipe)}


def capture_core(model: Any, batch: Batch) -> str:
    """Make the core replay CUDA graphs for training batches of this shape, and say so, or say why not. In evaluation it stays eager."""
    if not batch.labels.is_cuda:
        return "eager: no GPU"
    x = model.embed(batch).detach().requires_grad_()
    inputs: tuple[Tensor, ...] = (x,)
    if model.core.takes_sequence:
        history, lengths = model.embed_sequences(batch)
        inputs = (x, history.detach().requires_grad_(), lengths)
    try:
        torch.cuda.make_graphed_callables(model.core, inputs, allow_unused_input=True)
    except Exception as error:  # a run without graphs is the same run, only slower; the result says which it was
        torch.cuda.synchronize()
        return f"eager: {type(error).__name__}: {str(error).splitlines()[0]}"
    return "CUDA graphs"


def train(
    model: Any, tables: dict[str, Table], recipe: Recipe, config: TrainConfig, *, every: int, deadline: float
) -> dict[str, Any]:
    """The best state by validation log loss; stops after `patience` evaluations without a better one, or at the deadline."""
    optimizers, step, bad, how = Optimizers(model, config), 0, 0, ""
    best: dict[str, Any] = {"valid_loss": math.inf}
    table = tables["train"]
    while step < config.steps and bad < recipe.patience:
        order = torch.randperm(len(table), device=table.labels.device)
        for batch in table.batches(order[: len(table) // recipe.batch * recipe.batch], recipe.batch):
            model.train()
            if not how:
                how = capture_core(model, batch)
                optimizers.zero_grad()
            optimizers.set_factor(learning_rate_factor(config, step))
            F.binary_cross_entropy_with_logits(model(batch), batch.labels).backward()
            optimizers.step()
            optimizers.zero_grad()
            step += 1
            late = time.time() > deadline
            if step % every == 0 or step == config.steps or late:
                auc, loss = score(model, tables["valid"])
                bad = 0 if loss < best["valid_loss"] else bad + 1
                if not bad:
                    state = {name: t.clone() for name, t in model.state_dict().items()}
                    best = {"valid_loss": loss, "valid_auc": auc, "best_step": step, "state": state}
            if step == config.steps or bad >= recipe.patience or late:
                return {**best, "steps": step, "forward": how, "cut_short": late}
    raise ValueError(f"a batch of {recipe.batch} is larger than the {len(table)} training examples")


@torch.no_grad()
def score(model: Any, table: Table) -> tuple[float, float]:
    """AUC and log loss of the first label."""
    model.eval()
    order = torch.arange(len(table), device=table.labels.device)
    logits = torch.cat([model(batch)[:, 0] for batch in table.batches(order, 16384)])
    labels = table.labels[:, 0]
    metric = AUC()
    metric.update(logits, labels)
    return metric.compute(), float(F.binary_cross_entropy_with_logits(logits, labels))
