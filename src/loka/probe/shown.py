"""What a look shows to the score: rows of one call with their gradient and weight, and the same operands rounded."""

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

HEADROOM = 1.0  # of scales that are given: over the largest value seen before


@dataclass(frozen=True)
class Shown:
    """Rows of one call of a linear: what its three GEMMs were given.

    Args:
        x: rows of the input [R, K].
        dy: the same rows of the output's gradient [R, N]; None where there was none.
        weight: [N, K].
        loss: the loss that was differentiated, 0-d; NaN where it is not known.
        nats: the mean loss of an example where the loss is a likelihood, else 1.
        examples: how many the call had; of a linear that is called several times for one loss, as many times that as it has calls, so that the mean of r over its calls is what they do together.
        together: rows of one example that lie next to each other in x.
        per_example: rows one example has in the call.
        largest: of the whole call's x and dy, where known: tensor scales come from all rows, not from those looked at.
        before: largest values of x and dy in earlier calls, for given scales; without them, this call's.
        left: how much of the gradients of all rows of the call their sum has (`loka.formats.left_in_sum`); None where that is not known, which counts as nothing, as behind a batch norm.
        weighs: what a row counts beside those of the linear's other calls for the same loss, which count the same in all, however many of their rows were taken.
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
    """The operands of a look under every Spec they are asked for, each made once."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._plain = {"x": shown.x.float(), "dy": shown.dy, "w": shown.weight.float()}
        if shown.dy is not None:
            self._plain["dy"] = shown.dy.float()
        self._made: dict[tuple[str, Spec], Tensor] = {}
        self.kept: dict[str, Tensor] = {}  # products that several recipes share

    def plain(self, role: str) -> Tensor:
        """The operand as it was: x, dy or w."""
        found = self._plain[role]
        assert found is not None
        return found

    def low(self, role: str, spec: Spec, *, transposed: bool = False) -> Tensor:
        """The operand rounded; `spec` is that of the transposed matrix where the GEMM contracts over the other axis."""
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
    """What x looks like after quantisation, as `loka.formats` has it, in few operations: a look has to be cheap.

    Args:
        x: float32.
        spec: of an 8-bit float with float32 scales; anything else goes the long way.
        largest: what the scale comes from where that is not x.

    Returns:
        float32 of the same shape.
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
    """A largest value, unless it is none: a NaN or an Inf in the tensor, or nothing seen yet."""
    return torch.where(largest.isfinite() & (largest > 0), largest, otherwise)
