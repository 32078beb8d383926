"""The Triton quantiser as one torch op, so that torch.compile sees a call and not Python. Specs travel as their canonical strings."""

import torch
from torch import Tensor

from loka.formats import E5M2, ROW, TENSOR, Block, Spec, scale_shape
from loka.kernels.quantize import triton_kernels as kernels


def _source(spec: Spec) -> int:
    if spec.block == TENSOR:
        return kernels.SCALAR
    if spec.block == ROW:
        return kernels.VECTOR
    return kernels.GROUPED if spec.block == Block(1, 128) else kernels.SQUARE


@torch.library.custom_op("loka::quantize", mutates_args=())
def quantize(
    x: Tensor, spec: str, scale: Tensor | None, transpose: str, transpose_scale: Tensor | None, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, scale, qt, t_scale. What was not asked for, and scales that were given, come back empty (an op's outputs may not alias its inputs)."""
    want = Spec.parse(spec)
    want_t = Spec.parse(transpose) if transpose else None
    if want_t is None and want.block == ROW and want.mode == "dynamic":
        q, made = kernels.quantize_rows(x, seed=seed, **_options(want))
        return q, made, *_nothing(x)
    scale, transpose_scale = _global_scales(x, want, scale, want_t, transpose_scale)
    options = {f"t_{key}": value for key, value in _options(want_t or want).items()}
    q, made, qt, t_made = kernels.quantize_tiles(
        x, source=_source(want), scale=scale, t_source=_source(want_t) if want_t else kernels.ABSENT,
        t_scale=transpose_scale, seed=seed, **_options(want), **options,
    )  # fmt: skip
    made = made.reshape(scale_shape(x.shape, want.block)) if want.mode == "dynamic" else _nothing(x)[1]
    if want_t is None:
        return q, made, *_nothing(x)
    shape_t = scale_shape((x.shape[1], x.shape[0]), want_t.block)
    return q, made, qt, t_made.reshape(shape_t) if want_t.mode == "dynamic" else _nothing(x)[1]


@quantize.register_fake
def _(x, spec, scale, transpose, transpose_scale, seed):  # type: ignore[no-untyped-def]
    want = Spec.parse(spec)
    results = _fake(x, x.shape, want)
    if not transpose:
        return *results, *_nothing(x)
    return *results, *_fake(x, (x.shape[1], x.shape[0]), Spec.parse(transpose))


def _fake(x: Tensor, shape: tuple[int, ...], spec: Spec) -> tuple[Tensor, Tensor]:
    scale = scale_shape(shape, spec.block) if spec.mode == "dynamic" else (0,)
    return x.new_empty(shape, dtype=spec.format.dtype), x.new_empty(scale, dtype=torch.float32)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=torch.float8_e4m3fn), x.new_empty(0, dtype=torch.float32)


def _options(spec: Spec) -> dict[str, bool]:
    return {
        "e5m2": spec.format == E5M2,
        "pow2": spec.scale in ("pow2", "e8m0"),
        "stochastic": spec.rounding == "stochastic",
    }


def _global_scales(
    x: Tensor, spec: Spec, scale: Tensor | None, spec_t: Spec | None, scale_t: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Scales that no tile can know alone, from one more read of x; given ones as contiguous float32."""

    def needed(s: Spec | None, block: Block) -> bool:
        return s is not None and s.mode == "dynamic" and s.block == block

    row, column = needed(spec, ROW), needed(spec_t, ROW)
    tensor = needed(spec, TENSOR) or needed(spec_t, TENSOR)
    if row or column or tensor:
        per_row, per_column, total = kernels.maxima(x, row=row, column=column, tensor=tensor)
    scale = None if scale is None else scale.to(x.device, torch.float32).contiguous()
    scale_t = None if scale_t is None else scale_t.to(x.device, torch.float32).contiguous()
    if row or needed(spec, TENSOR):
        options = _options(spec)
        scale = kernels.scales_from(per_row if row else total, e5m2=options["e5m2"], pow2=options["pow2"])
    if spec_t is not None and (column or needed(spec_t, TENSOR)):
        options = _options(spec_t)
        scale_t = kernels.scales_from(per_column if column else total, e5m2=options["e5m2"], pow2=options["pow2"])
    return scale, scale_t
