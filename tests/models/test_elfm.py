import pytest
import torch

from loka import models
from loka.models.dhen import DHENConfig
from loka.models.elfm import ELFM, ELFMConfig

from .checks import affine, assert_compiles, assert_same_with_gradients, layer_norm, randomize, tower

CONFIG = ELFMConfig(
    n=3, d=4, dhen=DHENConfig(layers=1, m=2, interactions=("linear", "dot")), dots=(3,), cross=(5,), top=(4,)
)


def plain_elfm(model, x):
    (layer,) = model.dhen
    dots = torch.stack([(x[:, i] * x[:, j]).sum(-1) for i in range(3) for j in range(i)], 1)
    linear = torch.einsum("mn,bnd->bmd", layer.interactions["0_linear"].weight, x)
    projected = affine(dots, layer.interactions["1_dot"].project).view(len(x), 2, 4)
    shortcut = torch.einsum("mn,bnd->bmd", layer.shortcut.weight, x)
    deep = layer_norm(torch.cat([linear, projected], 1) + shortcut, layer.norm).flatten(1)
    x0 = y = x.flatten(1)
    for cross in model.cross.layers:
        y = x0 * affine(y, cross.up) + y
    return tower(torch.cat([deep, tower(dots, model.dot_tower), tower(y, model.cross_tower)], 1), model.head)


def test_same_as_the_equations_in_float64():
    torch.manual_seed(0)
    model = randomize(ELFM(CONFIG).double())
    x = torch.randn(3, 3, 4, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(model, lambda x: plain_elfm(model, x), x)


def test_compiles_to_one_graph_and_takes_a_batch_of_one():
    torch.manual_seed(0)
    model = ELFM(CONFIG)
    assert_compiles(model, torch.randn(3, 3, 4))
    assert model(torch.randn(1, 3, 4)).shape == (1, 1)


def test_style_reaches_the_dhen_branch():
    model = models.build("elfm", "tiny", bias=False)
    assert [n for n, _ in model.named_parameters() if n.endswith("bias")] == ["head.last.bias"]


def test_large_costs_what_was_published():
    """40 GFLOP per sample, read as forward and backward: three times the forward."""
    assert models.count(models.configure("elfm", "large")).flops_forward * 3 == pytest.approx(40e9, rel=0.02)


def test_config_is_checked():
    with pytest.raises(ValueError, match="dots="):
        ELFMConfig(dots=())
