"""Our quantizers: E4M3, E5M2; tensor, row, 1x128, 128x128 blocks; dynamic or given scales; optionally the transpose."""

import torch
from torch import Tensor

from loka.formats import E4M3, E5M2, ROW, TENSOR, Block, QTensor, Spec
from loka.kernels.backend import Verdict, no
from loka.kernels.op import invoke
from loka.kernels.quantize.call import QuantizeCall, check_scale
from loka.kernels.strides import unit_rows
from loka.kernels.triton_device import triton_runs_on

_BLOCKS = (TENSOR, ROW, Block(1, 128), Block(128, 128))
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
any_alignment = True  # x need not be aligned


def supports(call: QuantizeCall, device: torch.device) -> Verdict:
    """Support FP8 formats, the four blocks, 16- and 32-bit inputs."""
    for spec in (call.spec, call.transpose):
        if spec is None:
            continue
        if spec.format not in (E4M3, E5M2):
            return no(f"writes e4m3 and e5m2, not {spec.format}")
        if spec.block not in _BLOCKS:
            return no(f"blocks are {', '.join(map(str, _BLOCKS))}, not {spec.block}")
        if spec.scale == "e4m3":
            return no("two-level scales are not implemented here")
        if spec.mode != "dynamic" and spec.block not in (TENSOR, ROW):
            return no(f"given scales are per tensor or per row, not {spec.block}")
    if call.in_dtype not in _DTYPES:
        return no(f"reads bf16, fp16 and fp32, not {call.in_dtype}")
    return triton_runs_on(device)


def run(
    x: Tensor,
    spec: Spec | None,
    *,
    scale: Tensor | None = None,
    transpose: Spec | None = None,
    transpose_scale: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[QTensor | None, QTensor | None]:
    """Quantize x [M, K], its transpose [K, M], or both."""
    if spec is not None:
        check_scale(spec, scale, x.shape)
    if transpose is not None:
        check_scale(transpose, transpose_scale, (x.shape[1], x.shape[0]))
    x = unit_rows(x.detach() if x.requires_grad else x)
    seed = _seed(spec, transpose, generator, x.device)
    from loka.kernels.quantize import triton_ops, triton_plan

    written = ["" if wanted is None else str(wanted) for wanted in (spec, transpose)]
    q, q_scale, qt, qt_scale = invoke(triton_ops.quantize, x, written[0], scale, written[1], transpose_scale, seed)
    result = None if spec is None else QTensor(q, q_scale if scale is None else scale.float(), spec)
    if transpose is None:
        return result, None
    if transpose_scale is None and spec is not None and triton_plan.share_scale(spec, transpose):
        qt_scale = q_scale
    return result, QTensor(qt, qt_scale if transpose_scale is None else transpose_scale.float(), transpose)


def _seed(spec: Spec | None, transpose: Spec | None, generator: torch.Generator | None, device: torch.device) -> int:
    """Draw a seed for stochastic rounding; return 0 without drawing if nothing is stochastic."""
    if all(s is None or s.rounding != "stochastic" for s in (spec, transpose)):
        return 0
    where = generator.device if generator is not None else "cpu"
    return int(torch.randint(2**31, (), generator=generator, device=where))


def transpose(data: Tensor) -> Tensor:
    """Return FP8 data [M, K] as [K, M], contiguous along M."""
    from loka.kernels.quantize import triton_ops

    result: Tensor = invoke(triton_ops.transpose, data)
    return result
