"""The benchmark's view of dots: products of all pairs of K vectors of width N, of M examples (shape examples x vectors x width).

A variant is `pairs`, those above the diagonal; options: `self` (the diagonal too), `gradient` (dx instead), and a type. Judged against float64, element by element.
"""

from dataclasses import dataclass
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
    """A call, and whether it is the gradient; `pairs` says whether a vector meets itself."""

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
    DIMENSIONS = ("b", "n", "d")
    VARIANTS = ("pairs", "pairs|gradient")

    def parse(self, shape: Shape, variant: str) -> PairsCall:
        """Examples, vectors and width under `pairs`."""
        spelled = f"pairs[|self][|gradient][|dtype]; e.g. {self.VARIANTS[1]}"
        _, options, dtype = read_variant(variant, "pairs", ("self", "gradient"), spelled)
        b, n, d = shape
        count = n * (n + 1) // 2 if "self" in options else n * (n - 1) // 2
        return PairsCall(b, n, d, count, dtype, "gradient" in options)

    def spell(self, call: PairsCall) -> str:
        """The inverse of `parse`."""
        return spell_variant("pairs|self" if _with_itself(call) else "pairs", call, ("gradient",))

    def operands(self, call: PairsCall, *, seed: int, distribution: str, device: torch.device) -> DotsOperands:
        """Vectors of the distribution, normal gradients."""
        options: dict[str, Any] = {"device": device, "dtype": call.dtype}
        x = inputs.draw(call.b * call.n, call.d, distribution=distribution, seed=2 * seed, **options)
        first, second = torch.triu_indices(call.n, call.n, 0 if _with_itself(call) else 1, device=device)
        dy = inputs.draw(call.b, call.pairs, seed=2 * seed + 1, **options)
        return DotsOperands(x.view(call.b, call.n, call.d), first, second, dy)

    def thunk(self, backend: Any, call: PairsCall, operands: DotsOperands) -> Thunk:
        """The products, or their gradient."""
        o = operands
        if call.gradient:
            return lambda: backend.gradient(o.dy, o.x, o.first, o.second)
        return lambda: backend.run(o.x, o.first, o.second)

    def check(self, backend: Any, call: PairsCall, operands: DotsOperands) -> Conformance:
        """Against float64, plain and with poisoned allocations."""
        return self._judge(self.thunk(backend, call, operands), call, operands, poison=True)

    def _judge(self, run: Thunk, call: PairsCall, operands: DotsOperands, *, poison: bool) -> Conformance:
        law, width = _law(call, operands), call.n * call.d if call.gradient else call.pairs
        terms = call.n if call.gradient else call.d
        allowed = conformance.baseline_tolerance(call.dtype, terms)
        return conformance.judge_runs(lambda: run().reshape(call.b, width), law, allowed, call.dtype, poison=poison)

    def baseline(self, call: PairsCall, operands: DotsOperands) -> Thunk:
        """A batched product of everything with everything, and the choice of pairs, as models write it; compiled on a GPU. Forward only."""
        o = operands
        run = compiled(lambda x: torch.bmm(x, x.mT)[:, o.first, o.second], o.x.device)
        return lambda: run(o.x)

    def check_baseline(self, call: PairsCall, operands: DotsOperands) -> Conformance:
        """Against float64."""
        plain = PairsCall(call.b, call.n, call.d, call.pairs, call.dtype)
        return self._judge(self.baseline(plain, operands), plain, operands, poison=False)

    def bytes_moved(self, call: PairsCall) -> int:
        """Vectors in, products out; backward vectors and gradients in, dx out."""
        return call.b * call.dtype.itemsize * (call.n * call.d * (1 + call.gradient) + call.pairs)

    def flops(self, call: PairsCall) -> int:
        """A product a pair; two backward."""
        return 2 * call.b * call.pairs * call.d * (1 + call.gradient)


def _with_itself(call: DotsCall) -> bool:
    return call.pairs == call.n * (call.n + 1) // 2


def _law(call: PairsCall, o: DotsOperands) -> Law:
    """In float64, with the size that errors are measured in."""
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
