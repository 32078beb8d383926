"""The reference: for each expert, dequantize, multiply in float32 and round once. Any format, block and device.

    y_r = sum_k x_rk w_enk                      e is the expert of row r: offsets[e] <= r < offsets[e + 1]
    swiglu(h) = silu(gate) * up                 gate and up are the first and second half of the columns, in float32
    combine_t = sum_j weight_tj y[row of visit (t, j)] + add_t     in float32, in the order of j, add last

The fused form uses gate and up before they are rounded to 16 bits; `swiglu` alone uses its input as given.

Offsets are copied to the host and checked, so a CUDA graph cannot capture this backend.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor, Spec, quantize
from loka.kernels.backend import accept_every_call
from loka.kernels.grouped_mm.call import Permutation
from loka.kernels.op import fake_of, torch_op

supports = accept_every_call


def run(
    x: QTensor | Tensor, w: QTensor | Tensor, offsets: Tensor, *, out_dtype: torch.dtype, fast_accum: bool = False
) -> Tensor:
    """See `loka.kernels.grouped_mm.grouped_mm`. `fast_accum` is ignored."""
    out: Tensor = _multiply(*_unpack(x), *_unpack(w), offsets, out_dtype)
    return out


def _unpack(x: QTensor | Tensor) -> tuple[Tensor, Tensor | None, str]:
    return (x.data, x.scale, str(x.spec)) if isinstance(x, QTensor) else (x, None, "")


@torch_op("grouped_mm_reference")
def _multiply(
    x: Tensor, sx: Tensor | None, x_spec: str, w: Tensor, sw: Tensor | None, w_spec: str, offsets: Tensor, out_dtype: torch.dtype
) -> Tensor:  # fmt: skip
    rows = _dequantize(x, sx, x_spec)
    out = rows.new_empty(x.shape[0], w.shape[1])
    for expert, (start, stop) in enumerate(spans(offsets, x.shape[0])):
        if stop > start:
            scale = sw if sw is None or sw.dim() == 0 else sw[expert]
            torch.mm(rows[start:stop], _dequantize(w[expert], scale, w_spec).T, out=out[start:stop])
    return out if out.dtype == out_dtype else out.to(out_dtype)


@fake_of(_multiply)
def _(
    x: Tensor,
    sx: Tensor | None,
    x_spec: str,
    w: Tensor,
    sw: Tensor | None,
    w_spec: str,
    offsets: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1], dtype=out_dtype)


def _dequantize(data: Tensor, scale: Tensor | None, spec: str) -> Tensor:
    return data.float() if scale is None else QTensor(data, scale, Spec.parse(spec)).dequantize()


def spans(offsets: Tensor, rows: int) -> list[tuple[int, int]]:
    """Return where each expert's rows start and stop, as Python ints."""
    at = offsets.tolist()
    if at[0] != 0 or at[-1] != rows or any(a > b for a, b in pairwise(at)):
        raise ValueError(f"offsets must rise from 0 to the {rows} rows, got {at}")
    return list(pairwise(at))


def run_swiglu(
    x: QTensor | Tensor,
    w: QTensor | Tensor,
    offsets: Tensor,
    *,
    spec: Spec | None,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
) -> QTensor | Tensor:
    """See `loka.kernels.grouped_mm.grouped_swiglu`. SwiGLU is applied to the float32 product."""
    y = _swiglu(run(x, w, offsets, out_dtype=torch.float32))
    if spec is None:
        return y if out_dtype == torch.float32 else y.to(out_dtype)
    return quantize(y, spec)


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def swiglu(h: Tensor, spec: Spec | None) -> QTensor | Tensor:
    """See `loka.kernels.grouped_mm.swiglu_quantize`."""
    y = _swiglu(h.float())
    return y.to(h.dtype) if spec is None else quantize(y, spec)


def permute(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return order, offsets and inverse of a `Permutation`."""
    visits = ids.flatten().long()
    order = visits.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add(0, visits, torch.ones_like(visits))
    offsets = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    places = torch.arange(visits.shape[0], device=ids.device)
    return order, offsets, torch.empty_like(order).scatter(0, order, places)


def gather(x: QTensor | Tensor, permutation: Permutation) -> QTensor | Tensor:
    """See `loka.kernels.grouped_mm.gather`."""
    tokens = permutation.tokens
    if not isinstance(x, QTensor):
        return x[tokens]
    if x.spec.block.rows != 1 and x.scale.dim() > 0:
        raise ValueError(f"rows of {x.spec} share scales with their neighbours: quantize per row, 1x128 or per tensor")
    data = x.data.view(torch.uint8)[tokens].view(x.data.dtype)
    return QTensor(data, x.scale if x.scale.dim() == 0 else x.scale[tokens], x.spec)


def combine(y: Tensor, permutation: Permutation, weights: Tensor, add: Tensor | None) -> Tensor:
    """See `loka.kernels.grouped_mm.combine`."""
    visits = y[permutation.inverse].view(*weights.shape, -1)
    wide = torch.promote_types(y.dtype, torch.float32)
    out: Tensor = (visits.to(wide) * weights.to(wide).unsqueeze(-1)).sum(1)
    out = out if add is None else out + add.to(wide)
    return out if out.dtype == y.dtype else out.to(y.dtype)
