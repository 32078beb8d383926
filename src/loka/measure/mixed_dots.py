"""Benchmark adapter of mixed_dots: products of an example's vectors with K mixtures of them (shape examples x vectors x
width).

A variant is `mixtures=K`, or `mixtures=K+M` if M further mixtures are results themselves. Options: `gradient` (dx and the
weights' gradients instead), and a dtype. Compared with float64, element by element; the tolerance allows for mixtures
that are rounded to the operands' dtype.
"""

from collections.abc import Callable
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
    results: int = 0  # mixtures that are returned

    def __str__(self) -> str:
        return (
            f"{super().__str__()}{f' + {self.results}' if self.results else ''}{' gradient' if self.gradient else ''}"
        )


@dataclass(frozen=True)
class MixturesOperands:
    """The vectors, the weights of mixtures that are multiplied and returned, and the gradients of both results."""

    x: Tensor
    weight: Tensor
    dp: Tensor
    mixing: Tensor | None
    dz: Tensor | None


class MixedDots(Op[MixturesCall]):
    """Products with mixtures, or their gradient."""

    op = "mixed_dots"
    OWN = MixturesCall
    DIMENSIONS = ("b", "n", "d")
    VARIANTS = ("mixtures=24", "mixtures=24|gradient", "mixtures=24+32", "mixtures=24+32|gradient")

    def parse(self, shape: Shape, variant: str) -> MixturesCall:
        """See `Op.parse`: examples, vectors, width and `mixtures=K` or `mixtures=K+M`."""
        spelled = f"mixtures=K[+M][|gradient][|dtype]; e.g. {self.VARIANTS[1]}"
        pattern = r"mixtures=([1-9][0-9]*)(?:\+([1-9][0-9]*))?"
        head, options, dtype = read_variant(variant, pattern, ("gradient",), spelled)
        return MixturesCall(*shape, int(head[1]), dtype, "gradient" in options, int(head[2] or 0))

    def spell(self, call: MixturesCall) -> str:
        """See `Op.spell`."""
        return spell_variant(f"mixtures={call.k}{f'+{call.results}' if call.results else ''}", call, ("gradient",))

    def operands(self, call: MixturesCall, *, seed: int, distribution: str, device: torch.device) -> MixturesOperands:
        """Draw vectors from the distribution, and normal weights and gradients."""
        options: dict[str, Any] = {"device": device, "dtype": call.dtype}
        x = inputs.draw(call.b * call.n, call.d, distribution=distribution, seed=3 * seed, **options)
        weight = inputs.draw(call.k, call.n, seed=3 * seed + 1, **options) / call.n**0.5
        dp = inputs.draw(call.b * call.n, call.k, seed=3 * seed + 2, **options)
        if call.dtype == torch.float16:  # gradients are products of three: large rows would overflow
            x, dp = x * 2.0**-4, dp * 2.0**-5
        mixing = dz = None
        if call.results:
            mixing = inputs.draw(call.results, call.n, seed=3 * seed + 3, **options) / call.n**0.5
            dz = inputs.draw(call.b * call.results, call.d, seed=3 * seed + 4, **options)
            dz = dz.view(call.b, call.results, call.d)
        return MixturesOperands(x.view(call.b, call.n, call.d), weight, dp.view(call.b, call.n, call.k), mixing, dz)

    def thunk(self, backend: Any, call: MixturesCall, operands: MixturesOperands) -> Thunk:
        """Return the products, with the mixtures if requested, or dx and the gradients of the weights."""
        o = operands
        if call.gradient:
            return lambda: [g for g in backend.gradient(o.dp, o.dz, o.x, o.weight, o.mixing) if g is not None]
        if call.results:
            return lambda: backend.run(o.x, o.weight, o.mixing)
        return lambda: backend.run(o.x, o.weight)[0]

    def exact(self, call: MixturesCall, operands: MixturesOperands) -> list[Law]:
        """See `Op.exact`."""
        return _gradients(operands) if call.gradient else _results(operands)

    def shows_nan(self, call: MixturesCall) -> bool:
        """See `Op.shows_nan`."""
        return not call.gradient

    def compare(
        self, backend: Any, call: MixturesCall, operands: MixturesOperands, exact: Callable[[], list[Law]]
    ) -> Conformance:
        """Check against float64, plain and with poisoned allocations."""
        run: Any = self.thunk(backend, call, operands)
        laws = exact()
        dtypes = [torch.float32 if call.gradient and at else call.dtype for at in range(len(laws))]
        results = (lambda: (run(),)) if not call.gradient and not call.results else run
        verdicts = [
            _judge(lambda at=at: results()[at], law, call, dtype)  # type: ignore[misc]
            for at, (law, dtype) in enumerate(zip(laws, dtypes, strict=True))
        ]
        return conformance.worst_of(verdicts)

    def baseline(self, call: MixturesCall, operands: MixturesOperands) -> Thunk:
        """Return two batched products, and one for mixtures that are results, forward only; compiled on a GPU."""
        o = operands

        def multiply(x: Tensor, w: Tensor, v: Tensor | None) -> tuple[Tensor, ...]:
            products = torch.bmm(x, torch.einsum("bnd,kn->bdk", x, w))
            return (products,) if v is None else (products, torch.einsum("bnd,mn->bmd", x, v))

        run = compiled(multiply, o.x.device)
        return lambda: run(o.x, o.weight, o.mixing)

    def check_baseline(self, call: MixturesCall, operands: MixturesOperands) -> Conformance:
        """Check against float64."""
        run: Any = self.baseline(call, operands)
        return _judge(lambda: run()[0], _results(operands)[0], call, call.dtype, poison=False)

    def bytes_moved(self, call: MixturesCall) -> int:
        """Count vectors and results; for the gradient, vectors, gradients and dx."""
        return call.b * call.dtype.itemsize * (call.n * (call.d * (1 + call.gradient) + call.k) + call.results * call.d)

    def flops(self, call: MixturesCall) -> int:
        """Count two products, and one for mixtures that are results; twice as many for the gradient."""
        return 2 * call.b * call.n * call.d * (2 * call.k + call.results) * (1 + call.gradient)


def _judge(run: Thunk, law: Law, call: MixturesCall, dtype: torch.dtype, *, poison: bool = True) -> Conformance:
    terms = call.b * call.d if dtype != call.dtype else max(call.n, call.d)
    allowed = 2 * conformance.baseline_tolerance(call.dtype, terms)  # two products, with a 16-bit rounding in between
    return conformance.judge_runs(lambda: run().flatten(1), law, allowed, dtype, poison=poison)


def _results(o: MixturesOperands) -> list[Law]:
    """Compute X (W X)^T, and V X if requested, in float64, with the size that errors are relative to."""
    x, w = o.x.double(), o.weight.double()
    y = w @ x
    p = x @ y.mT
    squares = x.square() @ (w.square() @ x.square() + y.square()).mT
    laws = [Law(p.flatten(1), (squares + p.square()).sqrt().flatten(1))]
    if o.mixing is not None:
        v = o.mixing.double()
        z = v @ x
        laws.append(Law(z.flatten(1), (v.square() @ x.square() + z.square()).sqrt().flatten(1)))
    return laws


def _gradients(o: MixturesOperands) -> list[Law]:
    """Compute dX = dP Y + W^T dY + V^T dZ, and dW and dV as sums of dY X^T and dZ X^T, in float64, with dY = dP^T X."""
    x, w, dp = (t.double() for t in (o.x, o.weight, o.dp))
    y, dy = w @ x, dp.mT @ x
    y_terms = w.square() @ x.square() + y.square()
    dy_terms = dp.square().mT @ x.square() + dy.square()
    dx, dw = dp @ y + w.T @ dy, (dy @ x.mT).sum(0)
    dx_terms = dp.square() @ y_terms + w.square().T @ dy_terms
    dw_terms = (dy_terms @ x.square().mT).sum(0) + dw.square()
    weights = [Law(dw, dw_terms.sqrt())]
    if o.mixing is not None and o.dz is not None:
        v, dz = o.mixing.double(), o.dz.double()
        dx, dv = dx + v.T @ dz, (dz @ x.mT).sum(0)
        dx_terms = dx_terms + v.square().T @ dz.square()
        weights.append(Law(dv, ((dz.square() @ x.square().mT).sum(0) + dv.square()).sqrt()))
    return [Law(dx.flatten(1), (dx_terms + dx.square()).sqrt().flatten(1)), *weights]
