"""`activation` on a tile in registers, for our Triton kernels. ACTIVATION is a place in `activation.ACTIVATIONS`.

The numbers: 1 / sqrt(2) = 0.7071..., 1 / sqrt(2 pi) = 0.3989..., 2 sqrt(2 / pi) = 1.5957..., log2(e) / 2 = 0.7213...
"""

import triton
import triton.language as tl

from loka.kernels.tile import activate as _activate
from loka.kernels.tile import activation_slope as _activation_slope
from loka.kernels.tile import sigmoid

_RELU = tl.constexpr(1)
_GELU = tl.constexpr(4)
_GELU_TANH = tl.constexpr(5)
_TANH = tl.constexpr(6)
_SIGMOID = tl.constexpr(7)
_LEAKY = tl.constexpr(8)


@triton.jit
def activate_tile(z, ACTIVATION: tl.constexpr, PREROUND: tl.constexpr):
    """The activation of z; NaN stays NaN."""
    if ACTIVATION == _RELU:
        return tl.where(z < 0.0, 0.0, z)  # a maximum would turn NaN into 0
    elif ACTIVATION == _GELU:
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == _GELU_TANH:
        return z * sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z), PREROUND)
    elif ACTIVATION == _TANH:
        return 2.0 * sigmoid(2.0 * z, PREROUND) - 1.0
    elif ACTIVATION == _SIGMOID:
        return sigmoid(z, PREROUND)
    elif ACTIVATION == _LEAKY:
        return tl.where(z > 0.0, z, z * 0.01)
    else:
        return _activate(z, ACTIVATION, PREROUND)


@triton.jit
def slope_tile(z, ACTIVATION: tl.constexpr, PREROUND: tl.constexpr):
    """d activate / dz; at a kink torch's convention."""
    if ACTIVATION == _GELU:
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * (
            0.3989422804014327 * tl.exp2(z * z * -0.7213475204444817)
        )
    elif ACTIVATION == _GELU_TANH:
        s = sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z), PREROUND)
        return s + z * s * (1.0 - s) * (1.5957691216057308 * (1.0 + 0.134145 * z * z))
    elif ACTIVATION == _TANH:
        s = sigmoid(2.0 * z, PREROUND)
        return 4.0 * s * (1.0 - s)
    elif ACTIVATION == _SIGMOID:
        s = sigmoid(z, PREROUND)
        return s * (1.0 - s)
    elif ACTIVATION == _LEAKY:
        return tl.where(z > 0.0, 1.0, 0.01)
    else:
        return _activation_slope(z, ACTIVATION, PREROUND)
