"""The fused layer: what a call launches, found once for its sizes, and the call itself."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from loka.kernels.activation import ACTIVATIONS
from loka.kernels.dropout import draw_numbers
from loka.kernels.fused_linear import triton_kernels as kernels
from loka.kernels.fused_linear.call import NORM_BLOCK
from loka.kernels.fused_linear.launch import Work, properties_of, special_cost, stored_width
from loka.kernels.fused_linear.triton_kernels import (
    FINISH_ROWS,
    KEEP_TYPES,
    OUT_GROUPED,
    OUT_STATIC,
    aligned_maker,
    launch_for,
)
from loka.kernels.quantize.triton_kernels import scales_maker
from loka.kernels.scaled_mm.triton_kernels import GROUPED, scale_strides, tma_ready
from loka.kernels.strides import Maker, cdiv, maker
from loka.kernels.tile import INTERPRETED
from loka.kernels.triton_bound import PLANS, Bound, bind

_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class _Plan(NamedTuple):
    """Makers of the results and of the sums of split tiles, None for the absent ones, and the launches."""

    y: Maker
    y_scale: Maker | None
    y_t: Maker | None
    yt_scale: Maker | None
    z: Maker | None
    rstd: Maker | None
    part: Maker | None
    launch: Bound
    finish: Bound | None


@lru_cache(maxsize=PLANS)
def _plan(
    m: int, k: int, n: int, astride: bool, device: torch.device, sa_strides: tuple[int, int], sb_strides: tuple[int, int], bias: bool, amax: bool,
    a_source: int, b_source: int, norm: bool, activation: int, slope: float, form: int, out_dtype: torch.dtype, pow2: bool, keep: int, transpose: bool,
    given: tuple[int, ...] | None, draw: bool, p: float, stream: int,
) -> _Plan:  # fmt: skip
    """`astride`: rows of an operand start within 32-byte sectors."""
    grouped, doubled = form == OUT_GROUPED, a_source == GROUPED or b_source >= GROUPED
    kept_bytes = KEEP_TYPES[keep].itemsize if keep else 0
    work = Work(m, k, n, out_dtype.itemsize, kept_bytes, transpose, norm, grouped, doubled, astride=astride, special=special_cost(ACTIVATIONS[activation]))  # fmt: skip
    chosen = launch_for(work, given, device)
    bm, bn, bk, warps, stages, group, resident, split = chosen.numbers
    tiles, slots = cdiv(m, bm) * cdiv(n, bn), properties_of(device).processors * resident
    whole = tiles if split == 1 else tiles - tiles % slots
    wide = stored_width(chosen, grouped)
    numbers = draw_numbers(p, stream, draw=draw)
    shape = a_source, b_source, bias, norm, activation, form, out_dtype == torch.float8_e5m2, pow2, keep
    rest = amax, slope, _TL.get(out_dtype, tl.bfloat16), draw, INTERPRETED
    launch = bind(
        kernels._fused, (min(slots, max(whole, (tiles - whole) * split)),), *numbers, m, n, k, whole, split, *sa_strides, *sb_strides,
        bm, bn, bk, group, wide < bn, split > 1, *shape, transpose, *rest, num_warps=warps, num_stages=stages,
        blocks={0: [bm, bk], 1: [bn, bk], 2: [bm, wide], 3: [wide, bm], 4: [bm, wide], 5: [bm, min(bn, 64)]}, views={13: torch.int32},
    )  # fmt: skip
    finish = bind(
        kernels._finish, (tiles - whole, bm // FINISH_ROWS), *numbers, m, n, whole, bm, bn, FINISH_ROWS, group, split, wide < bn, *shape, *rest, num_warps=4,
        blocks={1: [FINISH_ROWS, wide], 2: [FINISH_ROWS, wide]}, views={9: torch.int32},
    )  # fmt: skip
    new = {"dtype": torch.float32, "device": device}
    return _Plan(
        y=aligned_maker(m, n, out_dtype, device),
        y_scale=scales_maker(m, n, GROUPED, device) if grouped else maker((), **new) if draw and form == OUT_STATIC else None,
        y_t=aligned_maker(n, m, out_dtype, device) if transpose else None,
        yt_scale=scales_maker(n, m, GROUPED, device) if grouped and transpose else None,
        z=aligned_maker(m, n, KEEP_TYPES[keep], device) if keep else None,
        rstd=maker((m, cdiv(n, NORM_BLOCK)), **new) if keep and norm else None,
        part=maker(((tiles - whole) * split * bm, bn), **new) if split > 1 else None,
        launch=launch,
        finish=finish if split > 1 else None,
    )  # fmt: skip


def fused_linear(
    a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None, out_scale: Tensor | None, amax: Tensor | None,
    a_source: int, b_source: int, norm: bool, activation: int, slope: float, form: int, out_dtype: torch.dtype,
    pow2: bool, keep: int, transpose: bool, launch: list[int] | None, seed: Tensor | None, p: float, stream: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return y, y_scale, y_t, yt_scale, z, rstd; `amax` is raised in place. One kernel, a second one for split tiles.

    Rows of a and b start at multiples of 16 bytes (TMA). A given scale is returned as y_scale only with dropout (a
    seed), which multiplies it by a factor. No argument is named `out`: torch's compiler treats a call with one as
    mutating everything and merges nothing across it, not even the quantizations of an input that several chains read.
    """
    a, b = tma_ready(a), tma_ready(b)
    plan = _plan(
        *a.shape, b.shape[0], (a.stride(0) | b.stride(0)) & 31 != 0, a.device,
        scale_strides(sa) if a_source >= GROUPED else (0, 0), scale_strides(sb) if b_source >= GROUPED else (0, 0), bias is not None, amax is not None,
        a_source, b_source, norm, activation, slope, form, out_dtype, pow2, keep, transpose,
        None if launch is None else tuple(launch), seed is not None, p, stream,
    )  # fmt: skip
    y, y_scale, y_t = plan.y(), plan.y_scale and plan.y_scale(), plan.y_t and plan.y_t()
    yt_scale, z, rstd = plan.yt_scale and plan.yt_scale(), plan.z and plan.z(), plan.rstd and plan.rstd()
    part = plan.part and plan.part()
    plan.launch(a, b, y, y_t, z, part, sa, sb, bias, out_scale, y_scale, yt_scale, rstd, amax, seed)
    if plan.finish is not None:
        plan.finish(part, y, z, sa, sb, bias, out_scale, y_scale, rstd, amax, seed)
    return y, y_scale, y_t, yt_scale, z, rstd
