"""What modes record while a forward runs, where torch.compile breaks its graph."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka import mods

N, D = 5, 8


class Products(nn.Module):
    """Pairwise products and mixtures of the same features, before and behind a place that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.over = nn.Parameter(torch.randn(N, 3)), nn.Linear(N, 4)
        i, j = torch.triu_indices(N, N, 1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)

    def forward(self, x: Tensor) -> Tensor:
        dots = torch.bmm(x, x.transpose(1, 2))[:, self.i, self.j]
        mixed = torch.bmm(x, torch.einsum("bnd,nk->bdk", x, self.matrix))
        over = self.over(x.transpose(1, 2)).transpose(1, 2)
        torch._dynamo.graph_break()
        y = x + 1
        more = torch.bmm(y, y.transpose(1, 2))[:, self.i, self.j]
        again = torch.bmm(y, torch.einsum("bnd,nk->bdk", y, self.matrix))
        behind = self.over(y.transpose(1, 2)).transpose(1, 2)
        return torch.cat([part.flatten(1) for part in (dots, mixed, over, more, again, behind)], 1)


def writes_to_its_memory(graph: Any, _: Any) -> Callable[..., Any]:
    """Run a graph as a compiler's code does, which writes results into memory that it has allocated."""

    def run(*args: Any) -> Any:
        torch.add(torch.zeros(2), 1, out=torch.empty(2))
        return graph(*args)

    return run


@pytest.mark.parametrize("training", [False, True])
def test_what_compiled_code_writes_behind_a_graph_break_takes_nothing_away(training: bool) -> None:
    torch.manual_seed(0)
    model, x = Products(), torch.randn(4, N, D)
    plain = copy.deepcopy(model)
    done = mods.apply(model, ["feature_layout", "feature_products", "shared_features", "fused_dots"], example=x)
    assert done.summary.changed
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        compiled = torch.compile(model, backend=writes_to_its_memory)
        torch.testing.assert_close(compiled(x), plain(x))
        torch.testing.assert_close(compiled(2 * x), plain(2 * x))
