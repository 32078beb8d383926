"""Error metrics of a low-precision result compared with its reference.

    mere          mean( |out - ref| / max(|ref|, 0.01 rms(ref)) )     guarded mean element-wise relative error
    relative_l2   ||out - ref|| / ||ref||
    sqnr          -20 log10(relative_l2)  in dB
    cosine        <out, ref> / (||out|| ||ref||)

The guard matters: for nearly Gaussian outputs the unguarded mean is infinite, and its estimate grows with the sample.
Everything is accumulated in float64, after dividing both tensors by the same power of two, so that no square overflows.
NaN in, NaN out; an empty tensor has an error of 0; a zero reference with a non-zero result has an infinite one.
"""

import math

import torch
from torch import Tensor

from loka.formats.format import decode
from loka.formats.quantize import QTensor, expand_scale

MERE_GUARD = 0.01  # smallest denominator, as a share of rms(ref)


def _normalize(out: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """Check shapes and return both in float64, divided by the same power of two."""
    if out.shape != ref.shape:
        raise ValueError(f"result and reference differ in shape: {tuple(out.shape)} and {tuple(ref.shape)}")
    out, ref = out.detach().double(), ref.detach().double()
    peak = max((float(t.abs().nan_to_num(0.0, 0.0, 0.0).amax()) for t in (ref, out) if t.numel()), default=0.0)
    unit = math.ldexp(1.0, math.frexp(peak)[1] - 1) if peak else 1.0  # exact, so no metric changes
    return out / unit, ref / unit


def mere(out: Tensor, ref: Tensor, *, guard: float = MERE_GUARD) -> float:
    """Compute the guarded mean element-wise relative error.

    Args:
        out: the result.
        ref: the reference.
        guard: smallest denominator, as a share of rms(ref); 0 gives the unguarded mean.

    Returns:
        The mean.

    Example:
        >>> mere(torch.tensor([1.1]), torch.tensor([1.0])) < 0.11
        True
    """
    if not guard >= 0:
        raise ValueError(f"guard is a share of rms(ref), 0 or more, got {guard}")
    out, ref = _normalize(out, ref)
    if ref.numel() == 0:
        return 0.0
    error = (out - ref).abs()
    floor = guard * ref.square().mean().sqrt()
    relative = error / torch.maximum(ref.abs(), floor)
    return float(torch.where(error == 0, error, relative).mean())  # 0 / 0 is no error


def relative_l2(out: Tensor, ref: Tensor) -> float:
    """Compute the norm of the error over the norm of the reference.

    Args:
        out: the result.
        ref: the reference.

    Returns:
        The ratio.

    Example:
        >>> relative_l2(torch.ones(4), torch.ones(4))
        0.0
    """
    out, ref = _normalize(out, ref)
    error, norm = float((out - ref).norm()), float(ref.norm())
    if norm == 0:
        return 0.0 if error == 0 else (math.nan if math.isnan(error) else math.inf)
    return error / norm


def sqnr(out: Tensor, ref: Tensor) -> float:
    """Compute the signal-to-quantization-noise ratio in dB.

    Args:
        out: the result.
        ref: the reference.

    Returns:
        Decibels; infinite for an exact result.

    Example:
        >>> sqnr(torch.ones(4), torch.ones(4))
        inf
    """
    error = relative_l2(out, ref)
    if math.isnan(error):
        return math.nan
    if error == 0:
        return math.inf
    return -math.inf if math.isinf(error) else -20 * math.log10(error)


def cosine(out: Tensor, ref: Tensor) -> float:
    """Compute the cosine of the angle between result and reference.

    Args:
        out: the result.
        ref: the reference.

    Returns:
        The cosine; 1 when both are zero.

    Example:
        >>> cosine(torch.zeros(4), torch.zeros(4))
        1.0
    """
    out, ref = _normalize(out, ref)
    norms = float(out.norm() * ref.norm())
    if norms == 0:
        return 1.0 if bool((out == ref).all()) else 0.0
    value = float((out * ref).sum() / norms)
    return value if math.isnan(value) else min(max(value, -1.0), 1.0)  # rounding may put it just outside


def saturated_fraction(x: Tensor, q: QTensor) -> float:
    """Compute the share of finite elements that were clipped to the largest value of their block.

    Args:
        x: the tensor.
        q: the same tensor, quantized.

    Returns:
        The share.

    Example:
        >>> saturated_fraction(x, quantize(x, Spec.parse("e4m3:row")))
        0.0
    """
    finite = _same_shape(x, q).isfinite()
    # x * (1 / scale) may exceed max by a rounding error
    scale = expand_scale(q.multiplier(), q.shape, q.spec.block)
    limit = q.spec.format.max * scale.double() * (1 + 2.0**-20)
    return _share((x.detach().double().abs() > limit) & finite, finite)


def underflowed_fraction(x: Tensor, q: QTensor) -> float:
    """Compute the share of finite non-zero elements that became zero.

    Args:
        x: the tensor.
        q: the same tensor, quantized.

    Returns:
        The share.

    Example:
        >>> underflowed_fraction(x, quantize(x, Spec.parse("e4m3:tensor")))
    """
    x = _same_shape(x, q)
    nonzero = x.isfinite() & (x != 0)
    return _share((decode(q.data, q.spec.format) == 0) & nonzero, nonzero)


def _same_shape(x: Tensor, q: QTensor) -> Tensor:
    if x.shape != q.shape:
        raise ValueError(f"x of shape {tuple(x.shape)} is not what was quantized: {tuple(q.shape)}")
    return x.detach()


def _share(event: Tensor, of: Tensor) -> float:
    total = int(of.sum())
    return float(event.sum()) / total if total else 0.0


def left_in_sum(dy: Tensor) -> Tensor:
    """Compute |sum dy|^2 / sum |dy|^2 over all rows. The sum over rows is the gradient of a bias.

    About 1 if the gradients of rows are independent, more if they agree. 0 if the linear is followed by a batch norm,
    whose backward removes the mean: there, the contribution of an input column's mean to the weight gradient cancels in
    exact arithmetic, but its rounding error does not.

    Args:
        dy: gradient of a linear's output, all rows [..., N].

    Returns:
        A scalar tensor >= 0, without a synchronization.

    Example:
        >>> left_in_sum(torch.tensor([[1.0], [-1.0]]))
        tensor(0.)
    """
    rows = dy.reshape(-1, dy.shape[-1])
    power = torch.linalg.vector_norm(rows, dtype=torch.float32)
    # norms first: squares of small gradients would underflow float32
    left: Tensor = torch.linalg.vector_norm(rows.sum(0, dtype=torch.float32)) / power.clamp(min=1e-38)
    return left.square()
