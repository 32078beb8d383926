"""Encoded collectives for FSDP2 (`fully_shard`) and DistributedDataParallel.

    fully_shard(model)
    wire = quantize_fsdp(model, all_gather="e4m3:1x128:pow2", reduce_scatter="e4m3:1x128:pow2")

    model = DistributedDataParallel(model)
    wire = quantize_ddp(model, "e4m3:1x128:pow2")

Parameters of fewer than two dimensions (biases, norms) are sent unencoded, unless `whole` decides otherwise. Shards,
optimizer state and checkpoints keep the parameters' own type. Rounded are only the copy that a layer computes with, the
same on every rank, and each rank's contribution to a gradient.

What torch cannot pass on to these hooks is refused: asynchronous unsharding, reductions other than sum and mean, and a
group in which a parameter has no gradient.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loka.comms.collectives import Part, Wire, all_gather, all_reduce, reduce_scatter
from loka.formats import Draw
from loka.kernels.wire.codec import Codec, parse_codec

Whole = Callable[[str, torch.Size], bool]


def is_vector(name: str, size: torch.Size) -> bool:
    """Check whether a parameter is a bias, norm or scalar, by its number of dimensions."""
    return len(size) < 2


@dataclass
class StepClock:
    """The step that stochastic codecs draw random numbers for. Set it once per step; calls within a step are counted.

    Args:
        seed: seed of the random numbers.

    Example:
        >>> clock = StepClock(seed=7)
        >>> quantize_ddp(model, "e4m3:1x128:pow2:stochastic", clock=clock)
        >>> clock.step = trainer.step
    """

    seed: int = 0
    _step: int = 0
    _calls: dict[int, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The current step."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value
        self._calls.clear()

    def draw(self, codec: Codec, stream: int) -> Draw | None:
        """Return the random numbers of the next call on a stream; None for a codec that rounds to nearest."""
        if not codec.is_stochastic:
            return None
        call = self._calls.get(stream, 0)
        self._calls[stream] = call + 1
        return Draw(self._step, zlib.crc32(f"{stream}/{call}".encode()) >> 1, self.seed)


class _Collective:
    """Base of both FSDP2 hooks: the codec, the layout of a shard, and the count of bytes."""

    def __init__(self, codec: Codec, parts: Sequence[Part], clock: StepClock, stream: int, wire: Wire) -> None:
        self.codec, self.parts, self.clock, self.stream, self.wire = codec, tuple(parts), clock, stream, wire

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP2."""
        return torch.empty(*size, dtype=dtype, device=device)


class QuantizedAllGather(_Collective):
    """An all-gather for `FSDPModule.set_custom_all_gather`; `quantize_fsdp` sets it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill the output with all shards."""
        if async_op:
            raise ValueError(
                "an encoded all-gather decodes after it has arrived, so it cannot be asynchronous; hint: leave _set_unshard_async_op off"
            )
        draw = self.clock.draw(self.codec, self.stream)
        all_gather(output_tensor, input_tensor, self.codec, parts=self.parts, group=group, draw=draw, wire=self.wire)


class QuantizedReduceScatter(_Collective):
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`; `quantize_fsdp` sets it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Fill the output with this rank's piece of the sum or mean."""
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"an encoded reduce-scatter sums or averages, synchronously; got {op}, async_op={async_op}"
            )
        draw, average = self.clock.draw(self.codec, self.stream), op == dist.ReduceOp.AVG
        reduce_scatter(
            output_tensor, input_tensor, self.codec, parts=self.parts, group=group, average=average, draw=draw, wire=self.wire
        )  # fmt: skip


def quantize_fsdp(
    model: nn.Module,
    *,
    all_gather: str | Codec | None = "e4m3:1x128:pow2",
    reduce_scatter: str | Codec | None = "e4m3:1x128:pow2",
    whole: Whole = is_vector,
    clock: StepClock | None = None,
) -> Wire:
    """Encode what FSDP2 sends for every `fully_shard`ed module of a model.

    Args:
        model: a model with at least one module that went through `fully_shard`.
        all_gather: codec of weights; None keeps torch's own all-gather.
        reduce_scatter: codec of gradients; None keeps torch's own reduce-scatter.
        whole: (name, size) -> whether a parameter is sent unencoded.
        clock: the step, for stochastic codecs.

    Returns:
        The count of what is sent from now on, over all modules.

    Raises:
        ValueError: nothing is sharded, or a stochastic codec has no clock.

    Example:
        >>> wire = quantize_fsdp(fully_shard(model))
        >>> loss.backward(); wire.ratio
        0.26
    """
    gather, scatter = (None if c is None else parse_codec(c) for c in (all_gather, reduce_scatter))
    clock = _require_clock(clock, (gather, scatter))
    wire, found = Wire(), 0
    for number, (parts, module) in enumerate(_sharded_groups(model, whole)):
        if gather is not None:
            module.set_custom_all_gather(QuantizedAllGather(gather, parts, clock, 2 * number, wire))
        if scatter is not None:
            module.set_custom_reduce_scatter(QuantizedReduceScatter(scatter, parts, clock, 2 * number + 1, wire))
        found += 1
    if not found:
        raise ValueError("no module of this model is sharded by FSDP2; hint: call fully_shard first")
    return wire


def release_fsdp(model: nn.Module) -> None:
    """Restore torch's own collectives after `quantize_fsdp`."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    for _, module in _sharded_groups(model, is_vector):
        module.set_custom_all_gather(DefaultAllGather())
        module.set_custom_reduce_scatter(DefaultReduceScatter())


def _sharded_groups(model: nn.Module, whole: Whole) -> list[tuple[list[Part], Any]]:
    """Return each FSDP2 module that owns parameters, with the layout of its shard."""
    from torch.distributed.fsdp import FSDPModule

    result: list[tuple[list[Part], Any]] = []
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)  # a list since torch 2.13, a single group before
        groups = [state._fsdp_param_group] if groups is None else groups
        owning = [group for group in groups if group is not None]
        if len(owning) > 1:
            raise ValueError(
                f"{type(module).__name__} has {len(owning)} groups of parameters on different meshes; expected one per module"
            )
        for group in owning:
            parts = [
                Part(param.padded_sharded_param_size.numel(), whole(param._param_fqn or "", param._orig_size))
                for param in group.fsdp_params
            ]
            result.append((parts, module))
    return result


def quantize_ddp(
    model: nn.parallel.DistributedDataParallel,
    codec: str | Codec = "e4m3:1x128:pow2",
    *,
    clock: StepClock | None = None,
) -> Wire:
    """Encode the gradients of matrices that DistributedDataParallel averages; those of biases and norms are unencoded.

    Args:
        model: a wrapped model without a communication hook.
        codec: codec of gradients.
        clock: the step, for stochastic codecs.

    Returns:
        The count of what is sent from now on.

    Example:
        >>> wire = quantize_ddp(DistributedDataParallel(model))
    """
    wire = Wire(codec=parse_codec(codec))
    clock = _require_clock(clock, (wire.codec,))
    group = model.process_group

    def average(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        vectors = torch.cat(
            [torch.full((p.numel(),), is_vector("", p.shape), dtype=torch.bool) for p in bucket.parameters()]
        ).to(buffer.device)
        codec = wire.codec or parse_codec("fp32")
        draw = clock.draw(codec, bucket.index())
        matrices = all_reduce(buffer[~vectors], codec, group=group, average=True, draw=draw, wire=wire)
        buffer[~vectors] = matrices
        if bool(vectors.any()):
            small = buffer[vectors] / dist.get_world_size(group)
            dist.all_reduce(small, group=group)
            buffer[vectors] = small
            wire.add("all_reduce", 2 * small.numel(), 2 * small.numel() * small.element_size())
        devices = [buffer.device] if buffer.is_cuda else None
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    model.register_comm_hook(None, average)
    return wire


def _require_clock(clock: StepClock | None, codecs: Sequence[Codec | None]) -> StepClock:
    stochastic = [str(codec) for codec in codecs if codec is not None and codec.is_stochastic]
    if stochastic and clock is None:
        raise ValueError(
            f"{', '.join(stochastic)} rounds stochastically and needs clock=StepClock(), whose step you set: "
            "without it a resumed run would round differently"
        )
    return clock or StepClock()
