"""Check that a fused kernel's result is the exact one, rounded once.

A fused kernel writes FP8 without exposing the values before rounding, so its result is compared with exact ones in
float64:

    |q - x / scale|  <= half an ulp of x / scale + error / scale each element; the ulp of the binade of x / scale
    rms(q * scale - x)  <=  1.05 * rms(reference - x)                      the whole: no more noise than the reference
    |<q * scale - reference, x>|  <=  2^-10 <x, x>                          the whole: not smaller or larger by a factor;
                                                                           plus chance, if differences have random signs
    |scale / reference - 1|  <=  error / amax                              each scale computed by the kernel

`error` is the largest error of a single element before rounding (tensor core sums, float32); the typical error is an
eighth of it. 16-bit results are judged in the same way, with half an ulp of their type. The worst ratio to its bound is
reported, so the tolerance is 1.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from loka.formats import QTensor, block_amax, expand_scale, quantize
from loka.measure.arrangement import same_values
from loka.measure.conformance import ELEMENT_ALLOWANCE, ULP, Conformance

TINY = 1e-300

_local = threading.local()  # .right: results that were right, by what they are, while they are remembered


class _Right(NamedTuple):
    exact: Tensor
    out: QTensor | Tensor
    verdict: Conformance


@contextmanager
def remembering() -> Iterator[None]:
    """Remember in the block which results were right, for kernels that run several times on the same operands.

    A result with the bits of one that was right, compared with the same exact one, is right: comparing bits takes a
    tenth of the time.
    """
    outer, _local.right = getattr(_local, "right", None), dict[str, _Right]()
    try:
        yield
    finally:
        _local.right = outer


def judge_once(out: QTensor | Tensor, exact: Tensor, what: str, judge: Callable[[], Conformance]) -> Conformance:
    """Judge a result, unless its bits are remembered."""
    right: dict[str, _Right] | None = getattr(_local, "right", None)
    known = None if right is None else right.get(what)
    if known is not None and _is_same_memory(exact, known.exact) and _have_same_bits(out, known.out):
        return known.verdict
    verdict = judge()
    if verdict and right is not None:
        # a copy: a kernel may return the same memory again
        kept = out.clone() if isinstance(out, Tensor) else replace(out, data=out.data.clone(), scale=out.scale.clone())
        right[what] = _Right(exact, kept, verdict)
    return verdict


def _is_same_memory(x: Tensor, y: Tensor) -> bool:
    """Check whether two tensors that both exist are one."""
    return (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())


def _have_same_bits(x: QTensor | Tensor, y: QTensor | Tensor) -> bool:
    return type(x) is type(y) and getattr(x, "spec", None) == getattr(y, "spec", None) and same_values(x, y)


def judge_near(
    out: Tensor,
    exact: Tensor,
    allowed: float,
    *,
    what: str = "result",
    slices: bool = True,
    size: Tensor | None = None,
) -> Conformance:
    """Judge a result that was rounded more than once, by relative L2 error.

    Args:
        out: the result.
        exact: the exact one, in float64.
        allowed: the largest relative error.
        what: the result's name, for the reason.
        slices: check each entry of the first dimension too, since a wrong one is invisible in the whole. A slice may
            have eight times the allowed error, relative to its own size plus a thousandth of the typical one.
        size: what errors are relative to, if the result is a sum of terms that may cancel; default: `exact`.

    Returns:
        The verdict.

    Example:
        >>> judge_near(torch.ones(4), torch.ones(4).double(), 1e-3).ok
        True
    """
    if out.shape != exact.shape:
        return Conformance.failed(f"{what} is {tuple(out.shape)}, expected {tuple(exact.shape)}", allowed)
    if exact.numel() == 0:
        return Conformance(True, 0.0, allowed)
    return judge_once(out, exact, what, partial(_judge_near, out, exact, allowed, what, slices, size))


def _judge_near(
    out: Tensor, exact: Tensor, allowed: float, what: str, slices: bool, size: Tensor | None
) -> Conformance:
    lost = exact.isnan()
    if bool(lost.any()):
        if wrong := int((out.isnan() != lost).sum()):
            return Conformance.failed(f"{what}: {wrong} elements differ in being NaN", allowed)
        out, exact = (torch.where(lost, 0.0, t) for t in (out, exact))
        size = None if size is None else torch.where(lost, 0.0, size)
    error = out.double() - exact
    if not error.isfinite().all():
        return Conformance.failed(f"{what}: {int((~error.isfinite()).sum())} elements are not finite", allowed)
    size = exact if size is None else size
    worst, where = float(error.norm() / size.norm().clamp(min=TINY)), "the whole"
    if slices:
        sizes = size.flatten(1).norm(dim=1) if size.dim() > 1 else size.abs()
        errors = error.flatten(1).norm(dim=1) if error.dim() > 1 else error.abs()
        ratios = errors / (sizes + 1e-3 * sizes.square().mean().sqrt()).clamp(min=TINY) / ELEMENT_ALLOWANCE
        index = int(ratios.argmax())
        worst, where = max((worst, where), (float(ratios[index]), f"slice {index}"))
    return Conformance.within(worst, allowed, f"{what}: {where} is off by {worst:.3g}, allowed {allowed:.3g}")


def as_share(verdict: Conformance) -> Conformance:
    """Express a verdict's error as a share of its tolerance, so that verdicts are comparable."""
    return Conformance(verdict.ok, verdict.error / verdict.tolerance, 1.0, verdict.reason)


NOISE, GAIN = 1.05, 2.0**-10
CHANCE = 2.5  # standard deviations of a sum of random signs
_HALF_ULP = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}  # of a binade, and of the subnormals


def judge_rounded(out: QTensor | Tensor, exact: Tensor, error: Tensor, *, what: str = "result") -> Conformance:
    """Compare a result with exact float64 values. `error` is the allowed error of each element before rounding.

    Exact values beyond the range of a 16-bit result are infinite there, or its largest number.
    """
    if out.shape != exact.shape:
        return Conformance.failed(f"{what} is {tuple(out.shape)}, expected {tuple(exact.shape)}", 1.0)
    if exact.numel() == 0:
        return Conformance(True, 0.0, 1.0)
    return judge_once(out, exact, what, partial(_judge_rounded, out, exact, error, what))


def _judge_rounded(out: QTensor | Tensor, exact: Tensor, error: Tensor, what: str) -> Conformance:
    values = (out.data if isinstance(out, QTensor) else out).double()
    if isinstance(out, Tensor):
        largest = torch.finfo(out.dtype).max
        values, exact = (
            torch.where(values.abs() + error >= largest, x.clamp(-largest, largest), x) for x in (values, exact)
        )
    if wrong := int((values.isnan() != exact.isnan()).sum()):
        return Conformance.failed(f"{what}: {wrong} elements differ in being NaN", 1.0)
    finite = exact.isfinite()
    if not torch.equal(values.isfinite(), finite):
        wrong = int((values.isfinite() != finite).sum())
        return Conformance.failed(f"{what}: {wrong} elements differ in being finite", 1.0)
    looks = _looks_fp8(out, values, exact, error) if isinstance(out, QTensor) else _looks(out, values, exact, error)
    name, worst = max(looks.items(), key=lambda look: look[1])
    return Conformance.within(worst, 1.0, f"{what}: {name} {worst:.3g} times what rounding explains")


def _looks(out: Tensor, values: Tensor, exact: Tensor, error: Tensor) -> dict[str, float]:
    allowed = error + ULP[out.dtype] / 2 * exact.abs() + torch.finfo(out.dtype).smallest_normal
    return {"an element is": _largest((values - exact).abs() / allowed)}


def _looks_fp8(q: QTensor, values: Tensor, exact: Tensor, error: Tensor) -> dict[str, float]:
    ulp, smallest = _HALF_ULP[q.spec.format.name]
    scale = expand_scale(q.scale.double(), q.shape, q.spec.block)
    scaled = exact / scale
    binade = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=TINY))))
    allowed = (binade * ulp).clamp(min=smallest) + error / scale
    target = scaled.clamp(-q.spec.format.max, q.spec.format.max)
    law = quantize(exact, q.spec, scale=None if q.spec.mode == "dynamic" else q.scale)
    expected = law.dequantize().double()
    noise = _rms(expected - exact)
    shifted = ((values * scale - expected) * exact).nan_to_num(0.0, 0.0, 0.0)
    explained = GAIN * exact.square().nan_to_num(0.0, 0.0, 0.0).sum() + CHANCE * shifted.norm()
    explained += (error.expand_as(exact) * exact.abs()).nan_to_num(0.0, 0.0, 0.0).sum() / ELEMENT_ALLOWANCE + TINY
    looks = {
        "the gain is off by": float(shifted.sum().abs() / explained),
        "an element is": _largest((values - target).abs() / allowed),
        "the noise is": _rms(values * scale - exact) / (NOISE * noise + _rms(error) / ELEMENT_ALLOWANCE + TINY),
    }
    if q.spec.mode == "dynamic" and q.spec.scale == "f32":
        amax = block_amax(exact, q.spec.block).double()
        slack = block_amax(error.expand_as(exact), q.spec.block).double() / amax.clamp(min=TINY) + 2.0**-20
        off = (q.scale.double() / law.scale.double() - 1).abs() / slack
        # the scale of a block without a number says nothing
        looks["a scale is"] = _largest(torch.where(block_amax(exact.isfinite().double(), q.spec.block) > 0, off, 0.0))
    return looks


def _rms(x: Tensor) -> float:
    return float(x.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())


def _largest(x: Tensor) -> float:
    return float(x.nan_to_num(0.0).max())
