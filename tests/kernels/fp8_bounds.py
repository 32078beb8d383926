"""What a correctly rounded FP8 result may differ by from the exact value, for the tests of fused kernels."""

import torch
from torch import Tensor

from loka.formats import QTensor, expand_scale

# Half a unit in the last place relative to the value, and half the smallest step: E4M3 has 3 mantissa bits, E5M2 has 2.
HALF_ULP = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


def excess(q: QTensor, exact: Tensor, error: Tensor | float = 0.0) -> float:
    """Worst |q - exact| over what rounding to the nearest code may do to a value that was `error` off before; at most 1 is right.

    Half an ulp is taken of the binade the exact value is in, so that the bound is met by some elements, and not only at its edge.
    """
    name = q.spec.format.name
    mantissa, smallest = HALF_ULP[name]
    scale = expand_scale(q.scale.double(), q.shape, q.spec.block)
    scaled = exact.double() / scale
    binade = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=1e-300))))
    allowed = torch.maximum(binade * mantissa, torch.full_like(scaled, smallest)) + error / scale
    target = scaled.clamp(-LARGEST[name], LARGEST[name])
    finite = exact.isfinite()
    assert torch.equal(q.data.float().isfinite(), finite), "special values are not where the law has them"
    ratio = ((q.data.double() - target).abs() / allowed)[finite]
    return float(ratio.max()) if ratio.numel() else 0.0


def scale_error(q: QTensor, exact: Tensor) -> float:
    """Worst relative difference of the scales from those of the exact values."""
    from loka.formats import block_amax

    amax = block_amax(exact, q.spec.block).double()
    expected = torch.where(amax > 0, amax / LARGEST[q.spec.format.name], torch.ones_like(amax))
    if q.spec.scale == "pow2":
        expected = torch.exp2(torch.ceil(torch.log2(expected) - 1e-7))
    return float(((q.scale.double() - expected) / expected).abs().max()) if q.scale.numel() else 0.0
