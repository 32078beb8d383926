"""A small OneRec for a data set's sequences, made on the spot: ids for its items, and a model that spells them.

Ids: residual k-means over what items are about (words, where there are any) and over which items stand near each other in training histories. Model: the small
size, trained on prefixes of training histories over the probabilities of valid ids, AdamW with a warm-up and a cosine. Enough to look at recommendations, not a statement about quality;
benchmarks/quality.py trains the models that are.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loka.data.batch import Jagged
from loka.data.sequences import SequenceData
from loka.inference import Bundle
from loka.models import build
from loka.models.onerec import OneRec, semantic_id_loss
from loka.ptq import quantize
from loka.records import BundleInfo, capture_environment
from loka.semantic_ids import ResidualKMeans, SemanticIndex, embed_histories, embed_text, fit_semantic_ids

DIMENSIONS = 48
CODES = 64  # per level


def make_index(data: SequenceData, *, seed: int = 0) -> SemanticIndex:
    """Distinct ids of four levels for every item: three of k-means, one to tell equal ones apart."""
    history = data.train.cut(np.arange(len(data.train)), 10**9).history
    near = embed_histories(history.values, history.offsets, data.n_items, dimensions=DIMENSIONS, seed=seed)
    if data.texts is not None:
        words = embed_text(
            [text or "unknown" for text in data.texts[1:]], dimensions=DIMENSIONS, blank="zero", seed=seed
        )
        near = torch.cat([near, words], 1)
    config = ResidualKMeans((CODES,) * 3, seed=seed)
    return fit_semantic_ids(near, config, collisions="level", items=torch.arange(1, data.n_items + 1))


def train_bundle(
    data: SequenceData,
    *,
    steps: int,
    seed: int = 0,
    batch: int = 128,
    rate: float = 2e-3,
    context: int = 50,
    options: dict[str, Any] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Bundle:
    """Ids, a model, `steps` of training."""
    if steps < 1:
        raise ValueError(f"{steps} steps: training needs at least one")
    index = make_index(data, seed=seed)
    torch.manual_seed(seed)
    chosen = {"codebooks": index.codebook_sizes, "context": context, "short": 10, "items": data.n_items + 1}
    chosen |= {"d": 64, "layers": 2, "d_ff": 192}
    model = build("onerec", "small", **(chosen | (options or {})))
    assert isinstance(model, OneRec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    model.train()
    loss = torch.tensor(0.0)
    for step, (history, goal) in enumerate(_prefixes(data, index, model.config.context, batch, seed)):
        if step == steps:
            break
        warm = min(1.0, (step + 1) / min(50, steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        loss = semantic_id_loss(model(history, goal), goal, index.trie.follow(goal))
        if not bool(loss.isfinite()):
            raise ValueError(f"the loss became {float(loss.detach())} at step {step}; hint: another seed")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        model.update_balance()
        if progress is not None:
            progress(step + 1, float(loss.detach()))
    model.eval()
    info = BundleInfo(
        data=data.name,
        settings=dict(data.info.get("options", {})),
        steps=steps,
        seed=seed,
        loss=float(loss.detach()),
        normalize="valid",
        environment=capture_environment(),
    )
    return Bundle(model, quantize(model, "none"), index, info)


def _prefixes(
    data: SequenceData, index: SemanticIndex, context: int, batch: int, seed: int
) -> Iterator[tuple[Jagged, Tensor]]:
    """Random positions of training histories: what came before, as codes, and the codes of what came."""
    start, length = (torch.from_numpy(part.copy()) for part in data.train.history)
    table = torch.zeros(data.n_items + 1, index.levels + 1, dtype=torch.int64)
    table[index.items] = torch.cat([index.codes, index.items[:, None]], 1)
    begin = torch.repeat_interleave(start, (length - 1).clamp(min=0))
    at = torch.arange(len(begin)) - torch.repeat_interleave(
        (length - 1).clamp(min=0).cumsum(0), (length - 1).clamp(min=0)
    )
    target = begin + at + torch.repeat_interleave((length - 1).clamp(min=0), (length - 1).clamp(min=0)) + 1
    if not len(target):
        raise ValueError(f"{data.name}: no training history has two items")
    g = torch.Generator().manual_seed(seed)
    values = data.items.values
    while True:
        pick = torch.randint(len(target), (batch,), generator=g)
        goal, first = target[pick], torch.maximum(begin[pick], target[pick] - context)
        lengths = goal - first
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        where = torch.arange(int(offsets[-1])) + torch.repeat_interleave(first - offsets[:-1], lengths)
        yield Jagged(table[values[where]], offsets), table[values[goal], :-1]
