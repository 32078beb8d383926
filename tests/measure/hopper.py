"""A correct kernel as Hopper's FP8 tensor cores would run it: what the conformance gate must let pass.

32 products and the running sum are aligned to the largest of them and truncated to a grid 2^-13 below its exponent; the sum moves to a wide
register every `chunk` products. The exponent of a product is that of its factors added up, where a subnormal has the exponent of the smallest normal.
"""

import torch
from torch import Tensor

from loka.formats import QTensor, decode, expand_scale
from loka.kernels.scaled_mm.call import MatmulCall


def accumulate(a: Tensor, b: Tensor, chunk: int, *, bits: int = 13, smallest: float = 2.0**-6) -> Tensor:
    """a [M, K] @ b [N, K]^T in float64 holding exactly what the hardware would; `smallest` normal of the format."""
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
    running = torch.zeros_like(total)
    powers = [_power(x, smallest) for x in (a, b)]
    for start in range(0, a.shape[1], 32):
        products = a[:, None, start : start + 32] * b[None, :, start : start + 32]
        terms = torch.cat([products, running[..., None]], dim=-1)
        sizes = powers[0][:, None, start : start + 32] * powers[1][None, :, start : start + 32]
        sizes = torch.cat([sizes, running[..., None].abs()], dim=-1)
        exponent = torch.frexp(torch.maximum(sizes, terms.abs()).amax(dim=-1, keepdim=True)).exponent - 1
        grid = torch.ldexp(torch.ones_like(terms[..., :1]), exponent - bits)
        running = (torch.trunc(terms / grid) * grid).sum(dim=-1)
        if (start + 32) % chunk == 0:
            total, running = total + running, torch.zeros_like(running)
    return total + running


def _power(x: Tensor, smallest: float) -> Tensor:
    """2^exponent of every element as the hardware has it; 0 of a zero."""
    size = torch.where(x != 0, x.abs().clamp(min=smallest), x.abs())
    return torch.where(x != 0, torch.ldexp(torch.ones_like(x), torch.frexp(size).exponent - 1), size)


class Hopper:
    """A scaled_mm backend on that arithmetic, with a place to plant bugs: `scales` may change the expanded scales before they are used."""

    def __init__(self, scales=None) -> None:
        self.scales = scales or (lambda a, b: (a, b))

    def run(self, a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
        call = MatmulCall.of(a, b, out_dtype=out_dtype, fast_accum=fast_accum)
        left, right = decode(a.data, a.spec.format).double(), decode(b.data, b.spec.format).double()
        scale_a, scale_b = self.scales(a.scale.double().clone(), b.scale.double().clone())
        scale_a = expand_scale(scale_a, a.shape, a.spec.block).expand(a.shape)
        scale_b = expand_scale(scale_b, b.shape, b.spec.block).expand(b.shape)
        if a.spec.block.cols == b.spec.block.cols == -1:
            chunk = call.k if fast_accum else 128
            sums = accumulate(left, right, chunk or 1) * scale_a[:, :1] * scale_b[:, :1].T
            return sums.float().to(out_dtype)
        out = torch.zeros(call.m, call.n, dtype=torch.float64)
        for start in range(0, call.k, 128):
            part = slice(start, start + 128)
            out += accumulate(left[:, part], right[:, part], 128) * scale_a[:, start, None] * scale_b[None, :, start]
        return out.float().to(out_dtype)
