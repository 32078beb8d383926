import pytest
import torch

from loka.models.dhen import DHEN, DHENConfig
from loka.nn import FeatureMix

from .checks import affine, assert_compiles, assert_same_with_gradients, layer_norm, randomize, tower


def mix(x, module):
    return torch.einsum("mn,bnd->bmd", module.weight, x)


def plain_interaction(kind, module, x):
    batch, n, d = x.shape
    if kind == "dot":
        dots = torch.stack([(x[:, i] * x[:, j]).sum(-1) for i in range(n) for j in range(i)], 1)
        return affine(dots, module.project).view(batch, -1, d)
    if kind == "cross":
        flat = x.flatten(1)
        w = module.cross.up.weight @ module.cross.down.weight
        return affine(flat * (flat @ w.T + module.cross.up.bias) + flat, module.project).view(batch, -1, d)
    if kind == "linear":
        return mix(x, module)
    q, k, v = affine(x, module.attention.qkv).chunk(3, -1)
    heads = module.attention.heads
    outs = []
    for a, b, c in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        outs.append(((a @ b.mT) / (d / heads) ** 0.5).softmax(-1) @ c)
    return mix(affine(torch.cat(outs, -1), module.attention.out), module.mix)


def plain_dhen(model, x):
    for layer in model.layers:
        parts = [plain_interaction(name.split("_")[1], module, x) for name, module in layer.interactions.items()]
        ensemble = torch.cat(parts, 1) if model.config.ensemble == "concat" else sum(parts)
        shortcut = mix(x, layer.shortcut) if isinstance(layer.shortcut, FeatureMix) else x
        x = layer_norm(ensemble + shortcut, layer.norm)
    return tower(x.flatten(1), model.head)


@pytest.mark.parametrize("ensemble", ["concat", "sum"])
@pytest.mark.parametrize("interactions", [("dot", "linear", "cross"), ("attention", "linear")])
def test_same_as_the_equations_in_float64(ensemble, interactions):
    torch.manual_seed(0)
    config = DHENConfig(n=3, d=4, layers=2, m=2, interactions=interactions, ensemble=ensemble, rank=3, top=(5,))
    model = randomize(DHEN(config).double())
    x = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(model, lambda x: plain_dhen(model, x), x)


def test_compiles_to_one_graph_and_takes_a_batch_of_one():
    torch.manual_seed(0)
    model = DHEN(DHENConfig(n=3, d=4, m=2, layers=1, interactions=("dot", "linear", "cross", "attention")))
    assert_compiles(model, torch.randn(3, 3, 4))
    assert model(torch.randn(1, 3, 4)).shape == (1, 1)


def test_config_is_checked():
    with pytest.raises(ValueError, match=r"convolution.*dot, cross"):
        DHENConfig(interactions=("convolution",))
    with pytest.raises(ValueError, match="ensemble is 'mean'"):
        DHENConfig(ensemble="mean")
