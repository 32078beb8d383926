"""The Triton quantiser as one torch op, so that torch.compile sees a call and not Python. Specs travel as their canonical strings."""

from functools import lru_cache

import torch
from torch import Tensor

from loka.formats import E5M2, ROW, TENSOR, Block, Spec, scale_shape
from loka.kernels.op import fake_of, torch_op
from loka.kernels.quantize import triton_kernels as kernels

_parse = lru_cache(Spec.parse)  # every call of the op has its specs as text


def _source(spec: Spec) -> int:
    if spec.block == TENSOR:
        return kernels.SCALAR
    if spec.block == ROW:
        return kernels.VECTOR
    return kernels.GROUPED if spec.block == Block(1, 128) else kernels.SQUARE


@torch_op("quantize")
def quantize(
    x: Tensor, spec: str, scale: Tensor | None, transpose: str, transpose_scale: Tensor | None, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, scale, qt, t_scale. What was not asked for (an empty spec), scales that were given, and a t_scale that is the scale (`share_scale`) come back empty: an op's outputs may
    alias neither its inputs nor one another."""
    want, want_t = (_parse(text) if text else None for text in (spec, transpose))
    if want_t is None:
        return *_quantize_alone(x, _parse(spec), scale, seed), *_nothing(x)
    turned = (x.shape[1], x.shape[0])
    if want is not None and _rows_come_first(x, want, want_t):
        return _rows_then_transpose(x, want, want_t, transpose_scale, seed)
    scale, transpose_scale = _global_scales(x, want, scale, want_t, transpose_scale)
    if want is None:
        qt, t_made = kernels.quantize_transposed(x, source=_source(want_t), scale=transpose_scale, seed=seed, **_options(want_t))  # fmt: skip
        return *_nothing(x), qt, _made(t_made, turned, want_t)
    options = {f"t_{key}": value for key, value in _options(want_t).items()}
    q, made, qt, t_made = kernels.quantize_both(
        x, source=_source(want), scale=scale, t_source=_source(want_t), t_scale=transpose_scale, seed=seed,
        **_options(want), **options,
    )  # fmt: skip
    made_t = x.new_empty(0, dtype=torch.float32) if share_scale(want, want_t) else _made(t_made, turned, want_t)
    return q, _made(made, x.shape, want), qt, made_t


def share_scale(spec: Spec, transpose: Spec) -> bool:
    """Whether a matrix and its transpose have one scale, made here: of the whole tensor, by the same rule."""
    whole = all(s.block == TENSOR and s.mode == "dynamic" for s in (spec, transpose))
    return whole and _pair(spec) == _pair(transpose)


def _rows_come_first(x: Tensor, spec: Spec, spec_t: Spec) -> bool:
    """Whether two passes without a pass for maxima do it: rows, then the transpose; where the transpose needs its columns' maxima, rows keep them."""
    columns = spec_t.block == ROW and spec_t.mode == "dynamic"
    tensor = spec_t.block == TENSOR and spec_t.mode == "dynamic"
    return (
        spec.block == ROW
        and spec.mode == "dynamic"
        and not tensor
        and not (columns and x.shape[1] > kernels.WIDEST_ROW)
    )


def _rows_then_transpose(
    x: Tensor, spec: Spec, spec_t: Spec, scale_t: Tensor | None, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options, turned = _options(spec_t), (x.shape[1], x.shape[0])
    if spec_t.block == ROW and spec_t.mode == "dynamic":
        q, made, scale_t = kernels.quantize_rows_and_columns(
            x, seed=seed, t_e5m2=options["e5m2"], t_pow2=options["pow2"], **_options(spec)
        )
    else:
        q, made = kernels.quantize_rows(x, seed=seed, **_options(spec))
        scale_t = None if scale_t is None else scale_t.to(x.device, torch.float32).contiguous()
    qt, t_made = kernels.quantize_transposed(
        x, source=_source(spec_t), scale=scale_t, seed=seed, backwards=True, **options
    )
    return q, _made(made, x.shape, spec), qt, _made(t_made, turned, spec_t)


def _quantize_alone(x: Tensor, spec: Spec, scale: Tensor | None, seed: int) -> tuple[Tensor, Tensor]:
    if spec.block == ROW and spec.mode == "dynamic":
        return kernels.quantize_rows(x, seed=seed, **_options(spec))
    scale, _ = _global_scales(x, spec, scale, None, None)
    q, made = kernels.quantize_tiles(x, source=_source(spec), scale=scale, seed=seed, **_options(spec))
    return q, _made(made, x.shape, spec)


def _made(scale: Tensor, shape: tuple[int, ...], spec: Spec) -> Tensor:
    if spec.mode != "dynamic":
        return scale.new_empty(0)
    return scale.reshape(scale_shape(shape, spec.block)) if spec.block in (TENSOR, ROW) else scale


@fake_of(quantize)
def _(x, spec, scale, transpose, transpose_scale, seed):  # type: ignore[no-untyped-def]
    plain = _fake(x, x.shape, Spec.parse(spec)) if spec else _nothing(x)
    turned = _fake(x, (x.shape[1], x.shape[0]), Spec.parse(transpose)) if transpose else _nothing(x)
    if spec and transpose and share_scale(Spec.parse(spec), Spec.parse(transpose)):
        turned = turned[0], x.new_empty(0, dtype=torch.float32)
    return *plain, *turned


def _fake(x: Tensor, shape: tuple[int, ...], spec: Spec) -> tuple[Tensor, Tensor]:
    q = kernels.aligned(*shape, spec.format.dtype, x.device)
    if spec.mode != "dynamic":
        return q, x.new_empty(0, dtype=torch.float32)
    if spec.block in (TENSOR, ROW):
        return q, x.new_empty(scale_shape(shape, spec.block), dtype=torch.float32)
    return q, kernels.block_scales(*shape, _source(spec), x.device)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=torch.float8_e4m3fn), x.new_empty(0, dtype=torch.float32)


def _options(spec: Spec) -> dict[str, bool]:
    return {
        "e5m2": spec.format == E5M2,
        "pow2": spec.scale in ("pow2", "e8m0"),
        "stochastic": spec.rounding == "stochastic",
    }


def _global_scales(
    x: Tensor, spec: Spec | None, scale: Tensor | None, spec_t: Spec | None, scale_t: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Scales that no tile can know alone, from one more read of x; given ones as contiguous float32."""

    def needed(s: Spec | None, block: Block) -> bool:
        return s is not None and s.mode == "dynamic" and s.block == block

    row, column = needed(spec, ROW), needed(spec_t, ROW)
    tensor = needed(spec, TENSOR) or needed(spec_t, TENSOR)
    scale = None if scale is None else scale.to(x.device, torch.float32).contiguous()
    scale_t = None if scale_t is None else scale_t.to(x.device, torch.float32).contiguous()
    if not (row or column or tensor):
        return scale, scale_t
    owners = [spec] * row + [spec_t] * column + [spec if needed(spec, TENSOR) else spec_t] * tensor
    options = [_pair(owner) for owner in owners]
    made = kernels.global_scales(x, row=row, column=column, tensor=tensor, options=options)
    total = made.pop() if tensor else None
    if row or needed(spec, TENSOR):
        scale = made.pop(0) if row else total
    if column or needed(spec_t, TENSOR):
        scale_t = made.pop() if column else total
        if not column and spec is not None and needed(spec, TENSOR) and _pair(spec) != _pair(spec_t):
            scale_t = kernels.global_scales(x, row=False, column=False, tensor=True, options=[_pair(spec_t)])[0]
    return scale, scale_t


def _pair(spec: Spec) -> tuple[bool, bool]:
    return spec.format == E5M2, spec.scale in ("pow2", "e8m0")


transpose = torch_op("transpose_fp8")(kernels.transpose)


@fake_of(transpose)
def _(data):  # type: ignore[no-untyped-def]
    return kernels.aligned(data.shape[1], data.shape[0], data.dtype, data.device)
