"""What the kernels know by name is what a chain finds, and the other way round."""

import pytest
from torch import nn

from loka.kernels.activation import ACTIVATIONS
from loka.units.following import activation_of, make_activation


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "none"])
def test_every_activation_of_the_kernels_is_a_module_that_chains_know(name: str) -> None:
    assert activation_of(make_activation(name)) == name


def test_a_slope_is_kept_and_other_modules_are_none() -> None:
    leaky = make_activation("leaky_relu", 0.2)
    assert isinstance(leaky, nn.LeakyReLU)
    assert leaky.negative_slope == 0.2
    assert activation_of(nn.Mish()) is None
