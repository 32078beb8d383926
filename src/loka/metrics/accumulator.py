"""The base class of metrics: a few tensors that can be updated, merged, saved and gathered.

A metric keeps its state in two kinds of tensors:

- *sums*, of a fixed shape, where merging is addition (log loss, histograms, calibration bins);
- *rows*, one entry per example, where merging is concatenation (the exact AUC and GAUC, which need every score).

Sums are float64 (or int64 for counts): a float32 sum of 1e8 losses is wrong in the fourth digit. State lives on the
device of the first update, so a metric on the GPU does not force a copy per step.

`all_reduce` gathers the state of every process and merges it in rank order. The result is therefore bit-identical to
calling `merge` in that order in one process, and identical on every rank; a floating-point all-reduce guarantees
neither. It returns a new metric and leaves the local one unchanged, so that calling it twice does not count anything
twice.

Sample weights are not supported. Bad input raises or is counted, and is never silently repaired; see
`loka.metrics.binary`.
"""

import copy
import json
from abc import ABC, abstractmethod
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")
_CONFIG = "config"


class Metric(ABC, Generic[Result]):
    """Base of all metrics: `update(...)` per batch, `merge(other)`, `compute()`, `state_dict()`, `load_state_dict()`.

    Args:
        config: options that two metrics must share to be merged.

    Example:
        >>> class Mean(Metric[float]): ...
    """

    def __init__(self, **config: object) -> None:
        self._config: dict[str, Any] = {"metric": type(self).__name__, **config}
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._row_dtypes: dict[str, torch.dtype] = {}
        self._device: torch.device | None = None

    @abstractmethod
    def compute(self) -> Result:
        """Return the value over all updates so far. Undefined values are NaN, never 0."""

    def merge(self, other: Self) -> None:
        """Add the updates of `other`, as if they had followed ours. Both must have the same configuration."""
        if self._config != other._config:
            raise ValueError(f"cannot merge {other._config} into {self._config}: configure both metrics alike")
        if self._device is None:
            self._move_to(other._device)
        for name, total in self._sums.items():
            self._sums[name] = total + other._sums[name].to(total.device)
        for name, chunks in self._rows.items():
            chunks.extend(chunk.to(self.device) for chunk in other._rows[name])

    def reset(self) -> None:
        """Reset the state. The configuration is kept."""
        for total in self._sums.values():
            total.zero_()
        for chunks in self._rows.values():
            chunks.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors. The configuration is included as UTF-8 bytes and checked on load."""
        state = {_CONFIG: torch.frombuffer(bytearray(self._signature().encode()), dtype=torch.uint8)}
        state.update({name: total.clone() for name, total in self._sums.items()})
        state.update({name: self._row(name).clone() for name in self._rows})
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state of the same configuration."""
        expected = {_CONFIG, *self._sums, *self._rows}
        if set(state) != expected:
            raise ValueError(
                f"state has the entries {sorted(state)}, expected {sorted(expected)}: not a {type(self).__name__}"
            )
        signature = bytes(state[_CONFIG].cpu().tolist()).decode()
        if signature != self._signature():
            raise ValueError(
                f"state was saved by {signature}, this metric is {self._signature()}: configure both alike"
            )
        for name, total in self._sums.items():
            if state[name].shape != total.shape:
                raise ValueError(f"state {name!r} has shape {tuple(state[name].shape)}, expected {tuple(total.shape)}")
        for name, total in self._sums.items():
            self._sums[name] = state[name].to(device=total.device, dtype=total.dtype, copy=True)
        for name in self._rows:
            self._rows[name] = [state[name].to(device=self.device, dtype=self._row_dtypes[name], copy=True)]

    @property
    def device(self) -> torch.device:
        """The device of the state: that of the first update, and the CPU before it."""
        return self._device or torch.device("cpu")

    def _add_sums(self, dtype: torch.dtype, *names: str, shape: tuple[int, ...] = ()) -> None:
        for name in names:
            self._sums[name] = torch.zeros(shape, dtype=dtype)

    def _add_rows(self, dtype: torch.dtype, *names: str) -> None:
        for name in names:
            self._rows[name] = []
            self._row_dtypes[name] = dtype

    def _row(self, name: str) -> Tensor:
        chunks = self._rows[name]
        if len(chunks) > 1:  # concatenated once, so that repeated compute() calls do not pay again
            chunks[:] = [torch.cat(chunks)]
        return chunks[0] if chunks else torch.empty(0, dtype=self._row_dtypes[name], device=self.device)

    def _append(self, **rows: Tensor) -> None:
        for name, values in rows.items():
            self._rows[name].append(values.detach().to(device=self.device, dtype=self._row_dtypes[name]))

    def _move_to(self, device: torch.device | None) -> None:
        if device is None:
            return
        self._device = device
        self._sums = {name: total.to(device) for name, total in self._sums.items()}
        self._rows = {name: [chunk.to(device) for chunk in chunks] for name, chunks in self._rows.items()}

    def _place(self, *tensors: Tensor) -> list[Tensor]:
        """Move a batch to the device of the state, or the state to the device of the first batch."""
        if self._device is None:
            self._move_to(tensors[0].device)
        return [tensor.detach().to(self.device) for tensor in tensors]

    def _signature(self) -> str:
        return json.dumps(self._config, sort_keys=True)

    def __repr__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self._config.items() if key != "metric")
        return f"{type(self).__name__}({options})"


M = TypeVar("M", bound=Metric[Any])


def all_reduce(metric: M, process_group: dist.ProcessGroup | None = None) -> M:
    """Merge a metric over all processes.

    Args:
        metric: this process's metric; not changed.
        process_group: the processes; by default all.

    Returns:
        A new metric, the same on every rank.

    Example:
        >>> all_reduce(auc).compute()
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "all_reduce needs an initialized torch.distributed group: call init_process_group first, or skip it"
        )
    wire = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend(process_group) == "nccl"
        else torch.device("cpu")
    )
    gathered = {name: _gather(tensor.to(wire), process_group) for name, tensor in sorted(metric.state_dict().items())}
    total = copy.deepcopy(metric)
    total.reset()
    for rank in range(dist.get_world_size(process_group)):
        part = copy.deepcopy(total)
        part.reset()
        part.load_state_dict({name: tensors[rank] for name, tensors in gathered.items()})
        total.merge(part)
    return total


def _gather(tensor: Tensor, process_group: dist.ProcessGroup | None) -> list[Tensor]:
    """Gather a tensor from every rank. First dimensions may differ, so tensors are padded to the longest."""
    world = dist.get_world_size(process_group)
    if tensor.dim() == 0:
        return [part[0] for part in _gather(tensor.reshape(1), process_group)]
    sizes = [torch.zeros(1, dtype=torch.int64, device=tensor.device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([tensor.shape[0]], device=tensor.device), group=process_group)
    lengths = [int(size) for size in sizes]
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in range(world)]
    if padded.numel():
        dist.all_gather(parts, padded, group=process_group)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]
