import pytest
import torch

from loka.models.dlrm import DLRM, DLRMConfig

from .checks import assert_compiles, assert_same_with_gradients, randomize, tower


def plain_dlrm(model, x, dense):
    dots = [(x[:, i] * x[:, j]).sum(-1) for i in range(x.shape[1]) for j in range(i)]
    return tower(torch.cat([*(x[:, i] for i in range(dense)), torch.stack(dots, 1)], 1), model.head)


@pytest.mark.parametrize("dense", [0, 1, 2])
def test_same_as_the_equations_in_float64(dense):
    torch.manual_seed(0)
    model = randomize(DLRM(DLRMConfig(n=4, d=3, dense_vectors=dense, top=(5,), labels=2)).double())
    x = torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(model, lambda x: plain_dlrm(model, x, dense), x)


def test_compiles_to_one_graph_and_takes_a_batch_of_one():
    torch.manual_seed(0)
    model = DLRM(DLRMConfig(n=4, d=3))
    assert_compiles(model, torch.randn(3, 4, 3))
    assert model(torch.randn(1, 4, 3)).shape == (1, 1)


def test_config_is_checked():
    with pytest.raises(ValueError, match="at least two"):
        DLRMConfig(n=1)
    with pytest.raises(ValueError, match="dense_vectors is 9"):
        DLRMConfig(n=4, dense_vectors=9)
