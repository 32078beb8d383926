"""Activation checkpoints inside a forward that a mod computes differently: what is run again in backward is what was run before."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka import mods


class Checkpointed(nn.Module):
    """Products that mods recognise, inside a checkpoint or not."""

    def __init__(self, products: str, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.p, self.out = nn.Parameter(torch.randn(8, 4) / 3), nn.LazyLinear(1)
        self.products, self.reentrant = products, reentrant

    def part(self, x: Tensor) -> Tensor:
        if self.products == "feature_products":
            return torch.bmm(x, torch.einsum("bnd,nk->bdk", x, self.p)).flatten(1)
        if self.products == "fused_dots":
            i, j = torch.triu_indices(8, 8, 1)
            return torch.bmm(x, x.transpose(1, 2))[:, i, j]
        return torch.einsum("be,bed->bd", x.mean(2).softmax(1), x)

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.out(self.part(x))
        return self.out(checkpoint(self.part, x, use_reentrant=self.reentrant))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mod", ["feature_products", "fused_dots", "weighted_sums"])
def test_gradients_through_a_checkpoint_are_those_without_the_mod(mod: str, reentrant: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    x = torch.randn(48, 8, 16, generator=torch.Generator().manual_seed(1))
    plain, model = Checkpointed(mod, None), Checkpointed(mod, reentrant)
    plain(x)
    model(x)
    model.load_state_dict(plain.state_dict())
    done = mods.apply(model, [mod], example=x)
    assert mod in done.sites, done
    run = torch.compile(model, backend="aot_eager") if compiled else model
    for expected, found in zip(gradients(plain, x), gradients(run, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
