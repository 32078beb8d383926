"""All-gather, reduce-scatter and all-reduce of encoded tensors: bytes on the wire, sums in float32.

    all-gather       encode the own shard, gather bytes, decode all shards; every rank, the owner included, ends with the same decoded values
    reduce-scatter   encode a piece for each rank, all-to-all, decode what arrived and add it up in float32 in the order of ranks
    all-reduce       the two after one another: every rank decodes the same bytes, so replicas stay equal to the bit

A reduce-scatter inside the transport would have to add codes, which have no sum; hence the all-to-all. It moves as many bytes, and rounds each contribution once.

A flat buffer is described by `Part`s: matrices are encoded, the others (biases, norms: short, and sensitive) travel whole, as the bytes of their own type. Everything is sent
as uint8, since gloo knows no float8 and some transports no bf16. Sent bytes are counted in `Wire`.
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
    """A stretch of a flat buffer: how long, and whether it travels whole."""

    elements: int
    whole: bool = False


@dataclass
class Wire:
    """What was sent: payload bytes beside what float32 would have been.

    Example:
        >>> wire.ratio
        0.2578125
    """

    elements: int = 0
    bytes: int = 0
    calls: int = 0
    by_op: dict[str, tuple[int, int]] = field(default_factory=dict)
    codec: Codec | None = None  # of a hook that cannot be taken out and asks here; None: as they are

    def add(self, op: str, elements: int, sent: int) -> None:
        """Count one collective."""
        self.elements, self.bytes, self.calls = self.elements + elements, self.bytes + sent, self.calls + 1
        before = self.by_op.get(op, (0, 0))
        self.by_op[op] = (before[0] + elements, before[1] + sent)

    @property
    def ratio(self) -> float:
        """Bytes over those of float32; NaN before anything was sent."""
        return self.bytes / (4 * self.elements) if self.elements else float("nan")

    @property
    def bytes_per_element(self) -> float:
        """Bytes sent for one element."""
        return self.bytes / self.elements if self.elements else float("nan")


def part_size(parts: Iterable[Part], codec: Codec, dtype: torch.dtype) -> int:
    """Bytes of a buffer."""
    return sum(part.elements * dtype.itemsize if part.whole else codec.size(part.elements) for part in parts)


def pack(x: Tensor, parts: Sequence[Part], codec: Codec, *, draw: Draw | None = None, first_block: int = 0) -> Tensor:
    """The bytes of a flat buffer, part by part."""
    check_parts(x.numel(), parts)
    pieces: list[Tensor] = []
    for part, piece in zip(parts, torch.split(x, [part.elements for part in parts]), strict=True):
        if part.whole:
            pieces.append(piece.contiguous().view(torch.uint8))
        else:
            pieces.append(codec.encode(piece, draw=draw, first_block=first_block))
            first_block += -(-part.elements // codec.block)
    return torch.cat(pieces) if pieces else x.new_empty(0, dtype=torch.uint8)


def unpack(data: Tensor, parts: Sequence[Part], codec: Codec, dtype: torch.dtype, *, out: torch.dtype) -> Tensor:
    """The values of a buffer of `dtype` that was packed, in `out`."""
    sizes = [part_size((part,), codec, dtype) for part in parts]
    values = [
        piece.clone().view(dtype).to(out) if part.whole else codec.decode(piece, part.elements, out)
        for part, piece in zip(parts, torch.split(data, sizes), strict=True)
    ]
    return torch.cat(values) if values else torch.empty(0, dtype=out, device=data.device)


def check_parts(elements: int, parts: Sequence[Part]) -> None:
    """Parts that describe another buffer would decode one parameter with another's scales."""
    described = sum(part.elements for part in parts)
    if described != elements:
        raise ValueError(
            f"the parts describe {described} elements, the buffer has {elements}; "
            "hint: every parameter of the group must take part (a parameter without a gradient leaves a gap)"
        )


def gather_tensors(output: Tensor, x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Every rank's x in `output`, under the name this torch has for it (2.13 renamed it)."""
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
        shard: flat, this rank's.
        codec: how matrices travel.
        parts: of a shard; one encoded part where None. The same on all ranks.
        group: of ranks; the default group where None.
        draw: for stochastic codecs.
        wire: where to count.
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
        codec: how matrices travel.
        parts: of a piece; one encoded part where None. The same on all ranks.
        group: of ranks; the default group where None.
        average: divide the sum by the number of ranks, in float32.
        draw: for stochastic codecs; each rank draws its own numbers, so that errors do not add up.
        wire: where to count.
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
    """The sum over ranks of a flat tensor, equal to the bit on every rank.

    Args:
        x: flat, floating.
        codec: how it travels, both ways.
        group: of ranks; the default group where None.
        average: divide by the number of ranks.
        draw: for stochastic codecs.
        wire: where to count.

    Returns:
        A tensor like x.
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
