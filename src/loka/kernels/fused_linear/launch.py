"""Launch configurations of a fused GEMM: tile, warps, pipeline, and how tiles are spread over the multiprocessors.

`choose_launch` ranks the launches that fit by a model of their time, in microseconds:

    time  = start + sum over waves of (steps * max(multiply, load) + epilogue)

    multiply   bm * bn * bk products at the rate of one multiprocessor's tensor cores
    load       (bm + bn) * bk bytes at the rate at which one multiprocessor reads L2: higher with more bytes in flight
               (stages, programs that share it), lower if rows of the operands (K bytes) start within a 32-byte sector
    epilogue   bm * bn elements; more if a transpose or z is written too, or the activation has special functions

Two programs of 128 x 128 on one multiprocessor hide a part of their epilogues behind each other's products. That needs an
epilogue with few registers: FP8 output and no norm, GELU or z.

In practice the last wave decides: 168 tiles of 128 x 256 on 132 multiprocessors take two waves, the second of which
leaves most of them idle, while 336 tiles of 64 x 256 take three waves of half the length. Alternatively the tiles of
the last, partial wave are split along K (`split`), so that all multiprocessors work on them: float32 partial sums, and
a second kernel that adds them and runs the epilogue. That costs another launch and a round trip of the sums through
memory. With few rows (serving) all tiles are in the partial wave. A transpose rules splitting out: Triton 3.6 was seen
to write wrong bytes for it from the second kernel's layout.

The ranking is a function of sizes, not a search: it must be the same on all ranks, in every process and under graph
capture. A caller that has measured passes its own `Launch`; the ranking then lists what is worth measuring.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from loka.formats import Block, Spec
from loka.kernels.fused_linear.call import NORM_BLOCK, DgradCall, FusedCall, kept_form

_GROUP = Block(1, 128)
_SQUARE = Block(128, 128)
_KEPT_BYTES = {"nothing": 0, "y": 0, "normalized": 1, "scaled": 1, "bf16": 2}
_RESERVED = 2048  # bytes of shared memory for barriers and reductions
_SPLITS = (2, 3, 4, 6, 8, 16)

# Fitted to an H200 within 10 % (benchmarks/fused_linear_sweep.py), in microseconds on one multiprocessor.
_MULTIPLY = 1 / 6.1e6  # per FP8 multiply-add
_RATE, _RATE_IN_FLIGHT = 60e3, 0.24  # L2 bytes per microsecond with little in flight, and the gain per byte in flight
_RATE_ASTRIDE = 62e3  # the same if rows start within sectors
_WAVE, _ELEMENT = 0.5, 0.72 / 32768  # epilogue: per wave, and per element of the tile
_ALSO = 1.2 / 32768  # per element of an additional output
_SPECIAL = 1.5 / 32768  # per element and step of `_SPECIAL_COST`
_SPECIAL_COST = {"silu": 1, "tanh": 1, "sigmoid": 1, "gelu": 2, "gelu_tanh": 2}
_PAIR = (128, 128, 4, 2)  # bm, bn, warps, resident: two programs on a multiprocessor,
_PAIR_STAGES = 3  # and the loads in flight with which both fit
_HIDDEN, _PAIR_MULTIPLY = 0.4, 1.03  # the part of their epilogues that they hide, and their slower products
_START = 3.3  # launch of the kernel
_FINISH = 2.1  # launch of the second kernel
_PART = 0.57  # per part that the second kernel adds
_PARTIAL = 1 / 2.8e6  # per byte of partial sums written and read, by the whole GPU


@dataclass(frozen=True)
class Launch:
    """A launch configuration.

    Args:
        bm, bn, bk: the tile, and its step along K.
        warps: warps per program.
        stages: loads in flight per program.
        group: rows of tiles that are walked together, so that they share operands in L2.
        resident: programs per multiprocessor.
        split: the number of parts that K is split into, for the tiles of the last, partial wave.

    Example:
        >>> Launch(128, 256, warps=8, stages=3)
    """

    bm: int
    bn: int
    bk: int = 128
    warps: int = 4
    stages: int = 4
    group: int = 8
    resident: int = 1
    split: int = 1

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value} is not a power of two from {low} to {high}"
            for name, value, low, high in (
                ("bm", self.bm, 16, 256), ("bn", self.bn, 16, 256), ("bk", self.bk, 32, 256), ("warps", self.warps, 1, 16),
            )
            if not low <= value <= high or value & (value - 1)
        ]  # fmt: skip
        wrong += [
            f"{name}={getattr(self, name)} is less than 1"
            for name in ("stages", "group", "resident", "split")
            if getattr(self, name) < 1
        ]
        if wrong:
            raise ValueError(f"not a launch: {'; '.join(wrong)}")

    @cached_property
    def numbers(self) -> list[int]:
        """The fields as a list, as an op takes them. `Launch(*numbers)` restores it."""
        return [self.bm, self.bn, self.bk, self.warps, self.stages, self.group, self.resident, self.split]

    def __str__(self) -> str:
        shared = f" x{self.resident}" if self.resident > 1 else ""
        split = f" split {self.split}" if self.split > 1 else ""
        return (
            f"{self.bm}x{self.bn}x{self.bk} {self.warps} warps {self.stages} stages group {self.group}{shared}{split}"
        )


@dataclass(frozen=True)
class Properties:
    """The device properties that a launch depends on: multiprocessors, and bytes of shared memory per block.

    Example:
        >>> Properties(132, 232448)  # an H200
    """

    processors: int
    shared_memory: int


@lru_cache
def properties_of(device: torch.device) -> Properties:
    """Return the properties of a GPU; on the CPU (interpreter) a Hopper with 3 multiprocessors, so that loops iterate.

    Args:
        device: a CUDA device or the CPU.

    Returns:
        The properties, cached.

    Example:
        >>> properties_of(torch.device("cuda"))
    """
    if device.type != "cuda":
        return Properties(3, 227 * 1024)
    found = torch.cuda.get_device_properties(device)
    # getattr: absent from torch's type stubs
    shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Properties(found.multi_processor_count, int(shared))


class Work(NamedTuple):  # made in every call, in a tenth of a frozen dataclass's time
    """What the launch of a fused GEMM depends on."""

    m: int
    k: int
    n: int
    out: int  # bytes per element of the output
    kept: int = 0  # bytes per element of z, written (forward) or read (backward)
    transpose: bool = False
    norm: bool = False
    grouped: bool = False  # output scales per 1x128
    doubled: bool = False  # scales per 128 along K, which need a second accumulator
    whole: bool = False  # `fused_linear_dgrad`, which cannot be split and reads z
    astride: bool = False  # rows of the operands start within 32-byte sectors
    sums: bool = False  # `fused_linear_dgrad` with column sums for a bias
    special: int = 0  # how much the activation's special functions cost, of `_SPECIAL_COST`

    @property
    def hides(self) -> bool:
        """Whether the epilogue needs so few registers that two programs on a multiprocessor can hide it."""
        return self.out == 1 and not (self.kept or self.norm or self.grouped or self.doubled or self.whole) and self.special < 2  # fmt: skip


def work_of(call: FusedCall | DgradCall) -> Work:
    """Return the work of a call whose operands are stored densely."""
    if isinstance(call, DgradCall):
        return Work(call.m, call.k, call.n, 1, call.z_bytes, True, whole=True, astride=call.k % 32 != 0, sums=call.bias)
    form = kept_form(call.norm_block, call.activation, call.out) if call.keep else "nothing"
    grouped = isinstance(call.out, Spec) and call.out.block == _GROUP
    return Work(
        call.m, call.k, call.n, 1 if isinstance(call.out, Spec) else call.out.itemsize, _KEPT_BYTES[form], call.transpose,
        call.norm_block > 0, grouped, _GROUP in (call.a.block, call.b.block) or call.b.block == _SQUARE,
        astride=call.k % 32 != 0, special=special_cost(call.activation),
    )  # fmt: skip


def special_cost(activation: str) -> int:
    """Return how much the special functions of an activation cost an epilogue."""
    return _SPECIAL_COST.get(activation, 0)


def choose_launch(call: FusedCall | DgradCall, properties: Properties) -> tuple[Launch, ...]:
    """Return the launches that fit a call, fastest first by the model.

    Args:
        call: a call of `fused_linear` or `fused_linear_dgrad`.
        properties: the device's (`properties_of`).

    Returns:
        The candidates, ordered by predicted time.

    Example:
        >>> choose_launch(FusedCall(3072, 1280, 1792, spec, spec, NORMALIZED), Properties(132, 232448))[0]
        Launch(bm=64, bn=256, ...)
    """
    return rank(work_of(call), properties)


@lru_cache(maxsize=4096)
def rank(work: Work, properties: Properties) -> tuple[Launch, ...]:
    """Like `choose_launch`, from the work of a call."""
    fit = [launch for launch in _candidates(work, properties) if not problems(launch, work, properties)]
    return tuple(sorted(fit, key=lambda launch: predicted_time(launch, work, properties)))


def _candidates(work: Work, properties: Properties) -> list[Launch]:
    """Return launches worth trying, whole and split, each with as many stages as fit, up to what helps."""
    launches = []
    for bm, bn, warps, resident in _tile_shapes(work):
        rest = -(-work.m // bm) * -(-work.n // bn) % (properties.processors * resident)
        few = rest * 2 <= 2 * properties.processors and resident == 1
        splits = [
            split for split in _SPLITS if few and 256 * split <= work.k and rest * split <= 2 * properties.processors
        ]
        for split in (1, *splits):
            launch = Launch(bm, bn, 128, warps, 2, 8, resident, split)
            room = properties.shared_memory // resident - _RESERVED - waiting_bytes(launch, work)
            most = 6 if bm * bn < 16384 else 3 if bm * bn > 16384 and work.astride else 4
            # three stages and the staged tile take 115,224 bytes a program, so that two fit (a test compiles them)
            stages = _PAIR_STAGES if (bm, bn, warps, resident) == _PAIR else min(room // ((bm + bn) * 128), most)
            if stages >= (2 if split == 1 else 3):
                launches.append(replace(launch, stages=stages))
    return launches


def _tile_shapes(work: Work) -> list[tuple[int, int, int, int]]:
    """Return (bm, bn, warps, resident) to try.

    A second accumulator halves the tile. An epilogue that writes a transpose needs registers, and rows spread over few
    warps.
    """
    if work.doubled:
        return [(64, 256, 8, 1), (128, 128, 8, 1), (64, 128, 4, 2), (64, 64, 4, 2), (64, 128, 4, 1)]
    common = [(128, 256, 8, 1), (64, 256, 4, 1), (64, 128, 4, 1), (64, 128, 4, 2), (64, 64, 4, 1), (64, 64, 4, 2)]
    if work.hides:
        common.append(_PAIR)
    return [*common, (128, 128, 8, 1)] if work.transpose else [*common, (256, 128, 8, 1), (128, 128, 4, 1)]


def stored_width(launch: Launch, grouped: bool) -> int:
    """Return the columns of a tile that are stored at once.

    A wide tile is stored in halves, unless columns have scales of their own or are spread over several warps.
    """
    return 128 if launch.bn == 256 and not grouped and launch.warps * 16 <= launch.bm else launch.bn


def waiting_bytes(launch: Launch, work: Work) -> int:
    """Return the bytes of shared memory that stage a tile for its stores.

    One buffer each for the output, its transpose, z if its size differs from the output's, and split-K partial sums.
    """
    if work.whole:
        # Column sums reuse these buffers but need more if no z is read: an upper bound on what Triton 3.6 compiles.
        added = (3 if launch.bm <= 64 else 2) if work.sums else 0
        return launch.bm * launch.bn * max(work.out + work.kept, added)
    kept = work.kept if work.kept != work.out else 0
    element = work.out * (2 if work.transpose else 1) + kept
    return launch.bm * (stored_width(launch, work.grouped) * element + (256 if launch.split > 1 else 0))


def problems(launch: Launch, work: Work, properties: Properties) -> list[str]:
    """Return the reasons why a launch cannot run the work, empty if it can."""
    found = []
    if work.norm and launch.bn != NORM_BLOCK and (launch.bn < work.n or launch.bn > NORM_BLOCK):
        found.append(f"a tile holds whole norm blocks: bn is {NORM_BLOCK}, or at least n={work.n}, not {launch.bn}")
    if work.grouped and launch.bn % 128:
        found.append(f"output scales per 128 columns need bn=128 or 256, not {launch.bn}")
    if work.grouped and work.transpose and launch.bm != 128:
        found.append(f"scales of the transpose per 128 rows need bm=128, not {launch.bm}")
    if work.doubled and launch.bk != 128:
        found.append(f"operands scaled per 128 along K need bk=128, not {launch.bk}")
    if launch.split > 1:
        found += _split_problems(launch, work, properties)
    needed = launch.stages * (launch.bm + launch.bn) * launch.bk + waiting_bytes(launch, work) + _RESERVED
    if needed > properties.shared_memory:
        found.append(f"needs about {needed} bytes of shared memory, there are {properties.shared_memory}")
    return found


def _split_problems(launch: Launch, work: Work, properties: Properties) -> list[str]:
    found = []
    if work.whole or work.transpose:
        found.append(f"the second kernel writes no transpose: split=1, not {launch.split}")
    if launch.split > -(-work.k // launch.bk):
        found.append(f"k={work.k} has no {launch.split} parts of {launch.bk}")
    if _tile_count(launch, work) % (properties.processors * launch.resident) == 0:
        found.append(f"no tile is left over to split: split=1, not {launch.split}")
    return found


def _tile_count(launch: Launch, work: Work) -> int:
    return -(-work.m // launch.bm) * -(-work.n // launch.bn)


def predicted_time(launch: Launch, work: Work, properties: Properties) -> float:
    """Return the microseconds that the model above predicts."""
    slots = properties.processors * launch.resident
    steps, tiles = -(-work.k // launch.bk), _tile_count(launch, work)
    waves, rest = divmod(tiles, slots)
    area = launch.bm * launch.bn
    also = work.transpose + (1.5 if work.whole else work.kept > 0) + (work.out > 1)
    epilogue = area * (_ELEMENT + also * _ALSO + work.special * _SPECIAL) * (1.3 if launch.bm == 256 else 1.0)
    if _is_pair(launch):
        epilogue *= 1 - _HIDDEN

    def wave(programs: int, steps: int, epilogue: float) -> float:
        sharing = min(launch.resident, -(-programs // properties.processors))
        return steps * _step_time(launch, work, sharing) + sharing * epilogue + _WAVE

    time = _START + waves * wave(slots, steps, epilogue)
    if launch.split == 1:
        return time + (wave(rest, steps, epilogue) if rest else 0)
    parts, left = divmod(rest * launch.split, slots)
    share = -(-steps // launch.split)
    time += parts * wave(slots, share, area * _ALSO) + (wave(left, share, area * _ALSO) if left else 0)
    return time + _FINISH + launch.split * (_PART + 4 * area * rest * _PARTIAL)


def _is_pair(launch: Launch) -> bool:
    return (launch.bm, launch.bn, launch.warps, launch.resident) == _PAIR


def _step_time(launch: Launch, work: Work, sharing: int) -> float:
    """Return the time of one step along K for all programs that share a multiprocessor."""
    multiply = launch.bm * launch.bn * launch.bk * _MULTIPLY * (2 if work.doubled else 1)
    multiply *= _PAIR_MULTIPLY if _is_pair(launch) else 1
    loaded = (launch.bm + launch.bn) * launch.bk
    rate = _RATE_ASTRIDE if work.astride else _RATE + _RATE_IN_FLIGHT * sharing * launch.stages * loaded
    return sharing * max(multiply, loaded / rate)
