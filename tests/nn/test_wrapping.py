import warnings

import pytest
import torch
from torch import nn

import loka
from loka.lowp.witness import StaleWeightWarning
from loka.nn.wrapping import in_eval


class Merging(nn.Module):
    """Its `train` does more than to set the mode, as adapters that are merged into a weight for inference do."""

    def __init__(self) -> None:
        super().__init__()
        self.merged, self.frozen, self.norm = False, nn.Linear(2, 2).eval(), nn.LayerNorm(2)

    def train(self, mode: bool = True) -> "Merging":
        self.merged = not mode
        return super().train(mode)


def test_modes_return_through_a_modules_own_train() -> None:
    model = nn.Sequential(Merging(), nn.Dropout())
    model[0].frozen.eval()
    before = [module.training for module in model.modules()]
    with in_eval(model):
        assert not any(module.training for module in model.modules())
        assert model[0].merged
    assert not model[0].merged
    assert [module.training for module in model.modules()] == before


def test_a_weight_that_is_swapped_in_eval_mode_only_is_not_stale_afterwards() -> None:
    """An average of the weights, for example: a converted linear drops its cached weight at every change of the mode."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(32, 64)
    loka.convert(model, recipe="rowwise")
    expected, weight = model(x).detach(), model[0].weight.detach().clone()
    with torch.no_grad(), in_eval(model):
        model[0].weight.data.mul_(3)
        assert not torch.equal(model(x), expected)
        model[0].weight.data.copy_(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaleWeightWarning)
        assert torch.equal(model(x), expected)


def test_modes_return_after_an_error() -> None:
    model = Merging()
    with pytest.raises(KeyError), in_eval(model):
        raise KeyError
    assert model.training
    assert not model.merged
