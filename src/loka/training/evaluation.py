"""Loss and metrics of a model on a split.

The same loss function as in training returns (loss, predictions). Predictions are logits with the shape of
`batch.labels`; each label column gets its own log loss, NE and AUC (`ne` with one label; with several `ne/<index>`, and
`ne` is their mean). If a loss function returns no predictions, only the loss is evaluated.

With several processes each evaluates its share of the split and the metrics are merged: exact, and the same on every
rank. A rank whose share ends first keeps calling the model without counting, since a model that is sharded over ranks
must run on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loka.nn.wrapping import in_eval

if TYPE_CHECKING:
    from loka.metrics import Metric
    from loka.training.stream import Split

LossFn = Callable[[nn.Module, Any], tuple[Tensor, Tensor | None]]


def ranking_loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the mean binary cross-entropy over examples and labels, in float32.

    Args:
        model: returns logits for a batch.
        batch: its input; has `labels`.

    Returns:
        The loss, and the logits.

    Example:
        >>> loss, logits = ranking_loss(model, batch)
    """
    logits = model(batch).float()
    return F.binary_cross_entropy_with_logits(logits, batch.labels), logits


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    batch_size: int,
    device: torch.device,
    loss_fn: LossFn = ranking_loss,
    compiled_size: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> dict[str, float]:
    """Compute metrics over a whole split. The model's train/eval mode is restored.

    Args:
        model: a ranker.
        split: the data, read in order.
        batch_size: examples at a time.
        device: device of the model.
        loss_fn: (model, batch) -> loss and logits.
        compiled_size: batch size that a compiled model was compiled for; others run eagerly.
        rank: rank of this process; each reads its share, and the sums are added.
        world: number of processes.

    Returns:
        Metric by name: the loss, and log_loss, ne and auc if there are labels.

    Example:
        >>> evaluate(model, data.test, batch_size=4096, device=torch.device("cpu"))["auc"]
    """
    batches = iter(split.batches(batch_size, shuffle=False, seed=0, drop_last=False, rank=rank, world=world, epoch=0))
    metrics: list[dict[str, Metric[float]]] = []
    total = torch.zeros(2, dtype=torch.float64, device=device)
    with in_eval(model):
        for batch, counts in _in_step(batches, split, batch_size, device, world):
            batch = batch.to(device)
            fits = compiled_size in (None, batch.size)
            with torch.no_grad(), nullcontext() if fits else torch.compiler.set_stance("force_eager"):
                loss, predictions = loss_fn(model, batch)
            if not counts:
                continue
            total += torch.stack([loss.double() * batch.size, loss.new_tensor(batch.size, dtype=torch.float64)])
            if predictions is not None:
                _update(metrics, predictions, batch.labels)
    return _summarise(total, metrics, world)


def _in_step(
    batches: Iterator[Any], split: Split, batch_size: int, device: torch.device, world: int
) -> Iterator[tuple[Any, bool]]:
    """Yield this rank's batches and whether each counts. A rank that has run out repeats its last, uncounted."""
    last: Any = None
    while True:
        batch = next(batches, None)
        if world > 1:
            votes = torch.tensor(int(batch is not None), device=device)
            torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX)
            if batch is None and votes.item():
                whole = split.batches(batch_size, shuffle=False, seed=0, drop_last=False, rank=0, world=1, epoch=0)
                last = next(iter(whole)) if last is None else last
                yield last, False
                continue
        if batch is None:
            return
        last = batch
        yield batch, True


def _make_metrics(columns: int) -> list[dict[str, Metric[float]]]:
    from loka.metrics import AUC, LogLoss, NormalizedEntropy

    # "count" does not wait for the device; _summarise raises if anything was counted.
    kinds = {"log_loss": LogLoss, "ne": NormalizedEntropy, "auc": AUC}
    return [{name: kind(nonfinite="count") for name, kind in kinds.items()} for _ in range(columns)]


def _update(metrics: list[dict[str, Metric[float]]], predictions: Tensor, labels: Tensor) -> None:
    if predictions.shape != labels.shape:
        raise ValueError(f"predictions {tuple(predictions.shape)} must have the shape of labels {tuple(labels.shape)}")
    if not metrics:
        metrics.extend(_make_metrics(math.prod(labels.shape[1:])))
    for index, column in enumerate(metrics):
        for metric in column.values():
            flat = (tensor.reshape(tensor.shape[0], -1)[:, index] for tensor in (predictions, labels))
            metric.update(*flat)  # type: ignore[attr-defined]


def _summarise(total: Tensor, metrics: list[dict[str, Metric[float]]], world: int) -> dict[str, float]:
    if world > 1:
        from loka.metrics import all_reduce

        torch.distributed.all_reduce(total)
        columns = torch.tensor(len(metrics), device=total.device)  # 0 on a rank without examples
        torch.distributed.all_reduce(columns, op=torch.distributed.ReduceOp.MAX)
        metrics = metrics or _make_metrics(int(columns))
        metrics = [{name: all_reduce(metric) for name, metric in column.items()} for column in metrics]
    loss, examples = total.tolist()
    if not examples:
        raise ValueError("the split to evaluate is empty")
    result = {"loss": loss / examples}
    values = [{name: metric.compute() for name, metric in column.items()} for column in metrics]
    if bad := sum(column["ne"].nonfinite_count for column in metrics):  # type: ignore[attr-defined]
        raise ValueError(f"{bad} predictions of the evaluation are NaN or infinite; find the layer that made them")
    for name in values[0] if values else ():
        result[name] = math.fsum(column[name] for column in values) / len(values)
        if len(values) > 1:
            result.update({f"{name}/{index}": column[name] for index, column in enumerate(values)})
    return result
