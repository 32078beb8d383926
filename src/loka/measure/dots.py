"""The benchmark's view of dots: products of pairs of the N vectors of width D that each of B examples has (shape B x N x D).

A variant names the pairs, `lower` (every pair once), `triangle` (each vector with itself too) or `all`, and takes options: `gradient` and a type.
Every element is judged: the exact sum in float64, rounded once; the gradient's weights are rounded to the type of x before they are multiplied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from loka.kernels.dots.call import DotsCall
from loka.measure import inputs
from loka.measure.conformance import ULP, Conformance
from loka.measure.fused import DTYPES, FLOAT32, compiled, judge_twice
from loka.measure.inputs import Shape
from loka.measure.nearness import judge_near
from loka.measure.rounding import judge_rounded
from loka.measure.timing import Rival, Thunk

Kind = Literal["lower", "triangle", "all"]
KINDS: tuple[Kind, ...] = ("lower", "triangle", "all")
BASELINE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # relative L2: autograd rounds both halves


@dataclass(frozen=True)
class PairsCall(DotsCall):
    """A call, which pairs, and whether it is the gradient."""

    kind: Kind = "lower"
    gradient: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()} {self.kind}{', gradient' if self.gradient else ''}"


@dataclass(frozen=True)
class PairsOperands:
    """x [B, n, d], the two index tensors [P], and for the gradient that of the products [B, P]."""

    x: Tensor
    first: Tensor
    second: Tensor
    dy: Tensor


class Dots:
    """The products, or their gradient."""

    op = "dots"
    VARIANTS = ("lower", "lower|gradient", "all")

    def calls(self, shapes: Sequence[Shape], variants: Sequence[str]) -> list[PairsCall]:
        """Every shape (examples, vectors, width) under every variant."""
        return [self._call(shape, variant) for shape in shapes for variant in variants]

    def _call(self, shape: Shape, variant: str) -> PairsCall:
        kind, *options = variant.split("|")
        types = [option for option in options if option in DTYPES]
        if kind not in KINDS or set(options) - {"gradient", *types} or len(types) > 1:
            raise ValueError(
                f"variant {variant!r} is not {' or '.join(KINDS)}[|gradient][|dtype]; e.g. {self.VARIANTS[1]}"
            )
        b, n, d = shape
        pairs = _indices(n, kind, torch.device("cpu"))[0].shape[0]
        return PairsCall(b, n, d, pairs, DTYPES[types[0]] if types else torch.bfloat16, kind, "gradient" in options)

    def encode(self, call: PairsCall) -> dict[str, Any]:
        """As JSON."""
        options = [*(["gradient"] if call.gradient else []), str(call.dtype).removeprefix("torch.")]
        return {**self.shape(call), "variant": "|".join([call.kind, *options])}

    def decode(self, fields: dict[str, Any]) -> PairsCall:
        """From JSON."""
        return self._call((fields["b"], fields["n"], fields["d"]), fields["variant"])

    def shape(self, call: PairsCall) -> dict[str, int]:
        """Examples, vectors, width."""
        return {"b": call.b, "n": call.n, "d": call.d}

    def operands(self, call: PairsCall, *, seed: int, distribution: str, device: torch.device) -> PairsOperands:
        """Vectors of the distribution, in float16 small enough for its range; normal gradients."""
        raw = inputs.draw(call.b * call.n, call.d, distribution=distribution, seed=2 * seed, device=device)
        if call.dtype == torch.float16:
            raw = raw / (raw.nan_to_num().norm(dim=1).amax() / 128).clamp(min=1.0)  # products up to 128^2
        dy = inputs.draw(call.b, call.pairs, seed=2 * seed + 1, device=device).to(call.dtype)
        return PairsOperands(raw.view(call.b, call.n, call.d).to(call.dtype), *_indices(call.n, call.kind, device), dy)

    def thunk(self, backend: Any, call: PairsCall, operands: PairsOperands) -> Thunk:
        """One kernel."""
        o = operands
        if call.gradient:
            return lambda: backend.gradient(o.dy, o.x, o.first, o.second)
        return lambda: backend.run(o.x, o.first, o.second)

    def check(self, backend: Any, call: PairsCall, operands: PairsOperands) -> Conformance:
        """Every element, plain and with poisoned allocations."""
        exact, error = _exact(call, operands)
        what = "dx" if call.gradient else "products"
        return judge_twice(self.thunk(backend, call, operands), lambda out: judge_rounded(out, exact, error, what=what))

    def baseline(self, call: PairsCall, operands: PairsOperands) -> Thunk:
        """The batch product and the index in the type of x, as a model has them; compiled on a GPU. The gradient is autograd's."""
        o = operands
        if not call.gradient:
            run = compiled(lambda x, i, j: torch.bmm(x, x.mT)[:, i, j], o.x.device)
            return lambda: run(o.x, o.first, o.second)
        x = o.x.detach().requires_grad_()
        run = compiled(lambda x, i, j: torch.bmm(x, x.mT)[:, i, j], o.x.device)
        with torch.enable_grad():
            y = run(x, o.first, o.second)
        return lambda: torch.autograd.grad(y, x, o.dy, retain_graph=True)[0]

    def check_baseline(self, call: PairsCall, operands: PairsOperands) -> Conformance:
        """By relative L2: autograd rounds both halves of the gradient before it adds them."""
        exact, _ = _exact(call, operands)
        return judge_near(self.baseline(call, operands)(), exact, BASELINE[call.dtype], what="the baseline")

    def rivals(self, call: PairsCall, sets: Sequence[PairsOperands]) -> list[Rival]:
        """None: the baseline is the rival."""
        return []

    def bytes_moved(self, call: PairsCall) -> int:
        """x in and the products out; backward x and their gradient in, that of x out."""
        vectors, products = call.n * call.d, call.pairs
        return call.b * call.dtype.itemsize * (2 * vectors + products if call.gradient else vectors + products)

    def flops(self, call: PairsCall) -> int:
        """Of the pairs that were asked for; each is multiplied with two vectors in the gradient."""
        return 2 * call.b * call.pairs * call.d * (2 if call.gradient else 1)


def _indices(n: int, kind: Kind, device: torch.device) -> tuple[Tensor, Tensor]:
    if kind == "all":
        grid = torch.arange(n * n, device=device)
        return grid // n, grid % n
    rows = torch.tril_indices(n, n, offset=-1 if kind == "lower" else 0, device=device)
    return rows[0].contiguous(), rows[1].contiguous()


def _exact(call: PairsCall, o: PairsOperands) -> tuple[Tensor, Tensor]:
    """In float64, and what a single element may have lost before it was rounded."""
    x = o.x.double()
    if not call.gradient:
        i, j = o.first, o.second
        return torch.bmm(x, x.mT)[:, i, j], FLOAT32 * torch.bmm(x.abs(), x.abs().mT)[:, i, j]
    grid = torch.zeros(call.b, call.n, call.n, dtype=torch.float64, device=x.device)
    every = torch.arange(call.b, device=x.device)[:, None]
    grid = grid.index_put((every, o.first[None], o.second[None]), o.dy.double(), accumulate=True)
    both = grid + grid.mT
    loss = FLOAT32 + (ULP[call.dtype] / 2 if call.dtype.itemsize < 4 else 0.0)
    return torch.bmm(both, x), loss * torch.bmm(both.abs(), x.abs())
