"""All-gather, reduce-scatter and all-reduce of encoded tensors: encoded bytes are sent, sums are in float32.

    all-gather       Encode the own shard, gather bytes, decode all shards. Every rank, the owner included, ends up with
                     the same decoded values.
    reduce-scatter   Encode one piece per rank, all-to-all, decode what arrived and add it in float32, in rank order.
    all-reduce       A reduce-scatter, then an all-gather. Every rank decodes the same bytes, so replicas stay bitwise
                     equal.

A reduce-scatter of the transport would have to add codes, which is impossible, hence the all-to-all. It moves as many
bytes, and rounds each contribution once.

A flat buffer is described by `Part`s. Matrices are encoded. Other parameters (biases, norms: short and sensitive) are
sent unencoded. Everything is sent as uint8, since gloo does not support float8, and some transports not even bf16.
`Wire` counts the bytes that are sent.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from loka.formats import Draw
from loka.kernels.wire.codec import Codec


@dataclass(frozen=True)
class Part:
    """A section of a flat buffer.

    Args:
        elements: its length.
        whole: send it unencoded.

    Example:
        >>> Part(4096), Part(64, whole=True)
    """

    elements: int
    whole: bool = False


@dataclass
class Wire:
    """Counts the bytes that collectives send.

    Args:
        elements: elements sent.
        bytes: payload bytes sent.
        calls: collectives counted.
        by_op: (elements, bytes) by collective.
        codec: current codec of a DDP hook, which reads it here since it cannot be removed; None: unencoded.

    Example:
        >>> wire.ratio
        0.2578125
    """

    elements: int = 0
    bytes: int = 0
    calls: int = 0
    by_op: dict[str, tuple[int, int]] = field(default_factory=dict)
    codec: Codec | None = None

    def add(self, op: str, elements: int, sent: int) -> None:
        """Count one collective."""
        self.elements, self.bytes, self.calls = self.elements + elements, self.bytes + sent, self.calls + 1
        before = self.by_op.get(op, (0, 0))
        self.by_op[op] = (before[0] + elements, before[1] + sent)

    @property
    def ratio(self) -> float:
        """Bytes sent relative to float32; NaN before anything was sent."""
        return self.bytes / (4 * self.elements) if self.elements else float("nan")

    @property
    def bytes_per_element(self) -> float:
        """Bytes sent per element."""
        return self.bytes / self.elements if self.elements else float("nan")


def part_size(parts: Iterable[Part], codec: Codec, dtype: torch.dtype) -> int:
    """Return the bytes of an encoded buffer."""
    return sum(part.elements * dtype.itemsize if part.whole else codec.size(part.elements) for part in parts)


def pack(x: Tensor, parts: Sequence[Part], codec: Codec, *, draw: Draw | None = None, first_block: int = 0) -> Tensor:
    """Encode a flat buffer, part by part."""
    described = sum(part.elements for part in parts)
    if described != x.numel():  # would decode one parameter with the scales of another
        raise ValueError(
            f"the parts describe {described} elements, the buffer has {x.numel()}; "
            "hint: every parameter of the group must take part (a parameter without a gradient leaves a gap)"
        )
    pieces: list[Tensor] = []
    for part, piece in zip(parts, torch.split(x, [part.elements for part in parts]), strict=True):
        if part.whole:
            pieces.append(piece.contiguous().view(torch.uint8))
        else:
            pieces.append(codec.encode(piece, draw=draw, first_block=first_block))
            first_block += -(-part.elements // codec.block)
    return torch.cat(pieces) if pieces else x.new_empty(0, dtype=torch.uint8)


def unpack(data: Tensor, parts: Sequence[Part], codec: Codec, dtype: torch.dtype, *, out: torch.dtype) -> Tensor:
    """Decode a buffer of `dtype` that was packed, into values of type `out`."""
    sizes = [part_size((part,), codec, dtype) for part in parts]
    values = [
        piece.clone().view(dtype).to(out) if part.whole else codec.decode(piece, part.elements, out)
        for part, piece in zip(parts, torch.split(data, sizes), strict=True)
    ]
    return torch.cat(values) if values else torch.empty(0, dtype=out, device=data.device)


def gather_tensors(output: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Gather every rank's x in `output`. torch 2.13 renamed the function for it."""
    gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, x, group=group)


def all_gather(
    output: Tensor,
    shard: Tensor,
    codec: Codec,
    *,
    parts: Sequence[Part] | None = None,
    group: dist.ProcessGroup | None = None,
    draw: Draw | None = None,
    wire: Wire | None = None,
) -> None:
    """Fill `output` with every rank's shard, decoded.

    Args:
        output: flat, world x shard; may overlap the shard.
        shard: flat, this rank's shard.
        codec: codec of matrices.
        parts: layout of a shard, the same on all ranks; None means one encoded part.
        group: process group; None means the default one.
        draw: random numbers for stochastic codecs.
        wire: counts what is sent.

    Example:
        >>> all_gather(output, shard, parse_codec("e4m3:1x128:pow2"))
    """
    parts = (Part(shard.numel()),) if parts is None else parts
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    blocks = sum(-(-part.elements // codec.block) for part in parts if not part.whole)
    sent = pack(shard, parts, codec, draw=draw, first_block=rank * blocks)
    received = sent.new_empty(world * sent.numel())
    gather_tensors(received, sent, group)
    for target, data in zip(output.view(world, -1), received.view(world, -1), strict=True):
        target.copy_(unpack(data, parts, codec, shard.dtype, out=shard.dtype))
    if wire is not None:
        wire.add("all_gather", shard.numel(), sent.numel())


def reduce_scatter(
    output: Tensor,
    full: Tensor,
    codec: Codec,
    *,
    parts: Sequence[Part] | None = None,
    group: dist.ProcessGroup | None = None,
    average: bool = False,
    draw: Draw | None = None,
    wire: Wire | None = None,
) -> None:
    """Fill `output` with this rank's piece of the sum over ranks.

    Args:
        output: flat, one piece.
        full: flat, world pieces of equal length.
        codec: codec of matrices.
        parts: layout of a piece, the same on all ranks; None means one encoded part.
        group: process group; None means the default one.
        average: divide the sum by the number of ranks, in float32.
        draw: random numbers for stochastic codecs; every rank draws its own, so that errors do not add up.
        wire: counts what is sent.

    Example:
        >>> reduce_scatter(piece, gradients, parse_codec("e4m3:1x128:pow2"), average=True)
    """
    parts = (Part(output.numel()),) if parts is None else parts
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    blocks = sum(-(-part.elements // codec.block) for part in parts if not part.whole)
    pieces = [
        pack(piece, parts, codec, draw=draw, first_block=(rank * world + target) * blocks)
        for target, piece in enumerate(full.view(world, -1))
    ]
    sent = torch.cat(pieces)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    total = torch.zeros(output.numel(), dtype=torch.float32, device=output.device)
    for data in received.view(world, -1):
        total += unpack(data, parts, codec, full.dtype, out=torch.float32)
    output.copy_(total / world if average else total)
    if wire is not None:
        wire.add("reduce_scatter", full.numel(), sent.numel())


def all_reduce(
    x: Tensor,
    codec: Codec,
    *,
    group: dist.ProcessGroup | None = None,
    average: bool = False,
    draw: Draw | None = None,
    wire: Wire | None = None,
) -> Tensor:
    """Sum a flat tensor over ranks. The result is bitwise equal on every rank.

    Args:
        x: flat floating tensor.
        codec: codec for both directions.
        group: process group; None means the default one.
        average: divide by the number of ranks.
        draw: random numbers for stochastic codecs.
        wire: counts what is sent.

    Returns:
        A tensor like x.

    Example:
        >>> mean = all_reduce(gradients, parse_codec("e4m3:1x128:pow2"), average=True)
    """
    world = dist.get_world_size(group)
    share = -(-x.numel() // (world * codec.block)) * codec.block
    padded = torch.nn.functional.pad(x.detach(), (0, share * world - x.numel()))
    mine = torch.empty(share, dtype=torch.float32, device=x.device)
    reduce_scatter(mine, padded, codec, group=group, average=average, draw=draw, wire=wire)
    total = torch.empty(world * share, dtype=torch.float32, device=x.device)
    later = None if draw is None else Draw(draw.step, draw.stream ^ 0x80000000, draw.seed)
    all_gather(total, mine, codec, group=group, draw=later, wire=wire)
    return total[: x.numel()].to(x.dtype)
