"""Open the model and the data that a verb works on, built in or a user's own.

    --model wukong:small            a family and one of its sizes (`tiny` where none is named)
    --model pkg.module:factory      a callable that returns an nn.Module
    --data complete-journey         a data set of the catalog; the default, which needs no network
    --data pkg.module:batches       a callable that yields (inputs, targets)
    --loss pkg.module:fn            fn(output, targets) -> one loss per example, or their mean; default: BCE of logits

A user's callable receives only the arguments that it has parameters for: `batches` may take split ("train", "valid",
"test"), batch_size and seed; `factory` may take seed, and schema if the data is built in. Inputs that are a Tensor
become one argument of the model, a tuple *args, a dict **kwargs. If `batches` takes no split, there is no held-out
data, and `held_out` is False.

A sequence model (hstu) reads the sequences of a data set, trains to predict the next item at every position, and is
scored on the held-out items.

All verbs open models here, so that they accept the same names. `own_code` finds and calls a user's code, `jobs` runs
and scores batches.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from loka.cli.jobs import Job, OwnJob, RankingJob, SequenceJob
from loka.cli.own_code import build_own, find_loss, find_object

DEFAULT_DATA = "complete-journey"
SPLITS = ("train", "valid", "test")
SEQUENCE_FAMILIES = ("hstu",)
NEEDS_CODES = ("onerec",)


@dataclass
class Subject:
    """A model with its data. `model` may be replaced, e.g. by a rewritten one; losses use the current one."""

    name: str
    model: nn.Module
    job: Job
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def data(self) -> str:
        """The name of the data."""
        return self.job.data

    @property
    def held_out(self) -> bool:
        """Whether "valid" and "test" hold other examples than "train"."""
        return self.job.held_out

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that `values` can compute; the first is the default."""
        return tuple(self.job.metrics)

    def batches(self, split: str = "train", *, epoch: int = 0) -> Iterator[Any]:
        """Yield one pass over a split; the order of training batches depends on (seed, epoch)."""
        if split not in SPLITS:
            raise ValueError(f"no split {split!r}; splits are {', '.join(SPLITS)}")
        for batch in self.job.open(split, epoch):
            yield move(batch, self.device)

    def stream(self, split: str = "train", *, skip: int = 0) -> Iterator[Any]:
        """Yield batches endlessly, pass after pass, without the first `skip`. A pass without a batch is an error."""
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
        """Run the model and return the loss, a scalar to call backward on."""
        with redirect_stdout(sys.stderr):
            return self.job.lose(self.model, batch)

    def values(self, batch: Any, metric: str | None = None) -> Tensor:
        """Return a metric for every example of a batch, [B] (or [1] if a user's loss is already a mean)."""
        if metric is not None and metric not in self.job.metrics:
            raise ValueError(f"{self.name} has no metric {metric!r}; it has {', '.join(self.metrics)}")
        with redirect_stdout(sys.stderr):
            found = self.job.metrics[metric or self.metrics[0]](self.model, batch)
        return found.reshape(-1)

    def group(self, batch: Any) -> Tensor | None:
        """Return the independent unit (user, household) of every example, or None if unknown."""
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
    """Open a model and its data by name, seeded. The names are explained in this module's docstring."""
    from loka.data import load, load_sequences
    from loka.models import build, build_ranker

    if batch_size < 1 or seed < 0:
        raise ValueError(f"batch_size={batch_size}, seed={seed}: expected at least 1, and not negative")
    family, size = split_name(model)
    place = find_device(device)
    options = dict(model_options or {})
    opening: dict[str, Any] = {"root": root, "source": source, **dict(data_options or {})}
    if progress is not None:
        opening["progress"] = progress
    torch.manual_seed(seed)
    name = data or DEFAULT_DATA
    if data is not None and ":" in data:
        if data_options or source is not None:
            raise ValueError(f"--data {data} is a callable: it takes no data options and no source")
        if family is not None:
            raise ValueError(f"{model} needs the schema of a built-in data set; --data {data} names your own batches")
        job: Job = OwnJob(data, find_object(data), find_loss(loss), batch_size, seed)
        network = build_own(model, options, seed=seed)
    elif family in SEQUENCE_FAMILIES:
        if loss is not None:
            raise ValueError(f"--loss does not apply to {family}: it predicts the next item")
        sequences = load_sequences(name, **opening)
        network = build(family, size, items=sequences.n_items + 1, **options)
        job = SequenceJob(name, sequences, network.config.max_length, batch_size, seed)  # type: ignore[union-attr, arg-type]
    elif family in NEEDS_CODES:
        raise ValueError(f"{family} reads semantic ids, which data sets do not contain; give pkg.module:factory")
    else:
        opened = load(name, **opening)
        if family is None:
            network = build_own(model, options, seed=seed, schema=opened.schema)
        else:
            network = build_ranker(opened.schema, family, size, **options)
        own = model if family is None else None
        job = RankingJob(name, opened, find_loss(loss), batch_size, seed, own)
    return Subject(model, network.to(place), job, place)


def find_device(name: str) -> torch.device:
    """Return a device that exists; `auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}; expected cpu, cuda or cuda:1") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count() or "no"
        raise ValueError(
            f"--device {name}: torch sees {seen} CUDA GPU on this machine; `loka doctor` shows what is available"
        )
    return found


def split_name(model: str) -> tuple[str | None, str]:
    """Return (family, size) of a built-in model, (None, "") of a user's own. Anything else is an error."""
    from loka.models import names

    family, _, size = model.partition(":")
    if family in names():
        return family, size or "tiny"
    if ":" not in model:
        if "/" in model and not Path(model).exists():
            raise ValueError(f"there is no file or folder {model}")
        raise ValueError(
            f"no model {model!r}: the built-in families are {', '.join(names())} (with a size: wukong:small); "
            "name your own as pkg.module:factory"
        )
    return None, ""


def move(value: Any, device: torch.device) -> Any:
    """Move a batch to a device, including tuples, lists and dicts of tensors."""
    if isinstance(value, tuple | list):
        return type(value)(move(part, device) for part in value)
    if isinstance(value, dict):
        return {name: move(part, device) for name, part in value.items()}
    return value.to(device) if hasattr(value, "to") else value
