"""Mixture-of-experts kernels: a persistent grouped GEMM with SwiGLU in its epilogue, sorting, gathering and combining.

Grouped GEMM. Rows of x are sorted by expert; w [E, N, K] is viewed as one matrix [E N, K], so one TMA descriptor covers
all experts. Expert e has cdiv(rows of e, BM) * cdiv(N, BN) tiles. They are numbered expert by expert, and within an
expert rows first, so that concurrent programs share a tile of weights in L2 and each weight is read from memory once.
Every program finds the expert of a tile from the running sum of these counts, which it computes from the offsets.
Nothing is read back to the host: the grid is as large as the GPU, and the number of tiles is data. The last rows of an
expert's last tile belong to the next expert: they are computed but not stored, hence the masked store instead of TMA.

Block scales. With 1x128 scales of x and 128x128 scales of w, a 128-wide partial sum is multiplied by sx[row] * sw, one
number per row for the whole tile (BN divides 128), so promotion is one fused multiply-add per element. It still needs a
second accumulator, so tiles are small and several programs share a multiprocessor: one promotes, another multiplies.

SwiGLU. A tile computes the same columns of gate and up, two accumulators from one x tile, so silu(gate) * up never
leaves the registers. With 128 columns a tile row is exactly one 1x128 scaling group.

Sorting is a stable counting sort in two passes over blocks: count how often each expert is visited, then place each
visit. A token visits an expert at most once, so a visit's place within its block is the number of earlier tokens there
that chose the same expert: a running sum over tokens instead of visits. The sort is deterministic, uses no atomics and
puts no limit on load imbalance. A router that counts while it chooses needs only the second pass.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loka.kernels.quantize.triton_kernels import aligned, block_scales
from loka.kernels.scaled_mm.triton_kernels import processors, tma_ready
from loka.kernels.strides import cdiv, next_power_of_2
from loka.kernels.tile import finite_magnitude, inverse, scale_of, sigmoid, to_fp8
from loka.kernels.triton_launcher import quick

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
NONE, ROWS, BLOCKS = 0, 2, 3  # kinds of scales: none, per row of both operands, 1x128 and 128x128
VISITS = 64 if INTERPRETED else 256  # largest block of the counting sort
_ROWS = tl.constexpr(2)
_BLOCKS = tl.constexpr(3)


@triton.jit
def _locate(tile, offsets_ptr, E, num_n, BM: tl.constexpr, EP: tl.constexpr):
    """Return a tile's expert (E or more beyond the last tile), first row, end of the expert's rows, and column tile."""
    expert = tl.arange(0, EP)
    start = tl.load(offsets_ptr + expert, expert < E, other=0)
    stop = tl.load(offsets_ptr + expert + 1, expert < E, other=0)
    tiles = (stop - start + BM - 1) // BM * num_n
    ends = tl.cumsum(tiles, 0)
    e = tl.sum((ends <= tile).to(tl.int32), 0)  # number of experts that end before it; EP beyond the last tile
    mine = expert == e
    local = tile - tl.sum(tl.where(mine, ends - tiles, 0), 0)
    first = tl.sum(tl.where(mine, start, 0), 0)
    last = tl.sum(tl.where(mine, stop, 0), 0)
    high = tl.maximum((last - first + BM - 1) // BM, 1)
    return e, first + local % high * BM, last, local // high


@triton.jit
def _partial(a, b, acc, sa, sb, SCALES: tl.constexpr, EXACT: tl.constexpr, BK: tl.constexpr, IEEE: tl.constexpr):
    """Add one step along K to acc. With block scales, sa [BM] and the scalar sb multiply the partial sum."""
    if SCALES == _BLOCKS:
        return acc + tl.dot(a, b.T) * (sa * sb)[:, None]
    elif EXACT:
        return tl.dot(a, b.T, acc, max_num_imprecise_acc=BK)
    else:
        return tl.dot(a, b.T, acc, input_precision="ieee" if IEEE else "tf32")


@quick
@triton.jit(do_not_specialize=["M", "E", "num_tiles"])
def _grouped(a_desc, b_desc, c_ptr, sa_ptr, sb_ptr, offsets_ptr, M, N, K, E, num_tiles, sa_stride, sa_stride_k,
             sb_stride_e, sb_stride, sb_stride_k,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EP: tl.constexpr,
             SCALES: tl.constexpr, EXACT: tl.constexpr, IEEE: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    num_n, num_k = tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        e, first, last, tile_n = _locate(tile, offsets_ptr, E, num_n, BM, EP)
        if e < E:
            row = first + tl.arange(0, BM)
            column = tile_n * BN + tl.arange(0, BN)
            inside = (row < last) & (row < M)
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            for k in range(num_k):
                a = a_desc.load([first, k * BK])
                b = b_desc.load([e * N + tile_n * BN, k * BK])
                if SCALES == _BLOCKS:
                    sa = tl.load(sa_ptr + row * sa_stride + k * sa_stride_k, inside, other=0.0)
                    sb = tl.load(sb_ptr + e * sb_stride_e + (tile_n * BN // 128) * sb_stride + k * sb_stride_k)
                else:
                    sa, sb = 0.0, 0.0
                acc = _partial(a, b, acc, sa, sb, SCALES, EXACT, BK, IEEE)
            if SCALES == _ROWS:
                acc *= tl.load(sa_ptr + row, inside, other=0.0)[:, None]
                acc *= tl.load(sb_ptr + e * N + column, column < N, other=0.0)[None, :]
            tl.store(
                c_ptr + row.to(tl.int64)[:, None] * N + column[None, :],
                acc.to(OUT),
                inside[:, None] & (column < N)[None, :],
            )


@quick
@triton.jit(do_not_specialize=["M", "E", "num_tiles"])
def _grouped_swiglu(a_desc, b_desc, c_ptr, cs_ptr, sa_ptr, sb_ptr, offsets_ptr, M, F, K, E, num_tiles,
                    sa_stride, sa_stride_k, sb_stride_e, sb_stride, sb_stride_k, cs_stride, cs_stride_k, c_stride,
                    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EP: tl.constexpr,
                    SCALES: tl.constexpr, EXACT: tl.constexpr, IEEE: tl.constexpr,
                    FP8: tl.constexpr, POW2: tl.constexpr, OUT: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    num_n, num_k = tl.cdiv(F, BN), tl.cdiv(K, BK)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        e, first, last, tile_n = _locate(tile, offsets_ptr, E, num_n, BM, EP)
        if e < E:
            row = first + tl.arange(0, BM)
            column = tile_n * BN + tl.arange(0, BN)
            inside = (row < last) & (row < M)
            gate = tl.zeros((BM, BN), dtype=tl.float32)
            up = tl.zeros((BM, BN), dtype=tl.float32)
            for k in range(num_k):
                a = a_desc.load([first, k * BK])
                g = b_desc.load([e * 2 * F + tile_n * BN, k * BK])
                u = b_desc.load([e * 2 * F + F + tile_n * BN, k * BK])
                if SCALES == _BLOCKS:
                    sa = tl.load(sa_ptr + row * sa_stride + k * sa_stride_k, inside, other=0.0)
                    sb_at = sb_ptr + e * sb_stride_e + k * sb_stride_k
                    sg = tl.load(sb_at + (tile_n * BN // 128) * sb_stride)
                    su = tl.load(sb_at + ((F + tile_n * BN) // 128) * sb_stride)
                else:
                    sa, sg, su = 0.0, 0.0, 0.0
                gate = _partial(a, g, gate, sa, sg, SCALES, EXACT, BK, IEEE)
                up = _partial(a, u, up, sa, su, SCALES, EXACT, BK, IEEE)
            if SCALES == _ROWS:
                by_row = tl.load(sa_ptr + row, inside, other=0.0)[:, None]
                gate *= by_row * tl.load(sb_ptr + e * 2 * F + column, column < F, other=0.0)[None, :]
                up *= by_row * tl.load(sb_ptr + e * 2 * F + F + column, column < F, other=0.0)[None, :]
            y = gate * sigmoid(gate, PREROUND) * up
            there = inside[:, None] & (column < F)[None, :]
            at = c_ptr + row.to(tl.int64)[:, None] * c_stride + column[None, :]
            if FP8:
                y = tl.where(there, y, 0.0)
                scale = scale_of(tl.max(finite_magnitude(y), 1), False, POW2)
                tl.store(cs_ptr + row.to(tl.int64) * cs_stride + tile_n * cs_stride_k, scale, inside)
                tl.store(at, to_fp8(y, inverse(scale)[:, None], 0, False, False, PREROUND), there)
            else:
                tl.store(at, y.to(OUT), there)


@quick
@triton.jit
def _swiglu(h_ptr, q_ptr, s_ptr, M, F, stride_h, stride_q, s_stride, s_stride_k,
            BM: tl.constexpr, BF: tl.constexpr, FP8: tl.constexpr, POW2: tl.constexpr, PREROUND: tl.constexpr):  # fmt: skip
    """Compute silu(gate) * up of a tile, with one scale per tile row: BF is 128 or spans the whole row."""
    wide = tl.cdiv(F, BF)
    tile_m, tile_f = (tl.program_id(0) // wide).to(tl.int64), tl.program_id(0) % wide
    row = tile_m * BM + tl.arange(0, BM)
    column = tile_f * BF + tl.arange(0, BF)
    there = (row < M)[:, None] & (column < F)[None, :]
    at = h_ptr + row[:, None] * stride_h + column[None, :]
    gate = tl.load(at, there, other=0.0).to(tl.float32)
    up = tl.load(at + F, there, other=0.0).to(tl.float32)
    y = gate * sigmoid(gate, PREROUND) * up
    if FP8:
        scale = scale_of(tl.max(finite_magnitude(y), 1), False, POW2)
        tl.store(s_ptr + row * s_stride + tile_f * s_stride_k, scale, row < M)
        y = to_fp8(y, inverse(scale)[:, None], 0, False, False, PREROUND)
        tl.store(q_ptr + row[:, None] * stride_q + column[None, :], y, there)
    else:
        tl.store(q_ptr + row[:, None] * stride_q + column[None, :], y.to(q_ptr.dtype.element_ty), there)


@quick
@triton.jit
def _count(ids_ptr, counts_ptr, V, E, BM: tl.constexpr, EP: tl.constexpr):
    """Count the visits of a block by expert."""
    visit = tl.program_id(0) * BM + tl.arange(0, BM)
    chosen = tl.load(ids_ptr + visit, visit < V, other=-1).to(tl.int32)
    expert = tl.arange(0, EP)
    counts = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + tl.program_id(0) * E + expert, counts, expert < E)


@quick
@triton.jit
def _place(ids_ptr, counts_ptr, order_ptr, offsets_ptr, inverse_ptr, T, E, blocks, width,
           COLUMNS: tl.constexpr, BM: tl.constexpr, EP: tl.constexpr, BB: tl.constexpr):  # fmt: skip
    """Place a block's visits: after the rows of earlier experts, earlier blocks and earlier tokens of the block."""
    block = tl.program_id(0)
    expert = tl.arange(0, EP)
    total = tl.zeros((EP,), tl.int32)
    before = tl.zeros((EP,), tl.int32)
    for start in range(0, blocks, BB):
        other = start + tl.arange(0, BB)
        known = (other < blocks)[:, None] & (expert < width)[None, :]
        counts = tl.load(counts_ptr + other[:, None] * width + expert[None, :], known, other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < block)[:, None], counts, 0), 0)
    ends = tl.cumsum(total, 0)
    if block == 0:
        tl.store(offsets_ptr + 1 + expert, ends, expert < E)
        tl.store(offsets_ptr, 0)
    token = block * BM + tl.arange(0, BM)
    taken = tl.zeros((BM, EP), tl.int32)
    for j in tl.static_range(COLUMNS):
        chosen = tl.load(ids_ptr + token * COLUMNS + j, token < T, other=-1).to(tl.int32)
        taken += (chosen[:, None] == expert[None, :]).to(tl.int32)
    rows = tl.cumsum(taken, 0) - taken + (ends - total + before)[None, :]
    for j in tl.static_range(COLUMNS):
        visit = token * COLUMNS + j
        chosen = tl.load(ids_ptr + visit, token < T, other=-1).to(tl.int32)
        row = tl.sum(tl.where(chosen[:, None] == expert[None, :], rows, 0), 1)
        valid = (chosen >= 0) & (chosen < E)
        tl.store(inverse_ptr + visit, row.to(tl.int64), valid)
        tl.store(order_ptr + row, visit.to(tl.int64), valid)


@quick
@triton.jit
def _gather(x_ptr, s_ptr, order_ptr, out_ptr, t_ptr, V, W, G, top, stride_x, s_stride, s_stride_k, t_stride, t_stride_k,
            stride_out, BM: tl.constexpr, BW: tl.constexpr, GP: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Copy rows, as words, and their scales."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    token = tl.load(order_ptr + row, row < V, other=0) // top
    for start in range(0, W, BW):
        word = start + tl.arange(0, BW)
        there = (row < V)[:, None] & (word < W)[None, :]
        x = tl.load(x_ptr + token[:, None] * stride_x + word[None, :], there)
        tl.store(out_ptr + row.to(tl.int64)[:, None] * stride_out + word[None, :], x, there)
    if SCALED:
        group = tl.arange(0, GP)
        there = (row < V)[:, None] & (group < G)[None, :]
        s = tl.load(s_ptr + token[:, None] * s_stride + group[None, :] * s_stride_k, there)
        tl.store(t_ptr + row.to(tl.int64)[:, None] * t_stride + group[None, :] * t_stride_k, s, there)


@quick
@triton.jit
def _combine(y_ptr, inverse_ptr, w_ptr, add_ptr, out_ptr, T, D, stride_y, stride_add, stride_w,
             TOP: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """Compute the weighted sum of each token's rows."""
    token = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    there = (token < T)[:, None] & (column < D)[None, :]
    total = tl.zeros((BM, BD), tl.float32)
    for j in tl.static_range(TOP):
        row = tl.load(inverse_ptr + token * TOP + j, token < T, other=0)
        weight = tl.load(w_ptr + token * stride_w + j, token < T, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row[:, None] * stride_y + column[None, :], there, other=0.0).to(tl.float32)
        total += y * weight[:, None]
    if ADD:
        total += tl.load(add_ptr + token.to(tl.int64)[:, None] * stride_add + column[None, :], there, other=0.0).to(
            tl.float32
        )
    tl.store(out_ptr + token.to(tl.int64)[:, None] * D + column[None, :], total.to(out_ptr.dtype.element_ty), there)


Tile = tuple[int, int, int, int, int]  # BM, BN, warps, stages, programs per multiprocessor
_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@lru_cache(maxsize=4096)
def tile_for(rows: int, n: int, experts: int, *, doubled: bool, wide: bool) -> Tile:
    """Choose a tile by the mean number of rows per expert. `wide` means 16-bit or 32-bit operands.

    With few rows a GEMM reads weights and little else, and 64 rows waste least. With many, several small programs per
    multiprocessor hide each other's epilogues and the second accumulator of block scales (`doubled`). The choices were
    measured (benchmarks/results/h200/generative_kernels.json).
    """
    mean = rows / experts
    if wide:
        return (128, 256, 8, 3, 1) if mean > 64 and n >= 256 else (64, 128, 4, 4, 2)
    if doubled:
        return (64, 128, 4, 3, 3) if mean > 64 else (64, 128, 4, 4, 2)
    if mean > 96 and n >= 256:
        return (128, 128, 4, 3, 2)
    return (64, 128, 4, 4, 2)


def _swiglu_tile_for(mean: float, *, blocks: bool, wide: bool) -> Tile:
    """Choose a tile, as `tile_for` does, for the GEMM with two accumulators for gate and up."""
    if wide:
        return (128, 128, 8, 3, 1) if mean > 96 else (64, 128, 4, 2, 2)
    if blocks:
        return (128, 128, 8, 3, 1) if mean > 256 else (64, 128, 8, 4, 1)
    return (128, 128, 8, 4, 1)


def _launch_options(tile: Tile) -> dict[str, int]:
    """Return launch options. Registers are capped if that many programs per multiprocessor would not fit otherwise."""
    _, _, warps, stages, resident = tile
    registers = 65536 // (resident * warps * 32) // 8 * 8
    capped = {"maxnreg": registers} if registers < 255 and not INTERPRETED else {}
    return {"num_warps": warps, "num_stages": stages, **capped}


def _grid(rows: int, columns: int, experts: int, tile: Tile, device: torch.device) -> tuple[int, int]:
    """Return the number of programs and an upper bound of the tiles: every expert may end in a partial tile."""
    bm, bn, _, _, resident = tile
    tiles = (cdiv(rows, bm) + min(experts, rows)) * cdiv(columns, bn)
    return min(processors(device) * resident, tiles), tiles


def _strides(scale: Tensor | None) -> tuple[int, int]:
    return (scale.stride(-2), scale.stride(-1)) if scale is not None and scale.dim() >= 2 else (0, 0)


def _operands(a: Tensor, b: Tensor, tile: Tile) -> tuple:
    """Return TMA descriptors of a and of b as one matrix, and the size of a step along K."""
    bm, bn, _, _, _ = tile
    bk = 128 if a.element_size() == 1 else 64
    a, b = tma_ready(a), b if b.data_ptr() % 16 == 0 else b.clone()
    flat = b.view(b.shape[0] * b.shape[1], b.shape[2])
    return TensorDescriptor.from_tensor(a, [bm, bk]), TensorDescriptor.from_tensor(flat, [bn, bk]), bk


def gemm(
    a: Tensor, b: Tensor, sa: Tensor | None, sb: Tensor | None, offsets: Tensor, *, scales: int, exact: bool,
    out_dtype: torch.dtype, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Multiply a [M, K] by b [E, N, K], whose rows start at multiples of 16 bytes."""
    (m, k), (experts, n, _) = a.shape, b.shape
    out = torch.empty(m, n, device=a.device, dtype=out_dtype)
    doubled = scales == BLOCKS or (exact and scales != NONE)
    tile = tile or tile_for(m, n, experts, doubled=doubled, wide=a.element_size() > 1)
    programs, tiles = _grid(m, n, experts, tile, a.device)
    a_desc, b_desc, bk = _operands(a, b, tile)
    sb_strides = (0, 0, 0) if sb is None else (sb.stride(0), *_strides(sb))
    _grouped[(programs,)](
        a_desc, b_desc, out, sa, sb, offsets, m, n, k, experts, tiles, *_strides(sa), *sb_strides,
        tile[0], tile[1], bk, next_power_of_2(experts), scales, exact and scales == ROWS,
        a.dtype == torch.float32, _TL[out_dtype], **_launch_options(tile),
    )  # fmt: skip
    return out


def gemm_swiglu(
    a: Tensor, b: Tensor, sa: Tensor | None, sb: Tensor | None, offsets: Tensor, *, scales: int, exact: bool,
    fp8: bool, pow2: bool, out_dtype: torch.dtype, tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return [M, F] and its 1x128 scales (empty if not `fp8`). A tile is 128 columns wide: one scaling group."""
    (m, k), (experts, n, _) = a.shape, b.shape
    f = n // 2
    out = aligned(m, f, torch.float8_e4m3fn, a.device) if fp8 else torch.empty(m, f, device=a.device, dtype=out_dtype)
    cs = block_scales(m, f, 3, a.device) if fp8 else torch.empty(0, 0, device=a.device)
    wide = a.element_size() > 1
    tile = tile or _swiglu_tile_for(m / experts, blocks=scales == BLOCKS, wide=wide)
    if wide and tile[3] > 3:
        raise ValueError(f"a pipeline of {tile[3]} stages of 16-bit operands does not fit")
    programs, tiles = _grid(m, f, experts, tile, a.device)
    a_desc, b_desc, bk = _operands(a, b, tile)
    sb_strides = (0, 0, 0) if sb is None else (sb.stride(0), *_strides(sb))
    _grouped_swiglu[(programs,)](
        a_desc, b_desc, out, cs, sa, sb, offsets, m, f, k, experts, tiles, *_strides(sa), *sb_strides, *_strides(cs),
        out.stride(0), tile[0], tile[1], bk, next_power_of_2(experts), scales,
        exact and scales == ROWS, a.dtype == torch.float32, fp8, pow2, _TL[out_dtype], INTERPRETED,
        **_launch_options(tile),
    )  # fmt: skip
    return out, cs


def swiglu(h: Tensor, fp8: bool, whole: bool, pow2: bool) -> tuple[Tensor, Tensor]:
    """Return [M, F] and its scales: one per row (`whole`) or per 128 columns; empty if not `fp8`."""
    m, f = h.shape[0], h.shape[1] // 2
    out = aligned(m, f, torch.float8_e4m3fn, h.device) if fp8 else torch.empty(m, f, device=h.device, dtype=h.dtype)
    if not fp8:
        scale = torch.empty(0, 0, device=h.device)
    elif whole:
        scale = torch.empty(m, 1, device=h.device, dtype=torch.float32)
    else:
        scale = block_scales(m, f, 3, h.device)
    if m and f:
        bf = next_power_of_2(f) if whole and fp8 else 128
        bm = 32 if bf == 128 else max(1, 4096 // bf)
        _swiglu[(cdiv(m, bm) * cdiv(f, bf),)](
            h, out, scale, m, f, h.stride(0), out.stride(0), *_strides(scale), bm, bf, fp8, pow2, INTERPRETED,
            num_warps=4,
        )  # fmt: skip
    elif fp8:
        scale.fill_(1.0)
    return out, scale


def permute(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return order, offsets and inverse of contiguous ids [T, top]. A token's experts need not differ."""
    visits, padded = ids.numel(), next_power_of_2(experts)
    block = block_of(padded)
    counts = torch.empty(cdiv(visits, block), experts, dtype=torch.int32, device=ids.device)
    if visits:
        _count[(len(counts),)](ids, counts, visits, experts, block, padded, num_warps=_warps_for(block * padded))
    return place(ids.view(visits, 1), counts, experts, block)  # each visit as a token of its own


def block_of(padded: int) -> int:
    """Return the visits per program for `padded` experts.

    The compiler may use block x padded words of shared memory, and a multiprocessor has less than 256 x 256.
    """
    return min(VISITS, 32768 // padded)


def place(ids: Tensor, counts: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Run the second pass: return order, offsets and inverse of contiguous ids [T, columns], distinct in each row.

    `counts` [blocks, experts or more] holds how often each block of `block` tokens visits each expert.
    """
    (tokens, columns), (blocks, width) = ids.shape, counts.shape
    order, inverse_ = (torch.empty(tokens * columns, dtype=torch.int64, device=ids.device) for _ in range(2))
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    if tokens == 0:
        return order, offsets.zero_(), inverse_
    padded = next_power_of_2(width)
    _place[(blocks,)](
        ids, counts, order, offsets, inverse_, tokens, experts, blocks, width, columns, block, padded, 32,
        num_warps=_warps_for(block * padded),
    )  # fmt: skip
    return order, offsets, inverse_


def _warps_for(elements: int) -> int:
    """Return the number of warps for a sorting program that holds so many elements in registers."""
    return 4 if elements <= 16384 else 8


def gather(x: Tensor, scale: Tensor | None, order: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the gathered rows of x [T, K] and their scales, which are laid out column by column."""
    visits, k, item = order.shape[0], x.shape[1], x.element_size()
    if item == 1:
        out = aligned(visits, k, x.dtype, x.device)
    else:
        out = torch.empty(visits, k, dtype=x.dtype, device=x.device)
    groups = 0 if scale is None else scale.shape[1]
    moved = torch.empty(groups, visits, dtype=torch.float32, device=x.device).T
    if visits and k:
        source, target, words = _word_views(x, out, k)
        _gather[(cdiv(visits, 4),)](
            source, scale, order, target, moved, visits, words, groups, top, source.stride(0), *_strides(scale),
            *_strides(moved), target.stride(0), 4, 512, next_power_of_2(max(groups, 1)), scale is not None, num_warps=4,
        )  # fmt: skip
    return out, moved


def _word_views(x: Tensor, out: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
    """Return views of both as 4-byte words if sizes and alignment allow, else as integers of the element size."""
    item = x.element_size()
    per = 4 // item
    fits = per > 1 and k % per == 0 and all(t.stride(0) % per == 0 and t.data_ptr() % 4 == 0 for t in (x, out))
    if fits:
        return *(_as_words(t, k) for t in (x, out)), k // per
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[item]
    return x.view(kind), out.view(kind), k


def _as_words(t: Tensor, k: int) -> Tensor:
    item = t.element_size()
    flat = torch.as_strided(t, (t.shape[0], t.stride(0)), (t.stride(0), 1)) if t.stride(0) >= k else t
    return flat.view(torch.int32)[:, : k * item // 4]


def combine(y: Tensor, inverse_: Tensor, weights: Tensor, add: Tensor | None) -> Tensor:
    """Return the weighted sums [T, d]."""
    (tokens, top), d = weights.shape, y.shape[1]
    out = torch.empty(tokens, d, dtype=y.dtype, device=y.device)
    if tokens and d:
        _combine[(cdiv(tokens, 4), cdiv(d, 512))](
            y, inverse_, weights, add, out, tokens, d, y.stride(0), 0 if add is None else add.stride(0),
            weights.stride(0), top, 4, 512, add is not None, num_warps=4,
        )  # fmt: skip
    return out
