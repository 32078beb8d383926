"""Sequence models in the training loop: the loss of a batch, and HR@10 and NDCG@10 over all items, leave-last-out.

    task = NextItemTask(data, length=50)                 HSTU: every position of a history predicts the next item
    task = NextIdTask(data, index, length=50)            OneRec: every item of a history is predicted from its prefix
    valid = lambda model: task.evaluate(model, "valid", device=device)
    trainer = Trainer(model, task, config, loss_fn=task.loss, evaluate_fn=valid)

A task is the trainer's data (its `valid` is None, since nothing is evaluated by loss) and knows how to call its model.
Nothing is removed from the ranking, not even what the user has seen. OneRec is ranked by beam search over valid ids: a
target that is not among the beams is a miss. It learns the probabilities of valid ids only (see `semantic_id_loss`),
and is searched the same way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor, nn

from loka.data.batch import Jagged
from loka.data.sequences import SequenceData
from loka.nn.wrapping import in_eval
from loka.training.config import PrecisionName
from loka.training.precision import autocast, precision_scope
from loka.training.sequence_examples import (
    SequenceExampleBatch,
    SequenceExamples,
    cut_histories,
    cut_prefixes,
    cut_targets,
)

if TYPE_CHECKING:
    from loka.metrics import TopK
    from loka.semantic_ids import SemanticIndex

Part = Literal["valid", "test"]


class SequenceTask:
    """Base of both tasks: data for the trainer, and evaluation."""

    def __init__(self, data: SequenceData, train: SequenceExamples, length: int) -> None:
        if length < 1:
            raise ValueError(f"length={length}: a history needs room for at least one item")
        self.train, self.valid = train, None
        self.n_items = data.n_items
        self._parts = {"valid": cut_targets(data.valid, length), "test": cut_targets(data.test, length)}

    def loss(self, model: nn.Module, batch: SequenceExampleBatch) -> tuple[Tensor, None]:
        """Return the loss of a batch, and no predictions: there are no labels to compare them with."""
        raise NotImplementedError(f"{type(self).__name__} does not define a loss")

    def weight(self, batch: SequenceExampleBatch) -> int:
        """Return the number of predictions that the loss of a batch is the mean of."""
        return batch.size

    def rank(self, model: nn.Module, batch: SequenceExampleBatch, metric: TopK) -> None:
        """Add a batch of held-out targets to a metric."""
        raise NotImplementedError(f"{type(self).__name__} does not rank")

    @torch.no_grad()
    def evaluate(
        self,
        model: nn.Module,
        part: Part,
        *,
        batch_size: int = 256,
        device: torch.device,
        precision: PrecisionName = "fp32",
        limit: int | None = None,
    ) -> dict[str, float]:
        """Return HR@10, NDCG@10 and MRR over all users of a part, or over the first `limit`."""
        from loka.metrics import TopK

        examples = self._parts[part]
        metric = TopK((10,))
        with in_eval(model), precision_scope(precision, device):
            for begin in range(0, len(examples) if limit is None else min(limit, len(examples)), batch_size):
                end = min(begin + batch_size, len(examples) if limit is None else limit)
                batch = examples.cut(np.arange(begin, end)).to(device)
                with autocast(precision, device):
                    self.rank(model, batch, metric)
        found = metric.compute()
        return {"hr@10": found.hit_rate[10], "ndcg@10": found.ndcg[10], "mrr": found.mrr}


class NextItemTask(SequenceTask):
    """HSTU: whole histories, with a softmax over all items at every position. Uses the time of a request if known.

    Args:
        data: the data set.
        length: most recent items of a history to keep.

    Example:
        >>> NextItemTask(data, length=50).evaluate(model, "test", device=torch.device("cpu"))["hr@10"]
    """

    def __init__(self, data: SequenceData, *, length: int) -> None:
        super().__init__(data, cut_histories(data.train, length), length)

    def loss(self, model: nn.Module, batch: SequenceExampleBatch) -> tuple[Tensor, None]:
        """Return the mean cross-entropy of the next item over all positions."""
        from loka.models.hstu import next_item_loss

        return next_item_loss(model(batch.history, batch.times), batch.history), None

    def weight(self, batch: SequenceExampleBatch) -> int:
        """Count positions that have a next item."""
        return int((batch.history.offsets.diff() - 1).clamp(min=0).sum())

    def rank(self, model: nn.Module, batch: SequenceExampleBatch, metric: TopK) -> None:
        """Score all items after the last position."""
        from loka.models.hstu import next_times

        asked = None
        if batch.times is not None and batch.asked is not None:
            last = batch.history.offsets[1:] - 1
            asked = next_times(batch.times, batch.history.offsets).index_put((last,), batch.asked)
        scores = model(batch.history, batch.times, asked, last=True)
        scores[:, 0] = -math.inf
        metric.update_scores(scores, batch.target)


class NextIdTask(SequenceTask):
    """OneRec: all prefixes, each with the semantic id of the item that followed.

    Args:
        data: the data set.
        index: semantic ids of items, numbered from 1 as in the data; no two may be equal.
        length: most recent items of a history to keep.
        beams: width of the beam search.

    Example:
        >>> NextIdTask(data, index, length=50, beams=50)
    """

    def __init__(self, data: SequenceData, index: SemanticIndex, *, length: int, beams: int = 50) -> None:
        super().__init__(data, cut_prefixes(data.train, length), length)
        if beams < 10:
            raise ValueError(f"beams={beams}: HR@10 needs at least ten")
        self.index, self.beams = index, beams
        numbers = torch.arange(1, data.n_items + 1)
        self._table = torch.cat([torch.zeros(1, index.levels, dtype=torch.int64), index.codes_of(numbers)])
        self._trie = index.trie

    def loss(self, model: nn.Module, batch: SequenceExampleBatch) -> tuple[Tensor, None]:
        """Return the mean cross-entropy over the codes of the id, among valid ids."""
        from loka.models.onerec import semantic_id_loss

        self._move_to_device_of(batch.target)
        codes = self._table[batch.target]
        return semantic_id_loss(model(self._to_ids(model, batch), codes), codes, self._trie.follow(codes)), None

    def rank(self, model: nn.Module, batch: SequenceExampleBatch, metric: TopK) -> None:
        """Rank the items of the beams, best first."""
        from loka.models.beam import search

        self._move_to_device_of(batch.target)
        context = model.encode(self._to_ids(model, batch))  # type: ignore[operator]
        found = search(model, context, beams=self.beams, valid=self._trie, normalize="valid")  # type: ignore[arg-type]
        assert found.items is not None  # valid ids were given
        metric.update(found.items, batch.target[:, None])

    def _to_ids(self, model: nn.Module, batch: SequenceExampleBatch) -> Jagged:
        """Return the history as ids, with item numbers if the model has a table of items."""
        values = batch.history.values
        codes = self._table[values]
        if getattr(model, "items", None) is not None:
            codes = torch.cat([codes, values[:, None]], 1)
        return Jagged(codes, batch.history.offsets)

    def _move_to_device_of(self, target: Tensor) -> None:
        """Move codes and trie to the device of the batches."""
        if self._table.device != target.device:
            self._table, self._trie = self._table.to(target.device), self._trie.to(target.device)


def embed_items(data: SequenceData, *, dimensions: int = 64, seed: int = 0) -> Tensor:
    """Embed all items for semantic ids: unit vectors from training histories, concatenated with those of text if any.

    Args:
        data: the data set.
        dimensions: width of each part.
        seed: random seed.

    Returns:
        Vectors [n_items, d].

    Example:
        >>> vectors = embed_items(data, dimensions=64)
    """
    from loka.semantic_ids import embed_histories, embed_text

    histories = cut_histories(data.train, 10**9)
    every = histories.cut(np.arange(len(histories))).history
    width = min(dimensions, data.n_items - 1)
    parts = [embed_histories(every.values, every.offsets, data.n_items, dimensions=width, seed=seed)]
    words = data.texts or data.titles
    if words is not None:
        parts.append(embed_text(list(words[1:]), dimensions=width, blank="zero", seed=seed))
    return torch.cat(parts, 1)
