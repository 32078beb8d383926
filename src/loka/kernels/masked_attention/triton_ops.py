"""Triton masked attention as torch ops, forward and backward, so that torch.compile does not trace the launch code."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from loka.kernels.masked_attention.triton_kernels import _backward_kv, _backward_q, _find_ends, _forward
from loka.kernels.op import differentiate, fake_of, torch_op
from loka.kernels.strides import cdiv, near_rows, next_power_of_2
from loka.kernels.tile import INTERPRETED

LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Tile:
    """A tile of queries x keys, and the warps and stages of a program."""

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


# 16-bit operands: the fastest of six or seven at heads of 32, 64 and 128 on an H200
# (benchmarks/masked_attention_h200.py). 32-bit operands (EXACT) are multiplied without tensor cores.
TILES = {"forward": Tile(64, 32, stages=3), "backward_q": Tile(64, 32, stages=3), "backward_kv": Tile(32, 64, stages=3)}
EXACT, TINY = Tile(32, 32, 8, 1), Tile(16, 16)


def choose(kernel: str, q: Tensor, k: Tensor) -> Tile:
    """Choose the tile of a kernel, no larger than the operands: few queries (seeds, a single one) are common."""
    tile = TINY if INTERPRETED else EXACT if q.dtype == torch.float32 else TILES[kernel]
    queries, keys = (max(16, next_power_of_2(t.shape[2])) for t in (q, k))
    return Tile(min(tile.queries, queries), min(tile.keys, keys), tile.warps, tile.stages)


def _options(tile: Tile, q: Tensor, wanted: Tensor | None) -> dict[str, Any]:
    return {
        "D": q.shape[3], "DP": max(16, next_power_of_2(q.shape[3])), "WANTED": wanted is not None, "IEEE": q.dtype == torch.float32,
        "QUERIES": tile.queries, "KEYS": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def _find_row_ends(mask: Tensor | None) -> Tensor | None:
    """Return the first allowed position of every row and the one after the last, [B, 2]."""
    if mask is None:
        return None
    ends = torch.empty(mask.shape[0], 2, dtype=torch.int32, device=mask.device)
    block = min(1024, max(16, next_power_of_2(mask.shape[1])))
    _find_ends[(mask.shape[0],)](_bytes(mask), ends, mask.shape[1], BLOCK=block, num_warps=1)
    return ends


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for t in tensors for stride in t.stride()[:3]]


def _empty_like(t: Tensor) -> Tensor:
    """Return an empty [B, H, T, d] with the memory layout [B, T, H, d], as projections write and read it."""
    return t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2)


@torch_op("masked_attention")
def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, wanted: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, T, d] and the base-2 log-sum-exp of its scores, [B, H, T]."""
    (rows, heads, queries, _), (_, shared, keys, _) = q.shape, k.shape
    out, lse = _empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    tile = choose("forward", q, k)
    blocks = cdiv(queries, tile.queries)
    _forward[(blocks * rows * heads,)](
        q, k, v, _bytes(mask), _bytes(wanted), _find_row_ends(mask), _find_row_ends(wanted), out, lse, blocks, heads,
        shared, queries, keys, scale * LOG2_E, *_strides(q, k, v), **_options(tile, q, wanted),
    )  # fmt: skip
    return out, lse


@fake_of(masked_attention)
def _(q, k, v, mask, wanted, scale):  # type: ignore[no-untyped-def]
    return _empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch_op("masked_attention_backward")
def masked_attention_backward(
    grad: Tensor,
    answer: Tensor,  # not `out`: compilers take that for an output argument
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    wanted: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    (rows, heads, queries, _), (_, shared, keys, _) = q.shape, k.shape
    dq, dk, dv = map(_empty_like, (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    masks = (_bytes(mask), _bytes(wanted), _find_row_ends(mask), _find_row_ends(wanted))
    numbers = (heads, shared, queries, keys, scale * LOG2_E, scale)
    tile = choose("backward_q", q, k)
    blocks = cdiv(queries, tile.queries)
    _backward_q[(blocks * rows * heads,)](
        q, k, v, *masks, answer, grad, lse, delta, dq, blocks, *numbers, *_strides(q, k, v, answer, grad), **_options(tile, q, wanted)
    )  # fmt: skip
    tile = choose("backward_kv", q, k)
    blocks = cdiv(keys, tile.keys)
    _backward_kv[(blocks * rows * shared,)](
        q, k, v, *masks, grad, lse, delta, dk, dv, blocks, *numbers, *_strides(q, k, v, grad), **_options(tile, q, wanted)
    )  # fmt: skip
    return dq, dk, dv


@fake_of(masked_attention_backward)
def _(grad, answer, lse, q, k, v, mask, wanted, scale):  # type: ignore[no-untyped-def]
    return _empty_like(q), _empty_like(k), _empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.scale = inputs[5]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    q, k, v, mask, wanted, out, lse = ctx.saved_tensors
    return (*masked_attention_backward(near_rows(grad), out, lse, q, k, v, mask, wanted, ctx.scale), None, None, None)


differentiate(masked_attention, _differentiate, save=_save)


# FLOPs are counted for all pairs, masked or not, as torch does, so that a model's share does not depend on the backend.
@register_flop_formula(torch.ops.loka.masked_attention)
def _flops(q: torch.Size, k: torch.Size, v: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * _product_flops(q, k)


@register_flop_formula(torch.ops.loka.masked_attention_backward)
def _backward_flops(grad: torch.Size, answer: torch.Size, lse: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, *args: Any, **kwargs: Any) -> int:  # fmt: skip
    return 5 * _product_flops(q, k)


def _product_flops(q: torch.Size, k: torch.Size) -> int:
    """Count the FLOPs of one product of queries and keys; torch 2.11's own formula counts none if heads share keys."""
    return 2 * q.numel() * k[2]
