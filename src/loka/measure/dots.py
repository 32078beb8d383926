"""The benchmark's view of dots: products of all pairs of K vectors of width N, of M examples (shape examples x vectors x width).

A variant is `pairs`, those above the diagonal; options: `self` (the diagonal too), `gradient` (dx instead), and a type. Judged against float64, element by element.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels.dots.call import DotsCall
from loka.measure import conformance, inputs
from loka.measure.conformance import Conformance, Law
from loka.measure.fused import DTYPES, compiled
from loka.measure.inputs import Shape
from loka.measure.timing import Rival, Thunk


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


class Dots:
    """Pairwise products, or their gradient."""

    op = "dots"
    VARIANTS = ("pairs", "pairs|gradient")

    def calls(self, shapes: Sequence[Shape], variants: Sequence[str]) -> list[PairsCall]:
        """Every shape (examples, vectors, width) under every variant."""
        return [self._call(shape, variant) for shape in shapes for variant in variants]

    def _call(self, shape: Shape, variant: str) -> PairsCall:
        head, *options = variant.split("|")
        kinds = [option for option in options if option in DTYPES]
        if head != "pairs" or set(options) - {"self", "gradient", *kinds} or len(kinds) > 1:
            raise ValueError(f"variant {variant!r} is not pairs[|self][|gradient][|dtype]; e.g. {self.VARIANTS[1]}")
        b, n, d = shape
        count = n * (n + 1) // 2 if "self" in options else n * (n - 1) // 2
        return PairsCall(b, n, d, count, DTYPES[kinds[0]] if kinds else torch.bfloat16, "gradient" in options)

    def encode(self, call: PairsCall) -> dict[str, Any]:
        """As JSON."""
        options = [*(["self"] if _with_itself(call) else []), *(["gradient"] if call.gradient else [])]
        options.append(str(call.dtype).removeprefix("torch."))
        return {**self.shape(call), "variant": "|".join(["pairs", *options])}

    def decode(self, fields: dict[str, Any]) -> PairsCall:
        """From JSON."""
        return self._call((fields["b"], fields["n"], fields["d"]), fields["variant"])

    def shape(self, call: PairsCall) -> dict[str, int]:
        """Examples, vectors, width."""
        return {"b": call.b, "n": call.n, "d": call.d}

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

    def rivals(self, call: PairsCall, sets: Sequence[DotsOperands]) -> list[Rival]:
        """None."""
        return []

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
