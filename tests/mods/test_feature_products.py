"""feature_products: matrices over features multiply from the left, however the product is spelled; other contractions are torch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from loka import mods

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
    return y.detach(), list(torch.autograd.grad(y.square().sum(), [x, *model.parameters()]))


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
