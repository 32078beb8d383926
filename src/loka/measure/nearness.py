"""Is a result near the exact one, where it was rounded more than once on the way? By relative L2, of the whole and of every slice."""

import math

from torch import Tensor

from loka.measure.conformance import ELEMENT_ALLOWANCE, Conformance

TINY = 1e-300


def judge_near(out: Tensor, exact: Tensor, allowed: float, *, what: str = "result", slices: bool = True) -> Conformance:
    """For results that round more than once: relative L2 of the whole and, with `slices`, of each entry of the first dimension.

    Args:
        out: the result.
        exact: the same in float64.
        allowed: the relative L2 the whole may be off; a slice may be off eight times that, of its own size or a thousandth of the typical one.
        what: its name in the reason.
        slices: whether slices count. One that is wrong drowns in the whole.
    """
    if out.shape != exact.shape:
        return Conformance(False, math.inf, allowed, f"{what} is {tuple(out.shape)}, expected {tuple(exact.shape)}")
    if exact.numel() == 0:
        return Conformance(True, 0.0, allowed)
    error = out.double() - exact
    if not error.isfinite().all():
        return Conformance(
            False, math.inf, allowed, f"{what}: {int((~error.isfinite()).sum())} elements are not finite"
        )
    worst, where = float(error.norm() / exact.norm().clamp(min=TINY)), "the whole"
    if slices:
        sizes = exact.flatten(1).norm(dim=1) if exact.dim() > 1 else exact.abs()
        errors = error.flatten(1).norm(dim=1) if error.dim() > 1 else error.abs()
        ratios = errors / (sizes + 1e-3 * sizes.square().mean().sqrt()).clamp(min=TINY) / ELEMENT_ALLOWANCE
        index = int(ratios.argmax())
        worst, where = max((worst, where), (float(ratios[index]), f"slice {index}"))
    if worst <= allowed:
        return Conformance(True, worst, allowed)
    return Conformance(False, worst, allowed, f"{what}: {where} is off by {worst:.3g}, allowed {allowed:.3g}")


def as_share(verdict: Conformance) -> Conformance:
    """A verdict as a share of its tolerance, comparable with others."""
    return Conformance(verdict.ok, verdict.error / verdict.tolerance, 1.0, verdict.reason)
