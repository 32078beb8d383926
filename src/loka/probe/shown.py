"""Input of the score: rows of one call with their gradient and weight, and the same operands rounded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from loka.formats import (
    E4M3,
    E5M2,
    SMALLEST_SCALE,
    TENSOR,
    Spec,
    block_amax,
    dequantize,
    expand_scale,
    quantize,
    scale_from_amax,
)

HEADROOM = 1.0  # factor of static and delayed scales over the largest value seen before


@dataclass(frozen=True)
class Shown:
    """Rows of one call of a linear: the operands of its three GEMMs.

    Args:
        x: rows of the input [R, K].
        dy: the same rows of the output's gradient [R, N], or None.
        weight: [N, K].
        loss: the loss that was differentiated, 0-d; NaN if unknown.
        nats: the mean loss of an example if the loss is a likelihood, else 1.
        examples: number of examples in the call, times the number of calls of this linear for the same loss, so that
            the mean of r over these calls is their joint effect.
        together: consecutive rows of x that belong to one example.
        per_example: rows per example in the call.
        largest: amax of x and dy over the whole call, if known; tensorwise scales come from all rows, not only the
            sampled ones.
        before: amax of x and dy in earlier calls, for static and delayed scales; by default this call's.
        left: `loka.formats.left_in_sum` over all rows of the call; None (unknown) counts as 0, as behind a batch norm.
        weighs: weight of a row relative to rows of the linear's other calls for the same loss. All calls have the same
            total weight, however many of their rows were sampled.
    """

    x: Tensor
    dy: Tensor | None
    weight: Tensor
    loss: Tensor
    nats: Tensor
    examples: int
    together: int = 1
    per_example: int = 1
    largest: Mapping[str, Tensor] | None = None
    before: Mapping[str, Tensor] | None = None
    left: Tensor | None = None
    weighs: float = 1.0


class RoundedOperands:
    """The operands of a look, plain and rounded to any Spec. Results are cached."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._plain = {"x": shown.x.float(), "dy": shown.dy, "w": shown.weight.float()}
        if shown.dy is not None:
            self._plain["dy"] = shown.dy.float()
        self._made: dict[tuple[str, Spec], Tensor] = {}
        self.kept: dict[str, Tensor] = {}  # products shared by several recipes

    def plain(self, role: str) -> Tensor:
        """Return the unrounded operand x, dy or w."""
        found = self._plain[role]
        assert found is not None
        return found

    def low(self, role: str, spec: Spec, *, transposed: bool = False) -> Tensor:
        """Return the rounded operand. With `transposed`, `spec` is that of the transpose, along the contracted axis."""
        spec = spec.transposed if transposed else spec
        if (role, spec) not in self._made:
            self._made[role, spec] = self._round(role, spec)
        return self._made[role, spec]

    def _round(self, role: str, spec: Spec) -> Tensor:
        plain = self.plain(role)
        if spec.block != TENSOR or role == "w":
            return round_trip(plain, spec)
        here = block_amax(plain, TENSOR)
        largest = _finite((self._shown.largest or {}).get(role, here), here)
        if spec.mode != "dynamic":
            largest = _finite((self._shown.before or {}).get(role, largest), largest) * HEADROOM
        return round_trip(plain, spec, largest)


def round_trip(x: Tensor, spec: Spec, largest: Tensor | None = None) -> Tensor:
    """Quantize and dequantize float32 x with the same result as `loka.formats`, in few operations: looks must be cheap.

    The fast path covers 8-bit floats with float32 scales and rounding to nearest. `largest` is the amax that determines
    the scale; by default that of x.
    """
    if spec.format not in (E4M3, E5M2) or spec.scale != "f32" or spec.rounding != "nearest":
        if largest is None:
            return dequantize(quantize(x, spec))
        given = replace(spec, mode="static")
        return dequantize(quantize(x, given, scale=scale_from_amax(largest, given)))
    amax = block_amax(x, spec.block) if largest is None else largest
    scale = torch.where(amax > 0, (amax / spec.format.max).clamp(min=SMALLEST_SCALE), 1.0)
    wide = expand_scale(scale, x.shape, spec.block)
    limit = spec.format.max
    return (x / wide).clamp(-limit, limit).to(spec.format.dtype).float() * wide


def _finite(largest: Tensor, otherwise: Tensor) -> Tensor:
    """Return `largest` if it is finite and positive, else `otherwise`: NaN or Inf in the tensor, or nothing seen."""
    return torch.where(largest.isfinite() & (largest > 0), largest, otherwise)
