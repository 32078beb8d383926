"""Simulate a training step on more GPUs than are present, from times measured on one GPU and published bandwidths.

    work = Work(forward=4e-3, backward=8e-3, dense=60_000_000, embeddings=26 * 128 * 4096)
    for step in simulate(work, MACHINES["h200-ndr"], gpus=(8, 64, 512, 1024), codec="e4m3:1x128:pow2"):
        print(step)

Nothing here was run on those machines. Per step, with n GPUs in nodes of g, per-GPU link bandwidth L and per-node
network bandwidth W, both times an efficiency:

    ring        all-gather or reduce-scatter of G bytes: (n - 1)/n G / B + latency, with B = L inside a node and
                min(L, W) across nodes (g rings, one for each network card)
    all-to-all  of b bytes per GPU: max( b (g - 1)/n / L,  b (n - g)/n / (W/g) ) + latency
    dense       ddp: all-reduce of gradients during the last backward pass; fsdp, for every batch: all-gather during
                forward and backward, reduce-scatter during backward
    tables      all-to-all of pooled embeddings after the lookup, and of their gradients after the backward pass;
                nothing overlaps with them
    codec       encoding what is sent and decoding what arrives, at the measured rate of the quantize kernel; it uses
                the GPU, so nothing hides it

A collective during a pass of length c costs max(comm - c, one bucket): the last bucket has nothing to hide behind.

Efficiencies and latencies are assumed (`Machine`), not fitted. Stragglers, congestion, hosts that cannot keep up and
kernels that do not shrink with the batch are not modelled. docs/guides/scale-out.md compares it with published curves.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loka.kernels.wire.codec import Codec, parse_codec

BUCKET = 25e6 / 4  # elements: DistributedDataParallel's 25 MB of float32
WORTHWHILE = 1.01  # a coarser codec must save more than 1 % of a step
ENCODE = 8192 * 4096 / 27.76e-6  # elements a second, E4M3 with 1x128 scales: benchmarks/results/h200/quantize.json


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes, from data sheets.

    Args:
        name: name of the machine type.
        gpus: GPUs per node.
        link: bytes per second that a GPU can send inside the node, one way.
        network: bytes per second that a node can send, all network cards together, one way.
        source: where the bandwidths are published.
        efficiency: share of the data sheet's bandwidth that a large collective reaches; assumed.
        link_latency: seconds of a hop inside a node; assumed.
        network_latency: seconds of a hop between nodes; assumed.
    """

    name: str
    gpus: int
    link: float
    network: float
    source: str
    efficiency: float = 0.8
    link_latency: float = 3e-6
    network_latency: float = 1e-5

    def __post_init__(self) -> None:
        if self.gpus < 1 or min(self.link, self.network) <= 0 or not 0 < self.efficiency <= 1:
            raise ValueError(f"a machine has GPUs, bandwidths above 0 and an efficiency from 0 to 1, got {self}")


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h200-ndr", 8, 450e9, 400e9, "DGX H200 data sheet: NVLink 900 GB/s both ways, 8 x 400 Gb/s"),
        Machine("h200-hdr", 8, 450e9, 200e9, "NVLink as DGX H200; 8 x 200 Gb/s InfiniBand HDR"),
        Machine("h200-100g", 8, 450e9, 12.5e9, "NVLink as DGX H200; one 100 Gb/s card a node"),
        Machine("a100-hdr", 8, 300e9, 200e9, "DGX A100 data sheet: NVLink 600 GB/s both ways, 8 x 200 Gb/s"),
        Machine("v100-dgx2", 16, 150e9, 100e9, "DGX-2 data sheet: NVSwitch 300 GB/s a GPU both ways, 8 x 100 Gb/s"),
        Machine("v100-dgx1", 8, 150e9, 50e9, "DGX-1 data sheet: NVLink 300 GB/s a GPU both ways, 4 x 100 Gb/s"),
    )
}


@dataclass(frozen=True)
class Work:
    """What one GPU computes and sends in a step. Times are measured on one GPU, at its share of the batch.

    Args:
        forward: seconds of a batch's forward pass, lookups included.
        backward: seconds of a batch's backward pass.
        update: seconds of the optimizer.
        dense: parameters outside tables.
        embeddings: elements of pooled embeddings that a GPU's examples need, over all features; 0: no sharded tables.
        accumulate: batches per step.
        strategy: `ddp` or `fsdp`, for the dense part.
        overlap: whether collectives of the dense part overlap with the passes.

    Example:
        >>> Work(forward=4e-3, backward=8e-3, dense=60_000_000, embeddings=26 * 128 * 4096, strategy="fsdp")
    """

    forward: float
    backward: float
    update: float = 0.0
    dense: int = 0
    embeddings: int = 0
    accumulate: int = 1
    strategy: str = "ddp"
    overlap: bool = True

    def __post_init__(self) -> None:
        problems = []
        amounts = (self.forward, self.backward, self.update, self.dense, self.embeddings)
        if not all(0 <= amount < math.inf for amount in amounts) or self.accumulate < 1:
            problems.append("times and counts must be finite and not negative, and accumulate must be at least 1")
        if self.strategy not in ("ddp", "fsdp"):
            problems.append("strategy must be ddp or fsdp")
        if problems:
            raise ValueError(f"{'; '.join(problems)}; got {self}")


@dataclass(frozen=True)
class Simulated:
    """A simulated step: seconds of computation, and the exposed seconds of each collective."""

    gpus: int
    codec: str
    compute: float
    dense: float
    tables: float
    coding: float

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.dense + self.tables + self.coding

    @property
    def efficiency(self) -> float:
        """Share of the step spent computing: the weak-scaling efficiency."""
        return self.compute / self.step

    def __str__(self) -> str:
        parts = (
            f"compute {1e3 * self.compute:.2f}, dense {1e3 * self.dense:.2f}, tables {1e3 * self.tables:.2f}, "
            f"codec {1e3 * self.coding:.2f} ms"
        )
        return f"simulated: {self.gpus:5} GPUs, {self.codec:16} {1e3 * self.step:8.2f} ms a step ({self.efficiency:.0%} computing: {parts})"


def simulate(
    work: Work,
    machine: Machine,
    *,
    gpus: Sequence[int],
    codec: str | Codec = "bf16",
    weights: str | Codec | None = None,
) -> Iterator[Simulated]:
    """Simulate a step for each number of GPUs. Every GPU keeps its share of the batch (weak scaling).

    Args:
        work: the work of one GPU.
        machine: the nodes and their network.
        gpus: numbers of GPUs; beyond one node, multiples of its GPUs.
        codec: codec of embeddings, of gradients, and of weights if `weights` is None.
        weights: codec of gathered weights.

    Returns:
        A simulated step for each.

    Raises:
        ValueError: a number of GPUs does not fill its nodes, or `weights` is given for ddp, which sends none.

    Example:
        >>> [round(s.efficiency, 2) for s in simulate(work, MACHINES["h200-ndr"], gpus=(8, 1024))]
    """
    if weights is not None and work.strategy == "ddp":
        raise ValueError(f"ddp sends no weights, so they cannot be sent in {weights}; hint: strategy='fsdp'")
    sent = parse_codec(codec)
    gathered = sent if weights is None else parse_codec(weights)
    for n in gpus:
        if n < 1 or (n > machine.gpus and n % machine.gpus):
            raise ValueError(f"{n} GPUs do not fill nodes of {machine.gpus}; hint: a multiple of {machine.gpus}")
        compute = work.accumulate * (work.forward + work.backward) + work.update
        dense = _dense(work, machine, n, sent, gathered)
        tables = 2 * work.accumulate * _all_to_all(sent.size(work.embeddings), machine, n) if work.embeddings else 0.0
        yield Simulated(n, str(sent), compute, dense, tables, _coding(work, n, sent, gathered))


def _dense(work: Work, machine: Machine, n: int, sent: Codec, gathered: Codec) -> float:
    gradients, weights = sent.size(work.dense), gathered.size(work.dense)
    scatter, gather = _ring(gradients, machine, n), _ring(weights, machine, n)
    if work.strategy == "ddp":
        return _exposed(2 * scatter, work.dense, work.backward if work.overlap else 0.0)
    forward = _exposed(gather, work.dense, work.forward if work.overlap else 0.0)
    backward = _exposed(gather + scatter, work.dense, work.backward if work.overlap else 0.0)
    return work.accumulate * (forward + backward)


def _exposed(seconds: float, elements: int, overlapped: float) -> float:
    """Return the exposed time of a collective that overlaps with a pass: the excess, and at least its last bucket."""
    if not overlapped:
        return seconds
    return max(seconds - overlapped, seconds * min(1.0, BUCKET / max(elements, 1)))


def _ring(size: float, machine: Machine, n: int) -> float:
    if n == 1 or not size:
        return 0.0
    inside = n <= machine.gpus
    bandwidth = machine.link if inside else min(machine.link, machine.network)
    return (n - 1) / n * size / (bandwidth * machine.efficiency) + _latency(machine, n)


def _all_to_all(size: float, machine: Machine, n: int) -> float:
    if n == 1:
        return 0.0
    local = min(n, machine.gpus)
    link = size * (local - 1) / n / (machine.link * machine.efficiency)
    network = size * (n - local) / n / (machine.network / machine.gpus * machine.efficiency)
    return max(link, network) + _latency(machine, n)


def _latency(machine: Machine, n: int) -> float:
    """Return the latency of hops around the node and up a tree of nodes."""
    nodes = -(-n // machine.gpus)
    return (min(n, machine.gpus) - 1) * machine.link_latency + math.ceil(math.log2(nodes)) * machine.network_latency


def _coding(work: Work, n: int, sent: Codec, gathered: Codec) -> float:
    """Return the time to encode and decode. A plain 16- or 32-bit codec is a cast that collectives do anyway."""
    if n == 1:
        return 0.0
    elements = 0.0
    if sent.spec is not None:
        elements += work.accumulate * 4 * work.embeddings  # both ways, encoded and decoded
        reduced = 2 if work.strategy == "ddp" else work.accumulate  # reduce-scatter, and the gather of the sum
        elements += 2 * reduced * work.dense
    if gathered.spec is not None and work.strategy == "fsdp":
        elements += work.accumulate * 2 * (1 + 1 / n) * work.dense  # own shard encoded, all shards decoded, twice
    return elements / ENCODE


def compare_codecs(
    work: Work, machine: Machine, *, gpus: Sequence[int], codecs: Sequence[str] = ("fp32", "bf16", "e4m3:1x128:pow2")
) -> list[tuple[int, dict[str, Simulated], str]]:
    """Simulate a step with several codecs, and choose one for each number of GPUs.

    That is the first codec, in the order given, whose step is within 1 % of the shortest.
    """
    steps = {codec: list(simulate(work, machine, gpus=gpus, codec=codec)) for codec in codecs}
    result = []
    for i, n in enumerate(gpus):
        found = {codec: steps[codec][i] for codec in codecs}
        shortest = min(step.step for step in found.values())
        result.append((n, found, next(codec for codec in codecs if found[codec].step <= WORTHWHILE * shortest)))
    return result
