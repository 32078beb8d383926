"""What really happens to a model when one product is rounded: the truth that scores are held against.

    fprop          relative change of the log loss of held-out examples with that site alone rounded, weights as they are; paired
    dgrad, wgrad   the same change after ten further steps from one state, with only that GEMM rounded, everything else as it was; paired

Linears that run before the one that is rounded give what they gave in the reference pass, so a swap costs only what comes after it.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.formats import Spec, dequantize, fake_quantize, quantize, scale_from_amax
from loka.probe.score import operands_of
from loka.records import Gemm
from loka.training import ranking_loss

RECIPES = ("tensorwise", "rowwise", "blockwise", "static")
GRADIENT_RECIPES = ("tensorwise", "rowwise", "blockwise")
NUDGES = 3  # runs from weights moved by 2^-9 of their size: what any nudge comes to after the same steps
Truth = dict[str, float]


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    ranking_loss(model, batch)[0].backward()
    optimizer.step()


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    """The log loss of every example, float64."""
    _, logits = ranking_loss(model, batch)
    assert logits is not None
    each = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
    return each.double().reshape(each.shape[0], -1).sum(1)


@torch.no_grad()
def evaluate(model: nn.Module, held_out: list[Any]) -> Tensor:
    model.eval()
    found = torch.cat([losses_of(model, batch) for batch in held_out])
    model.train()
    return found


def compare(low: Tensor, base: Tensor) -> Truth:
    """Relative change of the mean, and its standard error over examples."""
    change = (low - base) / base.mean()
    return {
        "change": float(f"{float(change.mean()):.4g}"),
        "se": float(f"{float(change.std()) / math.sqrt(change.numel()):.4g}"),
    }


# Forward


class Replay:
    """A model run again on one batch, from a linear on: those before it give what they gave.

    Args:
        model: in eval mode; its linears get a forward of their own while this is entered.
    """

    def __init__(self, model: nn.Module) -> None:
        self._linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        self._model, self._kept, self._order = model, list[Tensor](), list[str]()
        self._at, self._first, self._site, self._low = 0, 0, "", F.linear

    def __enter__(self) -> "Replay":
        for name, linear in self._linears.items():
            linear.forward = self._forward_of(name, linear)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for linear in self._linears.values():
            linear.__dict__.pop("forward", None)

    def _forward_of(self, name: str, linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            index, self._at = self._at, self._at + 1
            if index < self._first:
                return self._kept[index]
            if name == self._site:
                return self._low(x, linear.weight, linear.bias)
            y = F.linear(x, linear.weight, linear.bias)
            if not self._site:
                self._order.append(name)
                self._kept.append(y)
            return y

        return forward

    def start(self, batch: Any) -> Tensor:
        """The losses of a batch as the model is; forgets the last batch."""
        self._kept, self._order, self._first, self._site, self._at = [], [], 0, "", 0
        return losses_of(self._model, batch)

    def swap(self, batch: Any, site: str, low: Callable[..., Tensor]) -> Tensor:
        """The losses of the same batch with another function for a site's product."""
        self._site, self._low, self._first, self._at = site, low, self._order.index(site), 0
        return losses_of(self._model, batch)

    def check(self, batch: Any, base: Tensor) -> None:
        """What is kept must still be what it was: a model that writes into the outputs of its linears cannot be replayed."""
        self._site, self._first, self._at = "", len(self._order), 0
        if not torch.equal(losses_of(self._model, batch), base):
            raise RuntimeError("the model writes into the outputs of its linears; it cannot be run from the middle")


@torch.no_grad()
def measure_forward(
    model: nn.Module, sites: dict[str, dict[str, Tensor]], held_out: list[Any]
) -> Iterator[tuple[str, str, Truth]]:
    """Every site alone under every recipe; `sites` has the largest values given scales come from."""
    model.eval()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    swaps = {(n, r): make_low(linears[n], r, largest) for n, largest in sites.items() for r in RECIPES}
    base, found = [], {key: list[Tensor]() for key in swaps}
    with Replay(model) as replay:
        for batch in held_out:
            base.append(replay.start(batch))
            for (site, recipe), low in swaps.items():
                found[site, recipe].append(replay.swap(batch, site, low))
            replay.check(batch, base[-1])
    model.train()
    for (site, recipe), low_losses in found.items():
        yield site, recipe, compare(torch.cat(low_losses), torch.cat(base))


def make_low(linear: nn.Linear, recipe: str, largest: dict[str, Tensor]) -> Callable[..., Tensor]:
    """F.linear of rounded operands; the weight is rounded once."""
    chosen = operands_of(recipe, "fprop")
    assert chosen is not None
    weight = fake_quantize(linear.weight.detach(), chosen.b)
    static = Spec.parse("e4m3:tensor:static")

    def low(x: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if chosen.a.mode == "static":
            rounded = dequantize(quantize(rows, static, scale=scale_from_amax(largest["x"], static)))
        else:
            rounded = fake_quantize(rows, chosen.a)
        return F.linear(rounded, weight, bias).reshape(*x.shape[:-1], -1)

    return low


# Gradients


def measure_gradients(
    model: nn.Module, optimizer: Any, sites: dict[str, list[Gemm]], more: list[Any], held_out: list[Any]
) -> Iterator[tuple[str, Gemm, str, Truth]]:
    """Every gradient GEMM alone under every recipe, the steps `more` from one state. `control` is the rms change of nudged runs."""
    start, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    def train(nudge: int | None = None) -> Tensor:
        model.load_state_dict(start)
        optimizer.load_state_dict(copy.deepcopy(saved))
        if nudge is not None:
            move(model, nudge)
        for batch in more:
            take_step(model, optimizer, batch)
        return evaluate(model, held_out)

    base = train()
    nudged = [compare(train(n), base)["change"] for n in range(NUDGES)]
    control = float(f"{math.sqrt(sum(c * c for c in nudged) / NUDGES):.4g}")
    for site, gemms in sites.items():
        linear = model.get_submodule(site)
        assert isinstance(linear, nn.Linear)
        for gemm in gemms:
            for recipe in GRADIENT_RECIPES:
                with rounded_gradient(linear, gemm, recipe):
                    yield site, gemm, recipe, compare(train(), base) | {"control": control}
    model.load_state_dict(start)
    optimizer.load_state_dict(saved)


@torch.no_grad()
def move(model: nn.Module, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(1 + 2.0**-9 * torch.randn(parameter.shape, generator=noise))


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, round_dx: Any, round_dw: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rounds = (round_dx, round_dw)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dy,), (x, weight), (round_dx, round_dw) = grads, ctx.saved_tensors, ctx.rounds
        return round_dx(dy, weight.T.contiguous()), round_dw(dy.T.contiguous(), x.T.contiguous()), None, None


@contextmanager
def rounded_gradient(linear: nn.Linear, gemm: Gemm, recipe: str) -> Iterator[None]:
    """Inside, one gradient GEMM of a linear is that of rounded operands."""
    chosen = operands_of(recipe, gemm)
    assert chosen is not None

    def low(a: Tensor, b: Tensor) -> Tensor:
        return fake_quantize(a, chosen.a) @ fake_quantize(b, chosen.b).T

    def exact(a: Tensor, b: Tensor) -> Tensor:
        return a @ b.T

    rounds = (low, exact) if gemm == "dgrad" else (exact, low)

    def forward(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y = _RoundedGradient.apply(flat, linear.weight, *rounds).reshape(*x.shape[:-1], -1)  # type: ignore[no-untyped-call]
        return y if linear.bias is None else y + linear.bias

    linear.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        linear.__dict__.pop("forward", None)
