"""The model and the data a verb works on: built in, or a user's own.

    --model wukong:small            a family and one of its sizes (`tiny` where none is named)
    --model pkg.module:factory      a callable that returns an nn.Module
    --data complete-journey         a data set of the catalog; the default, which needs no network
    --data pkg.module:batches       a callable that yields (inputs, targets)
    --loss pkg.module:fn            fn(output, targets) -> one loss per example, or their mean; default: binary cross-entropy of logits

A user's callable is given what it asks for by name, and nothing else: `batches` may take split ("train", "valid", "test"), batch_size,
seed; `factory` may take schema, when the data is built in, and seed. Inputs that are a Tensor become one argument of the model, a tuple
*args, a dict **kwargs. Batches that do not depend on the split are not held out from anything; `held_out` says so.

A sequence model (hstu) reads the sequences of a data set, trains on every position's next item, and is scored on the held-out items.

Every verb that needs a model opens it here, so that they all understand the same words. Modules are found from the working folder
first, as `python -m` would. stdout is data: what a user's own code prints goes to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Subject", "find_device", "find_object", "load_subject"]

DEFAULT_DATA = "complete-journey"
SPLITS = ("train", "valid", "test")
SEQUENCE_FAMILIES = ("hstu",)
NEEDS_CODES = ("onerec",)

Values = Callable[[nn.Module, Any], Tensor]


class Job(Protocol):
    """How batches of one kind of data are opened and run through a model."""

    data: str
    held_out: bool
    metrics: Mapping[str, Values]  # per example, on held-out batches; the first is the default

    def open(self, split: str, epoch: int) -> Iterator[Any]:
        """One pass over a split."""
        ...

    def lose(self, model: nn.Module, batch: Any) -> Tensor:
        """The training loss, a scalar."""
        ...

    def group(self, batch: Any) -> Tensor | None:
        """The unit of independence of every example (user, household); None where unknown."""
        ...


@dataclass
class Subject:
    """A model with its data. `model` may be replaced (by a rewritten one): losses are computed with whatever is there."""

    name: str
    model: nn.Module
    job: Job
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def data(self) -> str:
        """Name of the data."""
        return self.job.data

    @property
    def held_out(self) -> bool:
        """Whether "valid" and "test" are other examples than "train"."""
        return self.job.held_out

    @property
    def metrics(self) -> tuple[str, ...]:
        """What `values` can measure; the first is the default."""
        return tuple(self.job.metrics)

    def batches(self, split: str = "train", *, epoch: int = 0) -> Iterator[Any]:
        """One pass over a split; training batches in the order of (seed, epoch)."""
        if split not in SPLITS:
            raise ValueError(f"no split {split!r}; splits are {', '.join(SPLITS)}")
        for batch in self.job.open(split, epoch):
            yield move(batch, self.device)

    def stream(self, split: str = "train", *, skip: int = 0) -> Iterator[Any]:
        """Batches without end, pass after pass, without the first `skip`; a pass without a batch is an error."""
        epoch = 0
        while True:
            count = 0
            for batch in self.job.open(split, epoch):
                count += 1
                if skip > 0:
                    skip -= 1
                else:
                    yield move(batch, self.device)
            if count == 0:
                raise ValueError(f"{self.data}: no batch in pass {epoch} over {split!r}; is an iterator used up?")
            epoch += 1

    def loss(self, batch: Any) -> Tensor:
        """Run the model and the loss: a scalar to call backward on."""
        with redirect_stdout(sys.stderr):
            return self.job.lose(self.model, batch)

    def values(self, batch: Any, metric: str | None = None) -> Tensor:
        """A metric for every example of a batch, [B] (or [1] where a user's loss is a mean already)."""
        if metric is not None and metric not in self.job.metrics:
            raise ValueError(f"{self.name} has no metric {metric!r}; it has {', '.join(self.metrics)}")
        with redirect_stdout(sys.stderr):
            found = self.job.metrics[metric or self.metrics[0]](self.model, batch)
        return found.reshape(-1)

    def group(self, batch: Any) -> Tensor | None:
        """The unit of independence of every example; None where unknown."""
        return self.job.group(batch)


def load_subject(
    model: str,
    data: str | None = None,
    *,
    batch_size: int = 1024,
    seed: int = 0,
    loss: str | None = None,
    device: str = "cpu",
    root: str | Path | None = None,
    source: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    data_options: Mapping[str, Any] | None = None,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> Subject:
    """Open a model and its data by name, seeded."""
    if batch_size < 1 or seed < 0:
        raise ValueError(f"batch_size={batch_size}, seed={seed}: expected at least 1, and not negative")
    family, size = _split_name(model)
    place = find_device(device)
    options = dict(model_options or {})
    opening: dict[str, Any] = {"root": root, "source": source, **dict(data_options or {})}
    if progress is not None:
        opening["progress"] = progress
    torch.manual_seed(seed)
    if data is not None and ":" in data:
        if data_options or source is not None:
            raise ValueError(f"--data {data} is a callable: it takes no data options and no source")
        if family is not None:
            raise ValueError(f"{model} needs the schema of a built-in data set; --data {data} names your own batches")
        job: Job = OwnJob(data, find_object(data), _find_loss(loss), batch_size, seed)
        network = build_own(model, options, seed=seed)
    elif family in SEQUENCE_FAMILIES:
        if loss is not None:
            raise ValueError(f"--loss does not apply to {family}: it predicts the next item")
        job, network = _open_sequences(family, size, data or DEFAULT_DATA, batch_size, seed, opening, options)
    else:
        job, network = _open_ranking(
            model, family, size, data or DEFAULT_DATA, batch_size, seed, opening, options, loss
        )
    return Subject(model, network.to(place), job, place)


def find_device(name: str) -> torch.device:
    """A device that is there."""
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}; expected cpu, cuda or cuda:1") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count() or "no"
        raise ValueError(
            f"--device {name}: torch sees {seen} CUDA GPU on this machine; `loka doctor` says what it sees"
        )
    return found


def _split_name(model: str) -> tuple[str | None, str]:
    """(family, size) of a built-in model; (None, ...) of a user's own."""
    from loka.models import names

    family, _, size = model.partition(":")
    if family in names():
        return family, size or "tiny"
    if ":" not in model:
        raise ValueError(
            f"no model {model!r}: the built-in families are {', '.join(names())} (with a size: wukong:small); "
            "your own is named pkg.module:factory"
        )
    return None, ""


def find_object(path: str) -> Any:
    """What `pkg.module:name` names; the working folder is searched first."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"expected pkg.module:name, got {path!r}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):
            module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{path}: cannot import {error.name!r} (the working folder is searched too)") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{path}: {module_name} has no {name!r}")
        found = getattr(found, part)
    return found


def call_with(function: Callable[..., Any], path: str, **offers: Any) -> Any:
    """Call a user's function with those of the offers that it has parameters for."""
    if not callable(function):
        raise ValueError(f"{path}: expected a callable, got {type(function).__name__}")
    parameters = signature(function).parameters.values()
    named = {p.name for p in parameters if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)}
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters):
        named |= offers.keys()
    missing = [p.name for p in parameters if p.name in named and p.default is Parameter.empty and p.name not in offers]
    if missing:
        raise ValueError(f"{path}: needs {', '.join(missing)}; loka can give {', '.join(offers) or 'nothing'}")
    with redirect_stdout(sys.stderr):
        return function(**{name: value for name, value in offers.items() if name in named})


def _find_loss(path: str | None) -> Callable[[Any, Any], Tensor]:
    if path is None:
        return lambda output, targets: F.binary_cross_entropy_with_logits(
            output.float(), targets.to(output).float().reshape(output.shape), reduction="none"
        )
    found = find_object(path)
    if not callable(found):
        raise ValueError(f"{path}: expected fn(output, targets), got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def build_own(model: str, options: dict[str, Any], **offers: Any) -> nn.Module:
    """A user's model from its factory."""
    if options:
        raise ValueError(f"{model} is your own: model options {sorted(options)} belong in the factory")
    network = call_with(find_object(model), model, **offers)
    if not isinstance(network, nn.Module):
        raise ValueError(f"{model}: expected an nn.Module, got {type(network).__name__}")
    return network


def _open_ranking(
    model: str,
    family: str | None,
    size: str,
    data: str,
    batch_size: int,
    seed: int,
    opening: dict[str, Any],
    options: dict[str, Any],
    loss: str | None,
) -> tuple[Job, nn.Module]:
    from loka.data import load
    from loka.models import build_ranker

    if family in NEEDS_CODES:
        raise ValueError(f"{family} reads semantic ids, which no data set carries by itself; give pkg.module:factory")
    opened = load(data, **opening)
    if family is None:
        network = build_own(model, options, seed=seed, schema=opened.schema)
    else:
        network = build_ranker(opened.schema, family, size, **options)
    own = model if family is None else None
    return RankingJob(data, opened, _find_loss(loss), batch_size, seed, own), network


def _open_sequences(
    family: str, size: str, data: str, batch_size: int, seed: int, opening: dict[str, Any], options: dict[str, Any]
) -> tuple[Job, nn.Module]:
    from loka.data import load_sequences
    from loka.models import build

    opened = load_sequences(data, **opening)
    network = build(family, size, items=opened.n_items + 1, **options)
    length: int = network.config.max_length  # type: ignore[union-attr, assignment]
    return SequenceJob(data, opened, length, batch_size, seed), network


def move(value: Any, device: torch.device) -> Any:
    """A batch on a device; tuples, lists and dicts of tensors too."""
    if isinstance(value, tuple | list):
        return type(value)(move(part, device) for part in value)
    if isinstance(value, dict):
        return {name: move(part, device) for name, part in value.items()}
    return value.to(device) if hasattr(value, "to") else value


def per_example(losses: Tensor, count: int) -> Tensor:
    """One number per example: the mean over everything else; a scalar stays one number."""
    if losses.dim() == 0 or losses.shape[0] != count:
        return losses.reshape(1) if losses.numel() == 1 else losses.reshape(-1)
    return losses.reshape(count, -1).mean(1)


class RankingJob:
    """A built-in ranking data set: the model is called with the whole Batch and returns logits."""

    held_out = True

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
        self._own = own  # name of a user's model, which may not take a Batch
        self.metrics: Mapping[str, Values] = {"log loss": self._losses}

    def open(self, split: str, epoch: int) -> Iterator[Any]:
        """One pass; only training is shuffled."""
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
                "hint: --data pkg.module:batches gives your model what it takes"
            ) from error
        return per_example(self._loss(output, batch.labels), batch.size)

    def lose(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean over the examples."""
        return self._losses(model, batch).mean()

    def group(self, batch: Any) -> Tensor | None:
        """The user of every example."""
        found: Tensor = batch.group
        return found


class SequenceJob:
    """A built-in sequence data set: next-item training, scored on held-out items of every user."""

    held_out = True

    def __init__(self, data: str, opened: Any, length: int, batch_size: int, seed: int) -> None:
        self.data, self.opened = data, opened
        self._length, self._batch_size, self._seed = length, batch_size, seed
        self.metrics: Mapping[str, Values] = {"loss": self._losses, "recall@10": self._recall}

    def open(self, split: str, epoch: int) -> Iterator[Any]:
        """One pass over the users."""
        part, training = getattr(self.opened, split), split == "train"
        yield from part.batches(
            self._batch_size, shuffle=training, seed=self._seed, max_length=self._length, epoch=epoch
        )

    def lose(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean cross-entropy of every position's next item."""
        from loka.models.hstu import next_item_loss

        loss: Tensor = next_item_loss(self._scores(model, batch, last=False), batch.history)
        return loss

    def _scores(self, model: nn.Module, batch: Any, *, last: bool) -> Tensor:
        times = None if batch.times is None else batch.times.values
        scores: Tensor = model(batch.history, times, last=last)
        return scores

    def _targets(self, batch: Any) -> tuple[Tensor, Tensor]:
        """(user, item) of every held-out item."""
        lengths = batch.targets.lengths
        if not bool((lengths > 0).any()):
            raise ValueError("these batches hold no item out: score valid or test, not train")
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths), batch.targets.values

    def _mean_by_user(self, values: Tensor, batch: Any, user: Tensor) -> Tensor:
        lengths = batch.targets.lengths
        sums = torch.zeros(len(lengths), device=values.device, dtype=values.dtype).index_add_(0, user, values)
        found: Tensor = sums / lengths.clamp(min=1)
        return found

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy of a user's held-out items, their mean; a user without one counts 0 on both sides of a pair."""
        user, item = self._targets(batch)
        scores = torch.log_softmax(self._scores(model, batch, last=True)[:, 1:], dim=1)
        return self._mean_by_user(-scores[user, item - 1], batch, user)

    def _recall(self, model: nn.Module, batch: Any) -> Tensor:
        """The share of a user's held-out items among the ten best."""
        user, item = self._targets(batch)
        best = self._scores(model, batch, last=True)[:, 1:].topk(10, dim=1).indices + 1
        return self._mean_by_user((best[user] == item[:, None]).any(1).float(), batch, user)

    def group(self, batch: Any) -> Tensor | None:
        """One example per user: every one is independent."""
        return None


def _quietly(batches: Iterable[Any]) -> Iterator[Any]:
    """The same batches; what is printed while one is made goes to stderr."""
    making = iter(batches)
    while True:
        with redirect_stdout(sys.stderr):
            try:
                batch = next(making)
            except StopIteration:
                return
        yield batch


class OwnJob:
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

    def open(self, split: str, epoch: int) -> Iterator[Any]:
        """One pass; the seed moves with the epoch, for a callable that takes one."""
        offers = {"split": split, "batch_size": self._batch_size, "seed": self._seed + epoch}
        for batch in _quietly(call_with(self._function, self.data, **offers)):
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise ValueError(f"{self.data}: expected (inputs, targets), got {type(batch).__name__}")
            yield batch

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        if isinstance(inputs, dict):
            output = model(**inputs)
        else:
            output = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
        losses = self._loss(output, targets)
        return per_example(losses, targets.shape[0] if isinstance(targets, Tensor) and targets.dim() else 1)

    def lose(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean over the examples."""
        return self._losses(model, batch).mean()

    def group(self, batch: Any) -> Tensor | None:
        """Unknown."""
        return None
