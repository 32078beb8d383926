"""Benchmark adapter of dots: products of all pairs of an example's vectors (shape examples x vectors x width).

A variant is `pairs`, those above the diagonal. Options: `self` (the diagonal too), `gradient` (dx instead), and a
dtype. Compared with float64, element by element.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from loka.kernels.dots.call import DotsCall
from loka.measure import conformance, inputs
from loka.measure.conformance import Conformance, Law
from loka.measure.fused import compiled
from loka.measure.inputs import Shape
from loka.measure.op import Op, read_variant, spell_variant
from loka.measure.timing import Thunk


@dataclass(frozen=True)
class PairsCall(DotsCall):
    """A call with the options of its variant; the number of `pairs` tells whether the diagonal is included."""

    gradient: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}{' gradient' if self.gradient else ''}"


@dataclass(frozen=True)
class DotsOperands:
    """The vectors, the pairs, and the gradient of their products."""

    x: Tensor
    first: Tensor
    second: Tensor
    dy: Tensor


class Dots(Op[PairsCall]):
    """Pairwise products, or their gradient."""

    op = "dots"
    OWN = PairsCall
    DIMENSIONS = ("b", "n", "d")
    VARIANTS = ("pairs", "pairs|gradient")

    def parse(self, shape: Shape, variant: str) -> PairsCall:
        """See `Op.parse`: examples, vectors, width and `pairs`."""
        spelled = f"pairs[|self][|gradient][|dtype]; e.g. {self.VARIANTS[1]}"
        _, options, dtype = read_variant(variant, "pairs", ("self", "gradient"), spelled)
        b, n, d = shape
        count = n * (n + 1) // 2 if "self" in options else n * (n - 1) // 2
        return PairsCall(b, n, d, count, dtype, "gradient" in options)

    def spell(self, call: PairsCall) -> str:
        """See `Op.spell`."""
        return spell_variant("pairs|self" if _includes_diagonal(call) else "pairs", call, ("gradient",))

    def operands(self, call: PairsCall, *, seed: int, distribution: str, device: torch.device) -> DotsOperands:
        """Draw vectors from the distribution, and normal gradients."""
        options: dict[str, Any] = {"device": device, "dtype": call.dtype}
        x = inputs.draw(call.b * call.n, call.d, distribution=distribution, seed=2 * seed, **options)
        first, second = _draw_pairs(call, seed=seed).to(device)
        dy = inputs.draw(call.b, call.pairs, seed=2 * seed + 1, **options)
        return DotsOperands(x.view(call.b, call.n, call.d), first, second, dy)

    def thunk(self, backend: Any, call: PairsCall, operands: DotsOperands) -> Thunk:
        """Return the products, or their gradient."""
        o = operands
        if call.gradient:
            return lambda: backend.gradient(o.dy, o.x, o.first, o.second)
        return lambda: backend.run(o.x, o.first, o.second)

    def exact(self, call: PairsCall, operands: DotsOperands) -> Law:
        """See `Op.exact`."""
        return _law(call, operands)

    def shows_nan(self, call: PairsCall) -> bool:
        """See `Op.shows_nan`."""
        return not call.gradient

    def compare(self, backend: Any, call: PairsCall, operands: DotsOperands, exact: Callable[[], Law]) -> Conformance:
        """Check against float64, plain and with poisoned allocations."""
        return self._judge(self.thunk(backend, call, operands), call, exact, poison=True)

    def _judge(self, run: Thunk, call: PairsCall, exact: Callable[[], Law], *, poison: bool) -> Conformance:
        width = call.n * call.d if call.gradient else call.pairs
        terms = call.n if call.gradient else call.d
        allowed = conformance.baseline_tolerance(call.dtype, terms)
        return conformance.judge_runs(lambda: run().reshape(call.b, width), exact, allowed, call.dtype, poison=poison)

    def baseline(self, call: PairsCall, operands: DotsOperands) -> Thunk:
        """Return a batched product of all vectors and the selection of pairs, forward only; compiled on a GPU."""
        o = operands
        run = compiled(lambda x: torch.bmm(x, x.mT)[:, o.first, o.second], o.x.device)
        return lambda: run(o.x)

    def check_baseline(self, call: PairsCall, operands: DotsOperands) -> Conformance:
        """Check against float64."""
        plain = PairsCall(call.b, call.n, call.d, call.pairs, call.dtype)
        return self._judge(self.baseline(plain, operands), plain, partial(_law, plain, operands), poison=False)

    def bytes_moved(self, call: PairsCall) -> int:
        """Count vectors and products; for the gradient, vectors, gradients and dx."""
        return call.b * call.dtype.itemsize * (call.n * call.d * (1 + call.gradient) + call.pairs)

    def flops(self, call: PairsCall) -> int:
        """Count one dot product per pair; two for the gradient."""
        return 2 * call.b * call.pairs * call.d * (1 + call.gradient)


def _draw_pairs(call: DotsCall, *, seed: int) -> Tensor:
    """Return as many pairs as the call has: all, with or without those of a vector and itself, else drawn at random."""
    pairs = torch.triu_indices(call.n, call.n, 0 if _includes_diagonal(call) else 1)
    if pairs.shape[1] != call.pairs:  # a model may read any pairs, in any order
        cells = torch.randperm(call.n**2, generator=torch.Generator().manual_seed(seed))[: call.pairs]
        pairs = torch.stack([cells // call.n, cells % call.n])
    return pairs


def _includes_diagonal(call: DotsCall) -> bool:
    return call.pairs == call.n * (call.n + 1) // 2


def _law(call: PairsCall, o: DotsOperands) -> Law:
    """Compute in float64, with the size that errors are relative to."""
    x = o.x.double()
    if not call.gradient:
        y = torch.bmm(x, x.mT)[:, o.first, o.second]
        squares = torch.bmm(x.square(), x.square().mT)[:, o.first, o.second]
        return Law(y, (squares + y.square()).sqrt())
    grid = x.new_zeros(call.b, call.n, call.n)
    grid[:, o.first, o.second] = o.dy.double()
    grid = grid + grid.mT
    dx = torch.bmm(grid, x)
    terms = (torch.bmm(grid.square(), x.square()) + dx.square()).sqrt()
    return Law(dx.flatten(1), terms.flatten(1))
