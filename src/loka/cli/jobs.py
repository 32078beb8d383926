"""Jobs open the batches of one kind of data, run them through a model, and score them.

There is one for built-in ranking data sets, one for built-in sequence data sets, and one for a user's own batches.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from loka.cli.own_code import blame, call_with, quietly

Values = Callable[[nn.Module, Any], Tensor]


class Job(ABC):
    """Opens the batches of one kind of data and runs them through a model."""

    data: str
    held_out = True  # whether "valid" and "test" hold other examples than "train"
    metrics: Mapping[str, Values]  # one value per example, on held-out batches; the first is the default

    @abstractmethod
    def open(self, split: str, epoch: int) -> Iterator[Any]:
        """Yield the batches of one pass over a split."""

    @abstractmethod
    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return one loss per example of a batch."""

    def lose(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the training loss, a scalar: by default the mean over the examples."""
        return self._losses(model, batch).mean()

    def group(self, batch: Any) -> Tensor | None:
        """Return the independent unit (user, household) of every example, or None if unknown."""
        return None


def per_example(losses: Tensor, count: int) -> Tensor:
    """Reduce losses to one number per example by averaging all other dimensions; a scalar stays one number."""
    if losses.dim() == 0 or losses.shape[0] != count:
        return losses.reshape(1) if losses.numel() == 1 else losses.reshape(-1)
    return losses.reshape(count, -1).mean(1)


class RankingJob(Job):
    """A built-in ranking data set. The model is called with a whole Batch and returns logits."""

    def __init__(
        self,
        data: str,
        opened: Any,
        loss: Callable[[Any, Any], Tensor],
        batch_size: int,
        seed: int,
        own: str | None = None,
    ) -> None:
        self.data, self.opened, self._loss = data, opened, loss
        self._batch_size, self._seed = batch_size, seed
        self._own = own  # name of a user's model, which may not accept a Batch
        self.metrics: Mapping[str, Values] = {"log loss": self._losses}

    def open(self, split: str, epoch: int) -> Iterator[Any]:
        """Yield the batches of one pass; only training batches are shuffled."""
        training = split == "train"
        part = getattr(self.opened, split)
        yield from part.batches(self._batch_size, shuffle=training, seed=self._seed, drop_last=training, epoch=epoch)

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        try:
            output = model(batch)
        except (TypeError, AttributeError) as error:
            if self._own is None:
                raise
            raise ValueError(
                f"{self._own} was called with a Batch of {self.data} and cannot take it ({error}); "
                "hint: --data pkg.module:batches passes your model its own inputs"
            ) from error
        return per_example(self._loss(output, batch.labels), batch.size)

    def group(self, batch: Any) -> Tensor | None:
        """Return the user of every example."""
        found: Tensor = batch.group
        return found


class SequenceJob(Job):
    """A built-in sequence data set: next-item training, scored on the held-out items of every user."""

    def __init__(self, data: str, opened: Any, length: int, batch_size: int, seed: int) -> None:
        self.data, self.opened = data, opened
        self._length, self._batch_size, self._seed = length, batch_size, seed
        self.metrics: Mapping[str, Values] = {"loss": self._losses, "recall@10": self._recall}

    def open(self, split: str, epoch: int) -> Iterator[Any]:
        """Yield the batches of one pass over the users."""
        part, training = getattr(self.opened, split), split == "train"
        yield from part.batches(
            self._batch_size, shuffle=training, seed=self._seed, max_length=self._length, epoch=epoch
        )

    def lose(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean cross-entropy of the next item over all positions."""
        from loka.models.hstu import next_item_loss

        loss: Tensor = next_item_loss(self._scores(model, batch, last=False), batch.history)
        return loss

    def _scores(self, model: nn.Module, batch: Any, *, last: bool) -> Tensor:
        times = None if batch.times is None else batch.times.values
        scores: Tensor = model(batch.history, times, last=last)
        return scores

    def _targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return user and item of every held-out item."""
        lengths = batch.targets.lengths
        if not bool((lengths > 0).any()):
            raise ValueError("these batches have no held-out items: score valid or test, not train")
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths), batch.targets.values

    def _mean_by_user(self, values: Tensor, batch: Any, user: Tensor) -> Tensor:
        lengths = batch.targets.lengths
        sums = torch.zeros(len(lengths), device=values.device, dtype=values.dtype).index_add_(0, user, values)
        found: Tensor = sums / lengths.clamp(min=1)
        return found

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean cross-entropy of each user's held-out items; 0 for a user without any."""
        user, item = self._targets(batch)
        scores = torch.log_softmax(self._scores(model, batch, last=True)[:, 1:], dim=1)
        return self._mean_by_user(-scores[user, item - 1], batch, user)

    def _recall(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the share of each user's held-out items that are among the ten best."""
        user, item = self._targets(batch)
        best = self._scores(model, batch, last=True)[:, 1:].topk(10, dim=1).indices + 1
        return self._mean_by_user((best[user] == item[:, None]).any(1).float(), batch, user)


def _call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with the inputs of a user's batch: a tensor, a tuple (*args) or a dict (**kwargs)."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


class OwnJob(Job):
    """A user's own batches: (inputs, targets)."""

    def __init__(
        self, path: str, function: Any, loss: Callable[[Any, Any], Tensor], batch_size: int, seed: int
    ) -> None:
        self.data, self._function, self._loss = path, function, loss
        self._batch_size, self._seed = batch_size, seed
        if not callable(function):
            raise ValueError(
                f"{path}: expected a callable that yields (inputs, targets), got {type(function).__name__}"
            )
        parameters = signature(function).parameters.values()
        self.held_out = any(p.name == "split" or p.kind is Parameter.VAR_KEYWORD for p in parameters)
        self.metrics: Mapping[str, Values] = {"loss": self._losses}
        self._fits = False  # whether a batch has been through the model

    def open(self, split: str, epoch: int) -> Iterator[Any]:
        """Yield the batches of one pass. A callable that takes a seed gets seed + epoch."""
        offers = {"split": split, "batch_size": self._batch_size, "seed": self._seed + epoch}
        for batch in quietly(call_with(self._function, self.data, **offers)):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise ValueError(f"{self.data}: expected (inputs, targets), got {type(batch).__name__}")
            yield batch

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        try:
            losses = self._loss(_call(model, inputs), targets)
        except (TypeError, RuntimeError) as error:
            # Only the first batch, before anything is converted. Later errors are not about the shape of the inputs.
            if self._fits or blame(error) is not None or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"a batch of {self.data} does not go through the model and the loss: {type(error).__name__}: {error}; "
                "hint: a tensor is passed as one argument of the model, a tuple as *args, a dict as **kwargs"
            ) from error
        self._fits = True
        return per_example(losses, targets.shape[0] if isinstance(targets, Tensor) and targets.dim() else 1)
