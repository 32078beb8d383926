"""Our fused norm + activation + quantise, rows up to 16384 wide."""

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, ROW, TENSOR, Block, QTensor, Spec
from loka.kernels.backend import Verdict, no
from loka.kernels.norm_quantize.call import ACTIVATIONS, EPS, NORMS, NormCall, NormResult
from loka.kernels.strides import unit_rows
from loka.kernels.triton_device import triton_runs_on

WIDEST = 16384
_SOURCES = {TENSOR: 1, ROW: 2, Block(1, 128): 3}


def supports(call: NormCall, device: torch.device) -> Verdict:
    """FP8 with a static scale per tensor, or dynamic scales per row or 1x128."""
    spec = call.spec
    if spec.format not in (E4M3, E5M2) or spec.rounding != "nearest" or spec.scale == "e4m3":
        return no(f"writes e4m3 or e5m2 rounded to nearest, not {spec}")
    if spec.block not in _SOURCES:
        return no(f"scales are per tensor, row or 1x128, not {spec.block}")
    if (spec.block == TENSOR) == (spec.mode == "dynamic"):
        return no(f"{spec}: a tensor's scale must be given (a row cannot know it); row and 1x128 scales are made here")
    if call.k > WIDEST:
        return no(f"a row must fit in registers: at most {WIDEST} wide, not {call.k}")
    if call.k == 0:
        return no("a norm over nothing")
    if call.in_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return no(f"reads bf16, fp16 and fp32, not {call.in_dtype}")
    return triton_runs_on(device)


def run(
    x: Tensor,
    spec: Spec,
    *,
    norm: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    eps: float | None = None,
    scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> NormResult:
    """Forward."""
    if (spec.mode == "dynamic") != (scale is None):
        raise ValueError(f"{spec} {'makes its own scale' if scale is not None else 'needs a scale'}")
    if x.shape[0] == 0:
        from loka.kernels.norm_quantize import reference

        return reference.run(
            x,
            spec,
            norm=norm,
            weight=weight,
            bias=bias,
            residual=residual,
            activation=activation,
            eps=eps,
            scale=scale,
            out_dtype=out_dtype,
        )  # nothing to compute: the law defines what an empty result looks like
    from loka.kernels.norm_quantize import triton_ops

    q, made, h, y, mean, rstd = triton_ops.norm_quantize(
        unit_rows(x), None if residual is None else unit_rows(residual), _dense(weight), _dense(bias), scale, NORMS.index(norm), ACTIVATIONS.index(activation),
        EPS[norm] if eps is None else eps, spec.format.dtype, _SOURCES[spec.block], spec.scale in ("pow2", "e8m0"), out_dtype,
    )  # fmt: skip
    return NormResult(
        QTensor(q, made if scale is None else scale.float().reshape(()), spec),
        None if out_dtype is None else y,
        x if residual is None else h,
        mean if norm == "layer" else None,
        rstd,
    )


def _dense(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.contiguous()


def gradient(
    dy: Tensor,
    h: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    *,
    norm: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    dh: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx (= dresidual), dweight, dbias."""
    if dy.shape[0] == 0:
        from loka.kernels.norm_quantize import reference

        return reference.gradient(dy, h, mean, rstd, norm=norm, weight=weight, bias=bias, activation=activation, dh=dh)
    from loka.kernels.norm_quantize import triton_ops

    dx, dw, db = triton_ops.norm_gradient(
        unit_rows(dy), h.contiguous(), _dense(weight), _dense(bias), mean, rstd, None if dh is None else unit_rows(dh), NORMS.index(norm), ACTIVATIONS.index(activation)
    )  # fmt: skip
    return dx, None if weight is None else dw, None if bias is None else db
