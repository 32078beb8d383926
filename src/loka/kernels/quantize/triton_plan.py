"""What a call of the quantizer launches, and the tensors that it makes: found once for sizes, dtypes and specs."""

from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from loka.formats import E5M2, ROW, TENSOR, Block, Spec, scale_shape
from loka.kernels.plans import planned
from loka.kernels.quantize import triton_kernels as kernels
from loka.kernels.quantize.triton_grouped_kernels import bind_grouped
from loka.kernels.quantize.triton_maxima_kernels import Maxima, bind_maxima, bind_scales
from loka.kernels.quantize.triton_pairs_kernels import are_pairs
from loka.kernels.strides import Maker, cdiv, maker, rows_maker
from loka.kernels.triton_bound import Bound

SOURCES = {
    TENSOR: kernels.SCALAR,
    ROW: kernels.VECTOR,
    Block(1, 128): kernels.GROUPED,
    Block(128, 128): kernels.SQUARE,
}


class Plan(NamedTuple):
    """A call of the quantizer.

    Args:
        q, qt: make the outputs; None for an unwanted one.
        scale, t_scale: make dynamic scales; None for given ones, and for a t_scale that equals the scale.
        shared: the t_scale equals the scale.
        maxima: what is found of x beforehand.
        reduce: makes scales of the maxima of rows and columns.
        write: quantizes; None for an x without elements.
        operands: picks the arguments of `write` from (x, q, scale, qt, t_scale, maxima of parts).
    """

    q: Maker | None
    scale: Maker | None
    qt: Maker | None
    t_scale: Maker | None
    shared: bool
    maxima: Maxima | None
    reduce: Bound | None
    write: Bound | None
    operands: Callable[[tuple[Any, ...]], tuple[Any, ...]]


@planned
def plan_of(
    shape: tuple[int, int], stride: int, dtype: torch.dtype, device: torch.device, near: bool, spec: str, transpose: str, seed: int
) -> Plan:  # fmt: skip
    """Return the plan for an x [M, K] with unit stride along K. `near`: it starts at a multiple of 4 bytes."""
    (m, k), turned = shape, (shape[1], shape[0])
    want, want_t = _parse(spec), _parse(transpose)
    out, out_t = _output_of(want), _output_of(want_t)
    shared = want is not None and want_t is not None and share_scale(want, want_t)
    made = (
        _data_maker(want, shape, device), _scale_maker(want, shape, device),
        _data_maker(want_t, turned, device), None if shared else _scale_maker(want_t, turned, device), shared,
    )  # fmt: skip
    if not (m and k):
        return Plan(*made, None, None, None, tuple)
    wide, words = cdiv(k, 16) * 16, cdiv(m, 16) * 4
    rows, columns = (w is not None and w.mode == "dynamic" and w.block == ROW for w in (want, want_t))
    if want_t is None and rows:  # needs no maxima beforehand
        return Plan(*made, None, None, kernels.bind_rows(m, k, stride, wide, out, seed), itemgetter(0, 1, 2))
    pairs = are_pairs(k, stride, dtype, near=near)
    whole = kernels.PARTS in (out.source, out_t.source)
    maxima, reduce = None, None
    if rows or columns or whole:
        maxima = bind_maxima(m, k, stride, dtype, device, pairs=pairs, row=rows, column=columns, tensor=whole)
        reduce = bind_scales(m, k, maxima, out[1:3], out_t[1:3])
    parts = maxima.sizes[2] if maxima is not None and whole else 0
    if want_t is None:
        return Plan(
            *made, maxima, reduce, kernels.bind_tiles(m, k, stride, wide, out, parts, seed), itemgetter(0, 1, 2, 5)
        )
    plain = not (out.e5m2 or out.stochastic or out_t.e5m2 or out_t.stochastic)
    if plain and out.source == out_t.source == kernels.GROUPED and pairs:
        grouped = bind_grouped(m, k, stride, dtype, wide, words, out.pow2, out_t.pow2)
        return Plan(*made, None, None, grouped, itemgetter(0, 1, 2, 3, 4))
    both = kernels.bind_both(m, k, stride, wide, words, out, out_t, parts, seed, backwards=maxima is not None)
    return Plan(*made, maxima, reduce, both, tuple)


@lru_cache
def _parse(text: str) -> Spec | None:
    """Return a spec, None for ""; cached for the plans that are not."""
    return Spec.parse(text) if text else None


def share_scale(spec: Spec, transpose: Spec) -> bool:
    """Return True if a matrix and its transpose have the same dynamic tensor scale."""
    whole = all(s.block == TENSOR and s.mode == "dynamic" for s in (spec, transpose))
    return whole and (spec.format == E5M2) == (transpose.format == E5M2) and _is_pow2(spec) == _is_pow2(transpose)


def _is_pow2(spec: Spec) -> bool:
    return spec.scale in ("pow2", "e8m0")


def _output_of(spec: Spec | None) -> kernels.Output:
    """Return a spec as the kernels take it."""
    if spec is None:
        return kernels.UNWANTED
    source = kernels.PARTS if spec.block == TENSOR and spec.mode == "dynamic" else SOURCES[spec.block]
    return kernels.Output(source, spec.format == E5M2, _is_pow2(spec), spec.rounding == "stochastic")


def _data_maker(spec: Spec | None, shape: tuple[int, int], device: torch.device) -> Maker | None:
    """Return a maker of quantized data, with rows that start at multiples of 16 elements, as TMA requires for FP8."""
    return None if spec is None else rows_maker(*shape, 16, spec.format.dtype, device)


def _scale_maker(spec: Spec | None, shape: tuple[int, int], device: torch.device) -> Maker | None:
    """Return a maker of the scales of a dynamic spec, None for given ones."""
    if spec is None or spec.mode != "dynamic":
        return None
    if spec.block in (TENSOR, ROW):
        return maker(scale_shape(shape, spec.block), torch.float32, device)
    return kernels.scales_maker(*shape, SOURCES[spec.block], device)
