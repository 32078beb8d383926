"""feature_products: matrices over features multiply from the left, however the product is spelled; other contractions are torch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from loka import mods
from loka.mods import feature_products

from .zoo import assert_same_state, snapshot

SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "einsum": lambda x, p: torch.einsum("bnd,nk->bdk", x, p),
    "einsum, list": lambda x, p: torch.einsum("bnd, nk -> bdk", [x, p]),
    "einsum, matrix first": lambda x, p: torch.einsum("nk,bnd->bdk", p, x),
    "einsum, transposed": lambda x, p: torch.einsum("bnd,kn->bkd", x, p.T).mT,
    "matmul": lambda x, p: x.transpose(1, 2) @ p,
    "torch.matmul": lambda x, p: torch.matmul(x.transpose(-1, -2), p),
}


class Machine(nn.Module):
    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.p, self.spelling = nn.Parameter(torch.randn(6, 3)), spelling
        self.last = nn.Linear(18, 2)

    def forward(self, x: Tensor) -> Tensor:
        mixed = SPELLINGS[self.spelling](x, self.p)
        return self.last(torch.bmm(x, mixed).flatten(1))


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    y = model(x)
    return y.detach(), list(torch.autograd.grad(y.square().sum(), [x, *model.parameters()], materialize_grads=True))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_same_up_to_rounding(spelling: str) -> None:
    torch.manual_seed(0)
    model, x = Machine(spelling), torch.randn(5, 6, 4)
    expected, before = step(model, x), snapshot(model)
    done = mods.apply(model, "feature_products", example=x)
    assert [change.site for change in done.summary.changed] == [""]
    torch.testing.assert_close(step(model, x), expected, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-5)
    mods.revert(model)
    assert_same_state(model, before)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, p: torch.einsum("bnd,dk->bnk", x, p[:4]),
        lambda x, p: torch.einsum("bnd,nk->bk", x, p),
        lambda x, p: torch.einsum("bnd,nd->bn", x, torch.ones(6, 4) + p.sum()),
        lambda x, p: x @ p[:4],
    ],
    ids=["last dimension", "summed", "two letters", "plain"],
)
def test_other_contractions_are_left(other: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Other(Machine):
        def forward(self, x: Tensor) -> Tensor:
            return other(x, self.p).sum()

    model, x = Other("matmul"), torch.randn(5, 6, 4)
    assert not mods.apply(model, "feature_products", example=x).summary.changed


def test_without_an_example_it_says_so() -> None:
    done = mods.apply(Machine("einsum"), "feature_products")
    assert "pass example=" in done.summary.left[0].why


INPLACE = [nn.LeakyReLU(0.1, inplace=True), nn.ELU(inplace=True), nn.Hardswish(inplace=True), nn.ReLU(inplace=True)]


def _negate(x: Tensor) -> Tensor:
    torch._foreach_mul_([x], -1.0)
    return x


def _frozen(x: Tensor, p: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.einsum("bnd,nk->bdk", x, p)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda x, p: torch.bmm(x, torch.einsum("bnd,nk->bdk", x, p)),
    "matmul": lambda x, p: torch.matmul(x, x.transpose(1, 2) @ p),
    "@": lambda x, p: x @ torch.einsum("nk,bnd->bdk", p, x),
    "einsum": lambda x, p: torch.einsum("bnd,bdk->bnk", x, torch.einsum("bnd,nk->bdk", x, p)),
    "einsum, mixtures first": lambda x, p: torch.einsum("bnd,bkd->bnk", x, torch.einsum("bnd,nk->bkd", x, p)),
    "transposed": lambda x, p: x @ torch.einsum("bnd,nk->bkd", x, p).transpose(1, 2),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of another tensor": lambda x, p: torch.bmm(x + 1, torch.einsum("bnd,nk->bdk", x, p)),
    "written to": lambda x, p: torch.bmm(x, torch.einsum("bnd,nk->bdk", x, p).mul_(2.0)),
    **{
        f"behind {act}": (lambda x, p, act=act: torch.bmm(x, act(torch.einsum("bnd,nk->bdk", x, p)))) for act in INPLACE
    },
    "without gradients": lambda x, p: torch.bmm(x, _frozen(x, p)),
    "of mixtures that were changed": lambda x, p: torch.bmm(x, torch.einsum("bnd,nk->bdk", x, p) * 2.0),
}


class Products(nn.Module):
    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.p, self.multiply = nn.Parameter(torch.randn(6, 3)), multiply

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.p).flatten(1)


@pytest.mark.parametrize("way", [*PRODUCTS, *OTHERS])
def test_compiled_x_meets_mixtures_of_itself_in_one_kernel(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, seen = Products({**PRODUCTS, **OTHERS}[way]), torch.randn(5, 6, 4), []
    expected = step(model, x)
    mods.apply(model, "feature_products", example=x)
    own = feature_products.multiply_mixtures

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        seen.append(way)
        return own(x, weight)

    monkeypatch.setattr(feature_products, "multiply_mixtures", multiply)
    torch.testing.assert_close(step(model, x), expected, rtol=1e-5, atol=1e-5)
    assert not seen  # eager mode has the mixtures already
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-5)
    assert bool(seen) == (way in PRODUCTS)


def test_a_write_that_no_mode_sees_in_compiled_code_is_seen_on_the_example() -> None:
    torch._dynamo.reset()
    model, x = Products(lambda x, p: torch.bmm(x, _negate(torch.einsum("bnd,nk->bdk", x, p)))), torch.randn(5, 6, 4)
    with torch.no_grad():
        expected = model(x)
        mods.apply(model, "feature_products", example=x)
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_under_autocast_products_are_of_its_type() -> None:
    torch._dynamo.reset()
    model, x = Products(PRODUCTS["bmm"]), torch.randn(5, 6, 4)
    mods.apply(model, "feature_products", example=x)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(x), torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.05)


@pytest.mark.parametrize("write", [lambda y: y.mul_(2.0), lambda y: torch._foreach_mul_([y], 3.0), lambda y: y[:, :2].zero_()])  # fmt: skip
def test_features_that_are_written_to_afterwards_are_left(write: Callable[[Tensor], object]) -> None:
    """Backward would read what was written: torch itself keeps the transposed copy that this mod avoids."""

    class Written(Machine):
        def forward(self, x: Tensor) -> Tensor:
            y = x.detach() * 1.0
            mixed = torch.einsum("bnd,nk->bdk", y, self.p)
            write(y)
            return self.last(torch.bmm(y, mixed).flatten(1))

    torch.manual_seed(0)
    model, x = Written("einsum"), torch.randn(5, 6, 4)
    expected = step(model, x)[0], list(torch.autograd.grad(model(x).square().sum(), model.parameters()))
    done = mods.apply(model, "feature_products", example=x)
    assert "written to in place afterwards" in str(done)
    compiled = torch.compile(model, backend="aot_eager")
    found = step(compiled, x)[0], list(torch.autograd.grad(compiled(x).square().sum(), model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
