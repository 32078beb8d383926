"""FP8 attention beside the bf16 kernels in use: HSTU's attention, attention over padding (InterFormer), and the generative engine over its context. Inference only.

    PYTHONPATH=src python benchmarks/attention_fp8.py --out attention_fp8.json
    PYTHONPATH=src TRITON_INTERPRET=1 python benchmarks/attention_fp8.py --device cpu --out attention_fp8.json       CPU, tiny: does it run?

Both products run in FP8. The two prototypes below follow the forward kernels of `kernels/attention` and `kernels/masked_attention`, with the same biases and masks; the engine's FP8 kernel is the library's own (`triton_low_kernels`).

    s   = (q8 k8^T) scale_q scale_k       q8: a query, rounded in the kernel with its own scale; k8: one scale per head
    out = (w8 v8) scale_v / c             w8: c times the weight, c constant; v8: one scale per head, stored transposed, because Hopper needs both FP8 operands contiguous along the summed dimension

Keys and values must be rounded before the kernel runs. Two times are given: `cast` knows the scales already (calibrated), `quantize` also finds the largest values first. The engine's context comes out of a norm and
needs no scales; it is rounded once and then read by every layer and decoding step (`uses` times).

Before anything is timed, the whole result is compared with float32 on the same operands; a kernel whose relative L2 error is 0.1 or more is not timed. Each tile is first compiled and run in its own process, then all correct tiles are
timed together. The fastest one is timed again, interleaved with the bf16 kernel, with and without the rounding of keys and values. A tile or case that fails is recorded with the reason, and the run continues.

Unlike in the library, padded keys and values must be finite if there are gaps in a mask: the prototype rounds all of them up to the end of a row.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from attention_h200 import name_of, spread
from evidence import describe_run
from torch import Tensor

from loka.inference.context import round_context
from loka.kernels.attention import reference as silu_reference
from loka.kernels.attention import triton_launch
from loka.kernels.attention.triton_kernels import _add_biases, _find_buckets, _load_times, _place, _sigmoid
from loka.kernels.attention.triton_kernels import _store as _store_events
from loka.kernels.attention.triton_launch import Problem, Tile
from loka.kernels.beam_attention import reference as beam_reference
from loka.kernels.beam_attention.triton_kernels import Tile as BeamTile
from loka.kernels.beam_attention.triton_kernels import attend
from loka.kernels.beam_attention.triton_low_kernels import attend_low
from loka.kernels.masked_attention import reference as masked_reference
from loka.kernels.masked_attention import triton_ops
from loka.kernels.masked_attention.triton_kernels import _counts, _ends
from loka.kernels.masked_attention.triton_kernels import _place as _place_padded
from loka.kernels.masked_attention.triton_kernels import _store as _store_padded
from loka.kernels.strides import cdiv
from loka.kernels.tile import INTERPRETED, finite_magnitude, inverse, scale_of, to_fp8
from loka.measure.conformance import Conformance
from loka.measure.timing import Contender, sets_needed, time_together
from loka.records import Interval, write_atomically

ERROR = 0.1
WEIGHT = tl.constexpr(16.0)  # SiLU weights times this are rounded: from 1e-3 to 28 without subnormals or clipping
SHARE = tl.constexpr(256.0)  # softmax weights are at most 1, relative to the running maximum
Made = tuple[Tensor, ...]  # keys and values in E4M3, and the largest values that their scales are made of


@triton.jit
def _scale(largest_ptr, at):
    return scale_of(tl.load(largest_ptr + at), False, False)


@triton.jit
def _round_rows(x, PREROUND: tl.constexpr):
    """Round rows of x to E4M3 with a scale each."""
    made = scale_of(tl.max(finite_magnitude(x), 1), False, False)
    return to_fp8(x, inverse(made)[:, None], 0, False, False, PREROUND), made


@triton.jit
def _first_column(start, b):
    """Return where row b starts in the transposed values: at a multiple of 16, found without adding up the rows before."""
    return (start + 15 * b) // 16 * 16


@triton.jit
def _load_pair(k_base, v_base, j, n, room, D: tl.constexpr):
    """Load keys [KEYS, D] and values [D, KEYS] of a row with n of them; the values are zero between n and the next multiple of 16."""
    column = tl.arange(0, D)
    k = tl.load(k_base + j[:, None] * D + column[None, :], (j < n)[:, None], other=0.0)
    v_at = v_base + column.to(tl.int64)[:, None] * room + j[None, :]
    return k, tl.load(v_at, (j < (n + 15) // 16 * 16)[None, :], other=0.0)


@triton.jit
def _find_largest(k_ptr, v_ptr, largest_ptr, starts_ptr, stops_ptr, blocks, heads, row, head, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Raise largest [2, H] to the largest magnitudes of keys and values [total, H, D]."""
    block, b, h = _place(blocks, heads)
    start, stop = tl.load(starts_ptr + b), tl.load(stops_ptr + b)
    at = start + block * BLOCK + tl.arange(0, BLOCK)
    if start + block * BLOCK < stop:
        where = at[:, None] * row + h * head + tl.arange(0, D)[None, :]
        k = tl.load(k_ptr + where, (at < stop)[:, None], other=0.0).to(tl.float32)
        tl.atomic_max(largest_ptr + h, tl.max(finite_magnitude(k)), sem="relaxed")
        v = tl.load(v_ptr + where, (at < stop)[:, None], other=0.0).to(tl.float32)
        tl.atomic_max(largest_ptr + heads + h, tl.max(finite_magnitude(v)), sem="relaxed")


@triton.jit
def _cast(k_ptr, v_ptr, k8_ptr, v8_ptr, largest_ptr, starts_ptr, stops_ptr, blocks, heads, row, head, total, room,
          D: tl.constexpr, BLOCK: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Write keys as [H, total, D], and values as [H, D, room]."""
    block, b, h = _place(blocks, heads)
    start = tl.load(starts_ptr + b)
    n = (tl.load(stops_ptr + b) - start).to(tl.int32)
    at, column = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    if block * BLOCK < n:
        source = (start + at)[:, None] * row + h * head + column[None, :]
        k = tl.load(k_ptr + source, (at < n)[:, None], other=0.0).to(tl.float32)
        k8_at = k8_ptr + (h.to(tl.int64) * total + start + at)[:, None] * D + column[None, :]
        tl.store(k8_at, to_fp8(k, inverse(_scale(largest_ptr, h)), 0, False, False, PREROUND), (at < n)[:, None])
        v = tl.trans(tl.load(v_ptr + source, (at < n)[:, None], other=0.0).to(tl.float32))
        v8 = to_fp8(v, inverse(_scale(largest_ptr, heads + h)), 0, False, False, PREROUND)
        v8_at = v8_ptr + _first_column(start, b) + (h * D + column).to(tl.int64)[:, None] * room + at[None, :]
        tl.store(v8_at, v8, (at < (n + 15) // 16 * 16)[None, :])


@triton.jit
def _silu_low(q_ptr, k8_ptr, v8_ptr, largest_ptr, out_ptr, offsets_ptr, asked_ptr, times_ptr, position_ptr, time_ptr,
              blocks, heads, total, room, q_row, q_head, stride_p, stride_t, alpha, divisor, D: tl.constexpr,
              POSITIONS: tl.constexpr, BUCKETS: tl.constexpr, ENTRIES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
              PREROUND: tl.constexpr):  # fmt: skip
    block, b, h = _place(blocks, heads)
    start = tl.load(offsets_ptr + b)
    n = (tl.load(offsets_ptr + b + 1) - start).to(tl.int32)
    first = (blocks - 1 - block) * QUERIES  # the programs with the most keys start first
    if first >= n:
        return
    i = first + tl.arange(0, QUERIES)
    q_at = q_ptr + (start + i)[:, None] * q_row + h * q_head + tl.arange(0, D)[None, :]
    q, q_scale = _round_rows(tl.load(q_at, (i < n)[:, None], other=0.0).to(tl.float32), PREROUND)
    q_scale = q_scale * (alpha * _scale(largest_ptr, h))
    k_base = k8_ptr + (h.to(tl.int64) * total + start) * D
    v_base = v8_ptr + h.to(tl.int64) * D * room + _first_column(start, b)
    asked = _load_times(asked_ptr, start, i, n, BUCKETS)
    acc = tl.zeros((QUERIES, D), tl.float32)
    for low in range(0, tl.minimum(first + QUERIES, n), KEYS):
        j = low + tl.arange(0, KEYS)
        k, v = _load_pair(k_base, v_base, j, n, room, D)
        distance = i[:, None] - j[None, :]
        bucket = _find_buckets(asked, _load_times(times_ptr, start, j, n, BUCKETS), BUCKETS)
        s = tl.dot(q, tl.trans(k)) * q_scale[:, None]
        s = _add_biases(s, distance, first - low, bucket, position_ptr, h * stride_p, time_ptr, h * stride_t,
                        POSITIONS, BUCKETS, ENTRIES, QUERIES, KEYS)  # fmt: skip
        weight = tl.where(distance >= 0, s * _sigmoid(s), 0.0)
        acc = tl.dot(to_fp8(weight, WEIGHT, 0, False, False, PREROUND, True), tl.trans(v), acc)
    factor = _scale(largest_ptr, heads + h) / (WEIGHT * divisor)
    _store_events(out_ptr, acc * factor, start, i, n, h, heads, D, D)


@triton.jit
def _softmax_low(q_ptr, k8_ptr, v8_ptr, largest_ptr, mask_ptr, wanted_ptr, seen_ends_ptr, wanted_ends_ptr, out_ptr, lse_ptr,
                 blocks, heads, length, total, room, scale, q_row, q_head,
                 D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    b, h, first = _place_padded(blocks, heads, QUERIES)
    at = first + tl.arange(0, QUERIES)
    begin, end = _ends(wanted_ends_ptr, b, length, True)
    low_key, high_key = _ends(seen_ends_ptr, b, length, True)
    top = tl.full((QUERIES,), float("-inf"), tl.float32)
    sums = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, D), tl.float32)
    wanted = _counts(wanted_ptr, b, at, length, True)
    if (first < end) & (first + QUERIES > begin):
        q_at = q_ptr + (b * length + at)[:, None] * q_row + h * q_head + tl.arange(0, D)[None, :]
        q, q_scale = _round_rows(tl.load(q_at, wanted[:, None], other=0.0).to(tl.float32), PREROUND)
        q_scale = q_scale * (scale * _scale(largest_ptr, h))
        k_base = k8_ptr + (h.to(tl.int64) * total + b * length) * D
        v_base = v8_ptr + h.to(tl.int64) * D * room + _first_column(b * length, b)
        for low in range(low_key // KEYS * KEYS, high_key, KEYS):
            j = low + tl.arange(0, KEYS)
            seen = _counts(mask_ptr, b, j, length, True)
            k, v = _load_pair(k_base, v_base, j, high_key, room, D)
            s = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * q_scale[:, None], float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet
            w = tl.exp2(s - base[:, None])
            shrink = tl.exp2(top - base)
            sums = sums * shrink + tl.sum(w, 1)
            acc = tl.dot(to_fp8(w, SHARE, 0, False, False, PREROUND, True), tl.trans(v), acc * shrink[:, None])
            top = higher
    answered = wanted & (sums != 0)
    some = tl.where(answered, sums, 1.0)
    lse_at = lse_ptr + (b * heads + h) * length + at
    tl.store(lse_at, tl.where(answered, top + tl.log2(some), float("inf")), at < length)
    factor = _scale(largest_ptr, heads + h) / (SHARE * some)
    _store_padded(out_ptr, tl.where(answered[:, None], acc * factor[:, None], 0.0), b, h, heads, at, length, D, D)


@dataclass(frozen=True)
class Case:
    """rows: histories, padded rows or requests; length: of the longest; beams: of a request; padded: lengths from 1 to the longest."""

    name: str
    kind: str
    rows: int
    length: int
    heads: int
    d: int
    padded: bool = False
    beams: int = 0


CASES = [
    Case("hstu, 64 to 320", "silu", 256, 320, 8, 128), Case("interformer", "softmax", 2048, 260, 4, 32, padded=True),
    Case("engine, context 3000", "engine", 8, 3001, 11, 128, beams=512), Case("hstu, 410 to 2048", "silu", 16, 2048, 8, 128),
    Case("long", "softmax", 64, 1024, 8, 64, padded=True), Case("wide", "softmax", 256, 512, 8, 128, padded=True),
    Case("interformer, full", "softmax", 2048, 260, 4, 32), Case("long, full", "softmax", 64, 1024, 8, 64), Case("wide, full", "softmax", 256, 512, 8, 128),
    Case("engine, context 3000, first step", "engine", 8, 3001, 11, 128, beams=1),
]  # fmt: skip
TINY = [Case("hstu", "silu", 2, 24, 1, 32), Case("interformer", "softmax", 2, 21, 2, 32, padded=True), Case("engine", "engine", 2, 33, 1, 32, beams=3)]  # fmt: skip
# All compile for Hopper with at most 112 KiB of shared memory and almost no spills; twice the keys of the largest would spill.
TILES = {
    "silu": [Tile(64, 32, 4, 3, 168), Tile(64, 32, 4, 3), Tile(64, 64), Tile(64, 64, 4, 3), Tile(128, 32, 8, 3), Tile(128, 64, 8)],
    "softmax": [Tile(64, 32, 4, 3), Tile(64, 64), Tile(64, 64, 4, 3), Tile(64, 128, 4, 3), Tile(128, 64, 8, 3), Tile(128, 128, 8, 3)],
    "engine": [Tile(64, 128, 4, 3), Tile(64, 64, 4, 3), Tile(64, 128, 4, 2, 168), Tile(64, 64, 4, 3, 168), Tile(128, 128, 8, 3), Tile(128, 64, 8, 4)],
    "first": [Tile(16, 128, 4, 3), Tile(16, 64, 4, 4), Tile(64, 128, 4, 3)],
}  # fmt: skip
SMALL = [Tile(16, 32), Tile(32, 16)]


class Rows:
    """Operands v, q, k [total, H, d], slices of one projection, and their rounding. Row r is from starts[r] to stops[r]."""

    uses = 1  # calls that share rounded keys and values

    def __init__(self, case: Case, device: str, seed: int, starts: Tensor, stops: Tensor, total: int) -> None:
        self.case, self.device, self.starts, self.stops = case, device, starts.to(device), stops.to(device)
        self.generator = torch.Generator(device=device).manual_seed(seed)
        drawn = self.draw(total, 3, case.heads, case.d)
        # HSTU's operands come out of its activation, after a new layer of weights 1 / sqrt(3 d)
        self.v, self.q, self.k = (F.hardswish(0.577 * drawn) if case.kind == "silu" else drawn).unbind(1)
        self.room = (total + 15 * case.rows) // 16 * 16 + 16

    def draw(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, device=self.device, generator=self.generator)
        return drawn.to(torch.bfloat16 if self.device == "cuda" else torch.float32)

    def launch(self, kernel: Any, *tensors: Tensor, sizes: tuple[int, ...] = (), **options: Any) -> None:
        """Run a kernel over blocks of keys and values."""
        c, block = self.case, 8192 // self.case.d
        blocks = cdiv(c.length, block)
        rows = (self.starts, self.stops, blocks, c.heads, *self.k.stride()[:2])
        kernel[(blocks * c.rows * c.heads,)](self.k, self.v, *tensors, *rows, *sizes, D=c.d, BLOCK=block, **options)

    def find_largest(self) -> Tensor:
        largest = torch.zeros(2, self.case.heads, device=self.device)
        self.launch(_find_largest, largest)
        return largest

    def cast(self, largest: Tensor) -> Made:
        total, heads, d = self.k.shape
        shapes = (heads, total, d), (heads, d, self.room)
        k8, v8 = (torch.empty(shape, dtype=torch.float8_e4m3fn, device=self.device) for shape in shapes)
        self.launch(_cast, k8, v8, largest, sizes=(total, self.room), PREROUND=INTERPRETED)
        return k8, v8, largest


class Silu(Rows):
    """HSTU, whose biases all heads share."""

    def __init__(self, case: Case, device: str, seed: int) -> None:
        offsets = torch.tensor([0, *spread(case.rows, case.length)]).cumsum(0)
        total = int(offsets[-1])
        super().__init__(case, device, seed, offsets[:-1], offsets[1:], total)
        biases = [0.02 * self.draw(1, n).float() for n in (case.length, 64)]
        times = torch.randint(0, 10**6, (total,), device=device, generator=self.generator).sort().values
        asked = torch.cat([times[1:], times[-1:]])
        self.problem = Problem(self.q, self.k, self.v, offsets.to(device), times, asked, *biases, case.length, float(case.length), 1.0)  # fmt: skip
        self.tile = triton_launch.choose("forward", self.q, self.v, case.length)

    def run_plain(self) -> Tensor:
        return triton_launch.run_forward(self.problem, self.tile)

    def run_exactly(self) -> Tensor:
        p = self.problem
        return silu_reference.run(
            self.q.float(), self.k.float(), self.v.float(), p.offsets, max_length=p.max_length, position_bias=p.position_bias,
            time_bias=p.time_bias, times=p.times, query_times=p.asked, divisor=p.divisor, alpha=p.alpha,
        )  # fmt: skip

    def run_low(self, made: Made, tile: Tile) -> Tensor:
        p, out = self.problem, torch.empty(self.v.shape, dtype=self.v.dtype, device=self.device)
        options = {name: value for name, value in p.options(tile).items() if name not in ("DP", "V", "VP", "IEEE")}
        _silu_low[p.grid(tile.queries)](
            self.q, *made, out, *p.inputs(), p.blocks(tile.queries), self.case.heads, len(self.q), self.room, *self.q.stride()[:2], 0, 0, p.alpha, p.divisor,
            PREROUND=INTERPRETED, **options,
        )  # fmt: skip
        return out


class Softmax(Rows):
    """Rows padded at their end; results of padding are not wanted."""

    def __init__(self, case: Case, device: str, seed: int) -> None:
        starts = torch.arange(case.rows) * case.length
        drawn = torch.randint(1, case.length + 1, (case.rows,), generator=torch.Generator().manual_seed(0))
        lengths = drawn if case.padded else torch.full_like(starts, case.length)
        super().__init__(case, device, seed, starts, starts + lengths, case.rows * case.length)
        self.mask = torch.arange(case.length, device=device) < lengths.to(device)[:, None]
        self.heads = [t.unflatten(0, (case.rows, case.length)).transpose(1, 2) for t in (self.q, self.k, self.v)]

    def run_plain(self) -> Tensor:
        out: Tensor = triton_ops.masked_attention(*self.heads, self.mask, self.mask, self.case.d**-0.5)[0]
        return out

    def run_exactly(self) -> Tensor:
        q, k, v = (t.float() for t in self.heads)
        return masked_reference.run(q, k, v, self.mask, self.mask, scale=self.case.d**-0.5)

    def run_low(self, made: Made, tile: Tile) -> Tensor:
        c, mask = self.case, self.mask.view(torch.uint8)
        out = torch.empty(c.rows, c.length, c.heads, c.d, dtype=self.q.dtype, device=self.device)
        lse = torch.empty(c.rows, c.heads, c.length, device=self.device)
        ends = [triton_ops._find_row_ends(self.mask) for _ in range(2)]  # of keys and of queries, as in the library
        blocks = cdiv(c.length, tile.queries)
        _softmax_low[(blocks * c.rows * c.heads,)](
            self.q, *made, mask, mask, *ends, out, lse, blocks, c.heads, c.length, len(self.q), self.room, c.d**-0.5 * triton_ops.LOG2_E, *self.q.stride()[:2],
            D=c.d, QUERIES=tile.queries, KEYS=tile.keys, PREROUND=INTERPRETED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out.transpose(1, 2)


class Engine(Rows):
    """All beams of a request over its context, whose values are its keys (OneRec-V2, 4B-A0.5B)."""

    uses = 14 * 3  # layers, and decoding steps

    def __init__(self, case: Case, device: str, seed: int) -> None:
        self.case, self.device, self.scale = case, device, case.d**-0.5
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.q = self.draw(case.rows, case.beams, case.heads, case.d)
        self.k = self.v = self.draw(case.rows, case.length, case.heads, case.d)
        self.lengths = torch.full((case.rows,), case.length, dtype=torch.int32, device=device)
        self.one = torch.ones((), device=device)

    def find_largest(self) -> Tensor:
        return torch.empty(0)  # there are no scales

    def cast(self, largest: Tensor) -> Made:
        flat = self.k.flatten(2)
        return round_context(flat, flat, self.one, self.case.heads)

    def run_plain(self) -> Tensor:
        return attend(self.q, self.k, self.v, self.lengths, self.scale, True)

    def run_widened(self, made: Made) -> Tensor:
        """Run the bf16 kernel on the E4M3 context."""
        return attend(self.q, made[0], made[0], self.lengths, self.scale, True)

    def run_exactly(self) -> Tensor:
        return beam_reference.run(self.q.float(), self.k.float(), self.v.float(), self.lengths, scale=self.scale)

    def run_low(self, made: Made, tile: Tile) -> Tensor:
        return attend_low(
            self.q,
            *made,
            self.lengths,
            self.scale,
            BeamTile(tile.queries, tile.keys, tile.warps, tile.stages, tile.registers),
        )


SIDES: dict[str, Any] = {"silu": Silu, "softmax": Softmax, "engine": Engine}
Verdicts = dict[tuple[Case, Tile], str]


def tiles_of(case: Case, device: str) -> list[Tile]:
    return SMALL if device == "cpu" else TILES["first" if case.beams == 1 else case.kind]


def explain(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def compiled_as(case: Case) -> Case:
    """Return the case without what has no influence on the compiled kernel."""
    return replace(case, name="", padded=False)


def compile_tile(case: Case, tile: Tile) -> str:
    """Compile and run once: return why that failed, or nothing."""
    try:
        side = SIDES[case.kind](case, "cuda", 0)
        side.run_low(side.cast(side.find_largest()), tile)
        torch.cuda.synchronize()
    except Exception as e:
        return explain(e)
    return ""


def compile_all(cases: list[Case], device: str, until: float) -> Verdicts:
    """Fill Triton's cache, with one process per tile: a CUDA error ends all later work of its process."""
    jobs = list(dict.fromkeys((compiled_as(case), tile) for case in cases for tile in tiles_of(case, device)))
    if device == "cpu":
        return dict.fromkeys(jobs, "")
    verdicts: Verdicts = {}
    workers = max(1, min(14, len(os.sched_getaffinity(0)) - 2))
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        waiting = {job: pool.apply_async(compile_tile, job) for job in jobs}
        for job, result in waiting.items():
            try:
                verdicts[job] = result.get(timeout=max(0.0, until - time.monotonic()))
            except multiprocessing.TimeoutError:
                verdicts[job] = "did not compile and run in time, or its process died"
    return verdicts


def judge(out: Tensor, law: Tensor) -> Conformance:
    """Compare with float32."""
    error = float((out.float() - law).norm() / law.norm())
    return Conformance(error < ERROR, error, ERROR, "" if error < ERROR else f"wrong: relative L2 {error:.3f}")


def check_tile(side: Any, made: Made, law: Tensor, tile: Tile, why: str) -> tuple[dict[str, Any], Conformance | None]:
    """Return what the record says of a tile, and the verdict if it is right."""
    entry: dict[str, Any] = {"tile": asdict(tile), "why": why}
    try:
        found = None if why else judge(side.run_low(made, tile), law)
    except Exception as e:
        return {**entry, "why": explain(e)}, None
    if found is not None:
        entry |= {"why": found.reason, "error": found.error}
    return entry, found if found else None


def spell(interval: Interval, digits: int = 1) -> list[float]:
    """Return the median and its 95 % interval."""
    return [round(x, digits) for x in (interval.value, interval.low, interval.high)]


def measure(case: Case, device: str, verdicts: Verdicts, row: dict[str, Any]) -> None:
    """Check every tile, time those that are right, then the fastest with everything else; all of it goes into the row."""
    make, tiles = SIDES[case.kind], tiles_of(case, device)
    sets = [make(case, device, 0)]
    read = sets[0].q.nbytes + (sets[0].k.nbytes + sets[0].v.nbytes) // 2  # by the FP8 kernel
    sets += [make(case, device, seed) for seed in range(1, sets_needed(read, torch.device(device)))]
    known = [s.find_largest() for s in sets]
    made = [s.cast(largest) for s, largest in zip(sets, known, strict=True)]
    law = sets[0].run_exactly()

    def contend(name: str, call: Any, found: Conformance) -> Contender:
        return Contender(name, [lambda o=o: call(*o) for o in zip(sets, known, made, strict=True)], found)

    plain = contend("bf16", lambda s, g, m: s.run_plain(), judge(sets[0].run_plain(), law))
    checked = [(tile, *check_tile(sets[0], made[0], law, tile, verdicts[compiled_as(case), tile])) for tile in tiles]
    row |= {"sets": len(sets), "uses": make.uses, "tiles": [entry for _, entry, _ in checked]}
    green = [(tile, entry, found) for tile, entry, found in checked if found]
    if not green:
        raise RuntimeError("no tile of the FP8 kernel is right")
    repeats, final = (9, 31) if device == "cuda" else (1, 1)
    racing = [contend(name_of(tile), lambda s, g, m, t=tile: s.run_low(m, t), found) for tile, _, found in green]
    for (_, entry, _), timing in zip(green, time_together(racing, device, repeats=repeats), strict=True):
        entry["us"] = spell(timing.microseconds())
    tile, entry, found = min(green, key=lambda each: each[1]["us"][0])
    contenders = [
        plain, contend("fp8", lambda s, g, m: s.run_low(m, tile), found),
        contend("fp8 with cast", lambda s, g, m: s.run_low(s.cast(g), tile), found), contend("cast", lambda s, g, m: s.cast(g), found),
    ]  # fmt: skip
    if case.kind == "engine":
        contenders.append(contend("bf16 over e4m3", lambda s, g, m: s.run_widened(m), judge(sets[0].run_widened(made[0]), law)))  # fmt: skip
    else:
        contenders.append(contend("fp8 with quantize", lambda s, g, m: s.run_low(s.cast(s.find_largest()), tile), found))  # fmt: skip
        contenders.append(contend("quantize", lambda s, g, m: s.cast(s.find_largest()), found))
    del law
    timings = time_together(contenders, device, repeats=final)
    row |= {"tile": entry["tile"], "method": timings[0].method}
    for timing, contender in zip(timings, contenders, strict=True):
        row[timing.name] = {"us": spell(timing.microseconds()), "speedup": spell(timing.speedup_over(timings[0]), 3)}
        row[timing.name] |= {"error": contender.conformance.error}
    for name in {"cast", "quantize"} & set(row):
        row[name] = {"us": row[name]["us"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA GPU here; --device cpu runs tiny shapes in Triton's interpreter")
    if (args.device == "cpu") != INTERPRETED:
        parser.error(f"--device {args.device} needs TRITON_INTERPRET={int(args.device == 'cpu')}")
    end = time.monotonic() + args.seconds
    cases = TINY if args.device == "cpu" else CASES
    verdicts = compile_all(cases, args.device, end - args.seconds / 3)
    record: dict[str, Any] = {"environment": describe_run(args.device), "rows": []}
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "sizes": asdict(case), "why": ""}
        try:
            if time.monotonic() > end:
                raise TimeoutError("not measured: out of time")
            measure(case, args.device, verdicts, row)
        except Exception as e:
            row["why"] = explain(e)
        record["rows"].append(row)
        times = {name: part["us"][0] for name, part in row.items() if isinstance(part, dict) and "us" in part}
        print(f"{case.name}: {row['why'] or times}", flush=True)
        write_atomically(args.out, json.dumps(record, indent=1).encode())
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return 1 if any(row["why"] for row in record["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
