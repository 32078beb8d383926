"""Take and restore everything that a run needs to continue as if it had never stopped.

Besides weights and optimizer state that is: the position in the data, the counters, the random generators of torch (CPU
and every GPU), Python and NumPy, the best evaluation so far, and the state of callbacks. On a CPU with a fixed number
of threads, a run that is killed and resumed ends bitwise equal to one that is not.

With several processes, rank 0's snapshot serves all: weights, optimizer state and data position are the same on every
rank. The other ranks reseed their generators from (seed, rank, step), so their dropout masks differ.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from loka.nn.tables import Table
from loka.training.callbacks import CallbackState
from loka.training.checkpoint import DamagedCheckpointError, Snapshot, read_checkpoint
from loka.training.config import TrainConfig

if TYPE_CHECKING:
    from loka.training.trainer import Trainer

COUNTERS = ("step", "examples", "batches", "bad_batches", "train_seconds")


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and Python.

    Args:
        seed: any 64-bit integer.

    Example:
        >>> seed_everything(0)
    """
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """Return the settings of a run and how far it has come, as JSON values."""
    return {
        "config": trainer.config.to_json(),
        "counters": {name: getattr(trainer, name) for name in COUNTERS},
        "monitor": trainer.monitor.state_dict(),
        "metrics": trainer.metrics,
        "stream": trainer.stream.state_dict(),
    }


def restore_run(trainer: Trainer, state: dict[str, Any]) -> None:
    """Continue where the run that `describe_run` described was."""
    trainer.stream.load_state_dict(state["stream"])
    for name, value in state["counters"].items():
        setattr(trainer, name, value)
    trainer.metrics = state["metrics"]
    trainer.monitor.load_state_dict(state["monitor"])


def take_snapshot(trainer: Trainer) -> Snapshot:
    """Copy the state of a run to CPU memory; the run may continue while the copy is written."""
    extra, values = dict(_read_generators()), {}
    for callback in trainer.callbacks:
        if (kept := callback.on_checkpoint(trainer)) is not None:
            extra.update({f"callback/{callback.name}/{key}": tensor for key, tensor in kept.tensors.items()})
            values[callback.name] = kept.values
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {
        **describe_run(trainer),
        "python_random": random.getstate(),
        "numpy_random": [name, np.asarray(keys).tolist(), *rest],
        "callbacks": values,
    }
    tensors = {
        "model": _copy(trainer.module.state_dict()),
        "optimizer": _copy(trainer.optimizers.state_tensors()),
        "extra": _copy(extra),
    }
    return Snapshot(trainer.step, tensors, state)


def restore_snapshot(trainer: Trainer, snapshot: Snapshot) -> None:
    """Put a run into the state of a snapshot. Raises for settings that would make it a different run."""
    state, extra = snapshot.state, snapshot.tensors["extra"]
    if changes := trainer.config.changes_since(TrainConfig.from_json(state["config"])):
        raise ValueError(
            f"cannot resume with other settings ({'; '.join(changes)}); resume with the stored ones, "
            "or start a new run from these weights"
        )
    _load_model(trainer.module, snapshot.tensors["model"], f"step {snapshot.step}")
    trainer.optimizers.load_state_tensors(snapshot.tensors["optimizer"])
    restore_run(trainer, state)
    for callback in trainer.callbacks:
        if callback.name in state["callbacks"]:
            prefix = f"callback/{callback.name}/"
            kept = {key.removeprefix(prefix): tensor for key, tensor in extra.items() if key.startswith(prefix)}
            callback.on_resume(trainer, CallbackState(kept, state["callbacks"][callback.name]))
    if trainer.ranks.rank == 0:
        _restore_generators(extra, state)
    else:
        seed_everything(hash((trainer.config.seed, trainer.ranks.rank, trainer.step)) % 2**63)


def restore_newest(trainer: Trainer, found: list[Path], *, fallback: bool) -> tuple[int, tuple[str, ...]]:
    """Restore the newest checkpoint, or with `fallback` the newest undamaged one. Return its step and those skipped."""
    damaged: list[str] = []
    for path in reversed(found):
        try:
            snapshot = read_checkpoint(path)
        except DamagedCheckpointError as error:
            if not fallback:
                raise DamagedCheckpointError(f"{error}; allow the fallback to use an older checkpoint") from error
            damaged.append(str(error))
            continue
        restore_snapshot(trainer, snapshot)
        return snapshot.step, tuple(damaged)
    raise DamagedCheckpointError(f"no checkpoint can be read: {'; '.join(damaged)}")


def find_nonfinite(model: nn.Module) -> list[str]:
    """Return the names of parameters with NaN or infinite values, in one pass without a buffer of a table's size.

    Of a sharded model, this rank's shards are looked at.
    """
    local = [(name, p.to_local() if hasattr(p, "to_local") else p) for name, p in model.named_parameters()]
    tables = [(name, module) for name, module in model.named_modules() if isinstance(module, Table)]
    local += [(f"{name}.weight", part) for name, table in tables for part in table.witnesses()]
    named = [(name, tensor) for name, tensor in local if tensor.numel()]
    if not named:
        return []
    with torch.no_grad():
        extremes = torch.stack([torch.stack(torch.aminmax(parameter)).double() for _, parameter in named])
        good = torch.isfinite(extremes).all(dim=1).tolist()
    return list(dict.fromkeys(name for (name, _), ok in zip(named, good, strict=True) if not ok))


def load_weights(model: nn.Module, path: Path) -> int:
    """Load only the weights of a checkpoint into a model.

    Args:
        model: changed in place.
        path: the checkpoint's folder.

    Returns:
        The checkpoint's step.

    Example:
        >>> load_weights(model, find_checkpoints(Path("runs/x/checkpoints"))[-1])
    """
    snapshot = read_checkpoint(path, groups=("model",))
    _load_model(model, snapshot.tensors["model"], str(path))
    return snapshot.step


def _load_model(model: nn.Module, tensors: dict[str, Tensor], source: str) -> None:
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"the weights of {source} do not fit this model: {error}") from error


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _read_generators() -> dict[str, Tensor]:
    states = {"random/cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.update({f"random/cuda/{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())})
    return states


def _restore_generators(extra: dict[str, Tensor], state: dict[str, Any]) -> None:
    torch.set_rng_state(extra["random/cpu"])
    for key, value in extra.items():
        if key.startswith("random/cuda/"):
            index = int(key.rpartition("/")[2])
            if torch.cuda.is_available() and index < torch.cuda.device_count():
                torch.cuda.set_rng_state(value, index)
    version, internal, gauss = state["python_random"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy_random"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
