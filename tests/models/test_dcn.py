import pytest
import torch

from loka.models.dcn import DCNv2, DCNv2Config

from .checks import assert_compiles, assert_same_with_gradients, randomize, tower


def plain_dcn(model, x):
    x0 = y = x.flatten(1)
    for layer in model.cross.layers:
        w = layer.up.weight
        if model.config.rank is not None:
            w = w @ layer.down.weight
        y = x0 * (y @ w.T + layer.up.bias) + y
    if model.config.structure == "stacked":
        return tower(tower(y, model.deep), model.head)
    return tower(torch.cat([y, tower(x0, model.deep)], 1), model.head)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
def test_same_as_the_equations_in_float64(rank, structure):
    torch.manual_seed(0)
    config = DCNv2Config(n=3, d=2, layers=3, rank=rank, deep=(5, 4), structure=structure)
    model = randomize(DCNv2(config).double())
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(model, lambda x: plain_dcn(model, x), x)


def test_compiles_to_one_graph_and_takes_a_batch_of_one():
    torch.manual_seed(0)
    model = DCNv2(DCNv2Config(n=3, d=4, rank=4, structure="parallel"))
    assert_compiles(model, torch.randn(3, 3, 4))
    assert model(torch.randn(1, 3, 4)).shape == (1, 1)


def test_low_rank_has_the_parameters_of_two_thin_matrices():
    def crosses(rank):
        model = DCNv2(DCNv2Config(n=4, d=8, layers=1, rank=rank))
        return sum(p.numel() for p in model.cross.parameters())

    assert crosses(None) == 32 * 32 + 32
    assert crosses(3) == 2 * 32 * 3 + 32


def test_config_is_checked():
    with pytest.raises(ValueError, match="rank is 64"):
        DCNv2Config(n=4, d=4, rank=64)
    with pytest.raises(ValueError, match="structure is 'both'"):
        DCNv2Config(structure="both")
    with pytest.raises(ValueError, match="deep is empty"):
        DCNv2Config(deep=())
