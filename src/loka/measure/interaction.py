"""Benchmark adapter of interaction: a Wukong layer around its tower (shape rows x vectors x width).

A variant is `K/NL+NF`: K mixtures for the products, NL linear mixtures, NF vectors from the tower, e.g. `24/32+32`.
Options: `project` (the residual is mixed too), `gradient` (both gradient kernels instead), and a dtype. The tower
itself is not included: its output and gradient are inputs.

The reference is the layer in float64. FP8 products are judged like every fused result (`rounding`), allowing for
mixtures that were rounded to 16-bit; the next x and gradients by relative L2 error, as a whole and per example.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels.fused_linear.call import NORM_EPS, NORMALIZED_SCALE
from loka.kernels.interaction.call import InteractionCall
from loka.measure import inputs
from loka.measure.conformance import ELEMENT_ALLOWANCE, ULP, Conformance, worst_of
from loka.measure.fused import FLOAT32, block_norm, compiled, judge_twice
from loka.measure.inputs import Shape
from loka.measure.op import Op, read_variant, spell_variant
from loka.measure.rounding import as_share, judge_near, judge_rounded
from loka.measure.timing import Thunk

_COUNTS = r"(\d+)/(\d+)\+(\d+)"
NEXT = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # relative L2: mixtures and result are rounded
GRADIENT = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # four products with roundings in between


def _fits(shape: Shape, variant: str) -> bool:
    """Check whether x has the shape of its residual. True for an invalid variant, which `parse` rejects later."""
    counts, *options = variant.split("|")
    match = re.fullmatch(_COUNTS, counts)
    return match is None or "project" in options or shape[1] == int(match[2]) + int(match[3])


@dataclass(frozen=True)
class LayerCall(InteractionCall):
    """A call with the options of its variant."""

    gradient: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}{', gradient' if self.gradient else ''}"


@dataclass(frozen=True)
class LayerOperands:
    """x, the mixing weights, the scale of the products and the tower's output.

    For the gradient: the gradients of the products and of `next`, and `next` with its rstd.
    """

    x: Tensor
    weight: Tensor
    scale: Tensor
    tower: Tensor
    dq: Tensor
    dnext: Tensor
    next: Tensor
    rstd: Tensor


@dataclass(frozen=True)
class Exact:
    """In float64: normalized products and their allowed error, the next x, and the factor of its norm."""

    products: Tensor
    error: Tensor
    next: Tensor
    rstd: Tensor


class Interaction(Op[LayerCall]):
    """The interaction of a Wukong layer, or its gradient."""

    op = "interaction"
    OWN = LayerCall
    DIMENSIONS = ("rows", "n", "d")
    VARIANTS = ("24/32+32", "24/32+32|project", "24/32+32|gradient")

    def calls(self, shapes: Sequence[Shape], variants: Sequence[str]) -> list[LayerCall]:
        """Return the calls of every shape with every variant that fits it."""
        pairs = [(shape, variant) for shape in shapes for variant in variants]
        made = [self.parse(shape, variant) for shape, variant in pairs if _fits(shape, variant)]
        if pairs and not made:
            raise ValueError(
                f"no shape fits a variant: without `project` the vectors are as many as NL+NF; got {pairs[0]}"
            )
        return made

    def parse(self, shape: Shape, variant: str) -> LayerCall:
        """See `Op.parse`: examples, vectors, width and `K/NL+NF`."""
        spelled = f"K/NL+NF[|project][|gradient][|dtype]; e.g. {self.VARIANTS[1]}"
        match, options, dtype = read_variant(variant, _COUNTS, ("project", "gradient"), spelled)
        k, n_l, n_f = (int(part) for part in match.groups())
        return LayerCall(*shape, k, n_l, n_f, "project" in options, dtype, "gradient" in options)

    def spell(self, call: LayerCall) -> str:
        """See `Op.spell`."""
        return spell_variant(f"{call.k}/{call.n_l}+{call.n_f}", call, ("project", "gradient"))

    def operands(self, call: LayerCall, *, seed: int, distribution: str, device: torch.device) -> LayerOperands:
        """Draw normalized vectors of the distribution, mixtures of order one, normal tower output and gradients."""

        def draw(rows: int, columns: int, part: int, kind: str = "normal") -> Tensor:
            return inputs.draw(rows, columns, distribution=kind, seed=8 * seed + part, device=device)

        raw = draw(call.rows * call.n, call.d, 0, distribution)
        x = block_norm(raw.double(), NORM_EPS)[0].view(call.rows, call.n, call.d).to(call.dtype)
        weight = (draw(call.weights, call.n, 1) * call.n**-0.5).to(call.dtype)
        tower = draw(call.rows, call.n_f * call.d, 2).to(call.dtype)
        vectors = call.n_f + call.n_l
        exact = _exact(call, x, weight, tower)
        return LayerOperands(
            x,
            weight,
            torch.full((), NORMALIZED_SCALE, device=device),
            tower,
            draw(call.rows, call.n * call.k, 3).to(call.dtype),
            draw(call.rows, vectors * call.d, 4).view(call.rows, vectors, call.d).to(call.dtype),
            exact.next.to(call.dtype),
            exact.rstd.float(),
        )

    def thunk(self, backend: Any, call: LayerCall, operands: LayerOperands) -> Thunk:
        """Return both kernels of the layer, or both of its gradient."""
        o = operands

        def forward() -> tuple[Any, Tensor]:
            made = backend.run(o.x, o.weight, call, o.scale, keep=True)
            return made.products, backend.finish(made, o.tower, call)

        def backward() -> tuple[Tensor, ...]:
            ds = backend.norm_gradient(o.dnext, o.next, o.rstd)
            return ds, *backend.gradient(o.x, o.weight, o.dq, ds, call)

        return backward if call.gradient else forward

    def exact(self, call: LayerCall, operands: LayerOperands) -> Exact | None:
        """See `Op.exact`. Gradients are exact given the dS that a backend returns, so `compare` computes them."""
        return None if call.gradient else _exact(call, operands.x, operands.weight, operands.tower)

    def shows_nan(self, call: LayerCall) -> bool:
        """See `Op.shows_nan`."""
        return not call.gradient

    def compare(self, backend: Any, call: LayerCall, operands: LayerOperands, exact: Callable[[], Any]) -> Conformance:
        """Check all outputs, plain and with poisoned allocations."""
        if call.gradient:
            return judge_twice(
                self.thunk(backend, call, operands), lambda result: _judge_gradient(call, operands, result)
            )

        def judge(result: Any) -> Conformance:
            (products, following), law = result, exact()
            near = judge_near(following, law.next, NEXT[call.dtype], what="next")
            return worst_of([judge_rounded(products, law.products, law.error, what="products"), as_share(near)])

        return judge_twice(self.thunk(backend, call, operands), judge)

    def baseline(self, call: LayerCall, operands: LayerOperands) -> Thunk:
        """Return the unquantized layer in plain torch with an RMS norm, forward only; compiled on a GPU."""
        run = compiled(lambda x, w, tower: _plain(call, x, w, tower), operands.x.device)
        return lambda: run(operands.x, operands.weight, operands.tower)

    def check_baseline(self, call: LayerCall, operands: LayerOperands) -> Conformance:
        """Check the next x by relative L2, since sums are rounded before the norm."""
        exact = _exact(call, operands.x, operands.weight, operands.tower)
        found = self.baseline(call, operands)()[1]
        return judge_near(found, exact.next, 2 * NEXT[call.dtype], what="the baseline")

    def bytes_moved(self, call: LayerCall) -> int:
        """Count x, the tower's output, products and next x; for the gradient, x, next, both gradients, dS and dx."""
        item, vectors = call.dtype.itemsize, call.n_f + call.n_l
        if call.gradient:
            inner = call.n * call.k * item + 3 * vectors * call.d * item
            return call.rows * (inner + 2 * call.n * call.d * item)
        return call.rows * (call.n * call.d * item + call.n * call.k + (call.n_f + vectors) * call.d * item)

    def flops(self, call: LayerCall) -> int:
        """Count mixtures and products; for the gradient each of them twice, plus what is recomputed."""
        mixed, products = call.weights * call.n * call.d, call.n * call.k * call.d
        again = call.k * call.n * call.d + products
        return 2 * call.rows * ((2 * (mixed + products) + again) if call.gradient else mixed + products)


def _layer(call: InteractionCall, x: Tensor, weight: Tensor, tower: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the products before their norm, their mixtures, and the sums before the last norm."""
    mixed = weight @ x
    mixtures = mixed[:, call.n_l : call.n_l + call.k]
    residual = mixed[:, call.n_l + call.k :] if call.project else x
    vectors = torch.cat([tower.view(-1, call.n_f, call.d), mixed[:, : call.n_l]], 1)
    return (x @ mixtures.mT).flatten(1), mixtures, vectors + residual


def _factor(sums: Tensor) -> Tensor:
    return torch.rsqrt(sums.square().mean(-1) + NORM_EPS)


def _exact(call: InteractionCall, x: Tensor, weight: Tensor, tower: Tensor) -> Exact:
    wide = x.double()
    products, mixtures, sums = _layer(call, wide, weight.double(), tower.double())
    normal, factor = block_norm(products, NORM_EPS)
    terms = (wide.square() @ mixtures.square().mT).flatten(1).sqrt() * factor
    typical = ULP[x.dtype] / 12**0.5 * (terms + terms.square().mean(1, keepdim=True).sqrt())
    error = ELEMENT_ALLOWANCE * typical + FLOAT32 * normal.abs().amax(1, keepdim=True)
    rstd = _factor(sums)
    return Exact(normal, error, sums * rstd[..., None], rstd)


def _plain(call: InteractionCall, x: Tensor, weight: Tensor, tower: Tensor) -> tuple[Tensor, Tensor]:
    products, _, sums = _layer(call, x, weight, tower)
    flat = products.float()
    normal = flat * torch.rsqrt(flat.square().mean(1, keepdim=True) + NORM_EPS)
    wide = sums.float()
    return normal.to(x.dtype), (wide * _factor(wide)[..., None]).to(x.dtype)


def _judge_gradient(call: LayerCall, o: LayerOperands, result: tuple[Tensor, ...]) -> Conformance:
    """Check dS; then dx and dW against autograd in float64, given the backend's dS."""
    ds, dx, dw = result
    n, g = o.next.double(), o.dnext.double()
    exact_ds = o.rstd.double()[..., None] * (g - n * (g * n).mean(-1, keepdim=True))
    allowed = GRADIENT[call.dtype]
    verdicts = [judge_near(ds, exact_ds, allowed, what="dS")]
    if not verdicts[0]:
        return as_share(verdicts[0])
    x, weight = o.x.double().requires_grad_(), o.weight.double().requires_grad_()
    with torch.enable_grad():
        products, _, sums = _layer(call, x, weight, o.tower.double())
        normal = block_norm(products, NORM_EPS)[0]
        found = torch.autograd.grad([normal, sums], [x, weight], [o.dq.double(), ds.double()])
    verdicts += [judge_near(dx, found[0], allowed, what="dx"), judge_near(dw, found[1], allowed, what="dW")]
    return worst_of([as_share(verdict) for verdict in verdicts])
