"""Benchmark adapter of mixed_dots: products of an example's vectors with K mixtures of them (shape examples x vectors x
width).

A variant is `mixtures=K`. Options: `gradient` (dx and dW instead), and a dtype. Compared with float64, element by
element; the tolerance allows for mixtures that are rounded to the operands' dtype.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels.mixed_dots.call import MixedDotsCall
from loka.measure import conformance, inputs
from loka.measure.conformance import Conformance, Law
from loka.measure.fused import compiled
from loka.measure.inputs import Shape
from loka.measure.op import Op, read_variant, spell_variant
from loka.measure.timing import Thunk


@dataclass(frozen=True)
class MixturesCall(MixedDotsCall):
    """A call with the options of its variant."""

    gradient: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}{' gradient' if self.gradient else ''}"


@dataclass(frozen=True)
class MixturesOperands:
    """The vectors, the mixing weights, and the gradient of the products."""

    x: Tensor
    weight: Tensor
    dp: Tensor


class MixedDots(Op[MixturesCall]):
    """Products with mixtures, or their gradient."""

    op = "mixed_dots"
    DIMENSIONS = ("b", "n", "d")
    VARIANTS = ("mixtures=24", "mixtures=24|gradient")

    def parse(self, shape: Shape, variant: str) -> MixturesCall:
        """See `Op.parse`: examples, vectors, width and `mixtures=K`."""
        spelled = f"mixtures=K[|gradient][|dtype]; e.g. {self.VARIANTS[1]}"
        head, options, dtype = read_variant(variant, r"mixtures=([1-9][0-9]*)", ("gradient",), spelled)
        return MixturesCall(*shape, int(head[1]), dtype, "gradient" in options)

    def spell(self, call: MixturesCall) -> str:
        """See `Op.spell`."""
        return spell_variant(f"mixtures={call.k}", call, ("gradient",))

    def operands(self, call: MixturesCall, *, seed: int, distribution: str, device: torch.device) -> MixturesOperands:
        """Draw vectors from the distribution, and normal weights and gradients."""
        options: dict[str, Any] = {"device": device, "dtype": call.dtype}
        x = inputs.draw(call.b * call.n, call.d, distribution=distribution, seed=3 * seed, **options)
        weight = inputs.draw(call.k, call.n, seed=3 * seed + 1, **options) / call.n**0.5
        dp = inputs.draw(call.b * call.n, call.k, seed=3 * seed + 2, **options)
        return MixturesOperands(x.view(call.b, call.n, call.d), weight, dp.view(call.b, call.n, call.k))

    def thunk(self, backend: Any, call: MixturesCall, operands: MixturesOperands) -> Thunk:
        """Return the products, or dx and dW."""
        o = operands
        if call.gradient:
            return lambda: backend.gradient(o.dp, o.x, o.weight)
        return lambda: backend.run(o.x, o.weight)

    def check(self, backend: Any, call: MixturesCall, operands: MixturesOperands) -> Conformance:
        """Check against float64, plain and with poisoned allocations."""
        run: Any = self.thunk(backend, call, operands)
        if not call.gradient:
            return _judge(run, _products(operands), call, call.dtype)
        dx, dw = _gradients(operands)
        verdicts = [_judge(lambda: run()[0], dx, call, call.dtype), _judge(lambda: run()[1], dw, call, torch.float32)]
        return max(verdicts, key=lambda verdict: (not verdict.ok, verdict.error))

    def baseline(self, call: MixturesCall, operands: MixturesOperands) -> Thunk:
        """Return two batched products, forward only; compiled on a GPU."""
        o = operands
        run = compiled(lambda x, w: torch.bmm(x, torch.einsum("bnd,kn->bdk", x, w)), o.x.device)
        return lambda: run(o.x, o.weight)

    def check_baseline(self, call: MixturesCall, operands: MixturesOperands) -> Conformance:
        """Check against float64."""
        return _judge(self.baseline(call, operands), _products(operands), call, call.dtype, poison=False)

    def bytes_moved(self, call: MixturesCall) -> int:
        """Count vectors and products; for the gradient, vectors, gradients and dx."""
        return call.b * call.n * call.dtype.itemsize * (call.d * (1 + call.gradient) + call.k)

    def flops(self, call: MixturesCall) -> int:
        """Count two products; twice as many for the gradient."""
        return 4 * call.b * call.n * call.d * call.k * (1 + call.gradient)


def _judge(run: Thunk, law: Law, call: MixturesCall, dtype: torch.dtype, *, poison: bool = True) -> Conformance:
    terms = call.b * call.d if dtype != call.dtype else max(call.n, call.d)
    allowed = 2 * conformance.baseline_tolerance(call.dtype, terms)  # two products, with a 16-bit rounding in between
    return conformance.judge_runs(lambda: run().flatten(1), law, allowed, dtype, poison=poison)


def _products(o: MixturesOperands) -> Law:
    """Compute X (W X)^T in float64, with the size that errors are relative to."""
    x, w = o.x.double(), o.weight.double()
    y = w @ x
    p = x @ y.mT
    squares = x.square() @ (w.square() @ x.square() + y.square()).mT
    return Law(p.flatten(1), (squares + p.square()).sqrt().flatten(1))


def _gradients(o: MixturesOperands) -> tuple[Law, Law]:
    """Compute dX = dP Y + W^T dY and dW = sum of dY X^T in float64, with dY = dP^T X."""
    x, w, dp = (t.double() for t in (o.x, o.weight, o.dp))
    y, dy = w @ x, dp.mT @ x
    y_terms = w.square() @ x.square() + y.square()
    dy_terms = dp.square().mT @ x.square() + dy.square()
    dx, dw = dp @ y + w.T @ dy, (dy @ x.mT).sum(0)
    dx_terms = dp.square() @ y_terms + w.square().T @ dy_terms + dx.square()
    dw_terms = (dy_terms @ x.square().mT).sum(0) + dw.square()
    return Law(dx.flatten(1), dx_terms.sqrt().flatten(1)), Law(dw, dw_terms.sqrt())
