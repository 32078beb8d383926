"""Inputs for tests and benchmarks: shared generators, so that what was checked is what is timed.

All distributions are zero-mean. A tensor is a function of (shape, distribution, seed) on a device type:

    normal            N(0, 1)
    uniform           U(-1, 1)
    lognormal_rows    N(0, 1) times a factor e^(2 z) per row: rows of very different size, where a scale per tensor
                      hurts; the last row is the largest
    outlier_channels  N(0, 1) with 1 of 64 columns 50 times larger: range inside a scaling group
    zero_rows         N(0, 1) with every third row zero: empty bags of a jagged batch
    alike_rows        N(0, 1), but only three different rows: whatever groups equal rows
    nan_row           N(0, 1) with one NaN in the middle row: it must reach exactly the outputs that depend on it
"""

from dataclasses import replace

import torch
from torch import Tensor

from loka.formats import QTensor, Spec, block_amax, quantize, scale_from_amax
from loka.kernels.quantize.call import QuantizeCall
from loka.kernels.scaled_mm.call import MatmulCall

DISTRIBUTIONS = ("normal", "uniform", "lognormal_rows", "outlier_channels", "zero_rows", "alike_rows", "nan_row")


Shape = tuple[int, int, int]  # M, K, N


def draw(
    rows: int,
    cols: int,
    *,
    distribution: str = "normal",
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw a matrix from a named distribution.

    Args:
        rows, cols: its shape.
        distribution: one of `DISTRIBUTIONS`.
        seed: the same seed gives the same matrix on the same kind of device.
        device, dtype: of the result; drawn in float32.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"no distribution {distribution!r}; there are {', '.join(DISTRIBUTIONS)}")
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator, device=device)
    if distribution == "uniform":
        x = torch.rand(rows, cols, generator=generator, device=device) * 2 - 1
    elif distribution == "lognormal_rows":
        factor = torch.exp(2 * torch.randn(rows, 1, generator=generator, device=device))
        if rows:  # the largest row is the last, where a kernel's last tile may be wrong
            largest = int(factor.argmax())
            factor[[largest, -1]] = factor[[-1, largest]]
        x = x * factor
    elif distribution == "outlier_channels":
        x[:, seed % 64 :: 64] *= 50
    elif distribution == "zero_rows":
        x[::3] = 0
    elif distribution == "alike_rows":
        x = x[torch.arange(rows, device=device) // 2 % 3]  # pairs of neighbors, and rows at a distance
    elif distribution == "nan_row" and rows and cols:
        x[rows // 2, cols // 2] = torch.nan
    return x.to(dtype)


def quantized(x: Tensor, spec: Spec, *, outer_major: bool = False) -> QTensor:
    """Quantize with the reference implementation; static and delayed specs use the scale that fits x.

    `outer_major` stores 2-D scales with the rows contiguous, the layout in which cuBLASLt and DeepGEMM read 1x128
    scales and which a quantizer can write for free. Values and shape are the same.
    """
    if spec.mode == "dynamic":
        q = quantize(x, spec)
    else:
        q = quantize(x, spec, scale=scale_from_amax(block_amax(x, spec.block), spec))
    if outer_major and q.scale.dim() == 2:
        q = replace(q, scale=q.scale.t().contiguous().t())
    return q


def matmul_operands(
    call: MatmulCall,
    *,
    seed: int = 0,
    distribution: str = "normal",
    device: torch.device | str = "cpu",
    outer_major: bool = False,
) -> tuple[QTensor, QTensor]:
    """Draw the two quantized operands of a call. Only `a` gets zero, NaN or equal rows, since `b` is the weight."""
    weight = "normal" if distribution in ("zero_rows", "alike_rows", "nan_row") else distribution
    a = draw(call.m, call.k, distribution=distribution, seed=2 * seed, device=device)
    b = draw(call.n, call.k, distribution=weight, seed=2 * seed + 1, device=device)
    return (
        quantized(a, call.a, outer_major=outer_major and call.a.block.rows == 1),
        quantized(b, call.b, outer_major=outer_major and call.b.block.rows == 1),
    )


def quantize_input(
    call: QuantizeCall, *, seed: int = 0, distribution: str = "normal", device: torch.device | str = "cpu"
) -> Tensor:
    """Draw the input of a QuantizeCall."""
    return draw(call.m, call.k, distribution=distribution, seed=seed, device=device, dtype=call.in_dtype)
