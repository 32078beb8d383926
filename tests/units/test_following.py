"""What the kernels know by name is what a chain finds, and the other way round."""

import pytest
import torch
from torch import Tensor, nn

from loka.kernels.activation import ACTIVATIONS
from loka.lowp.chain import chains_of
from loka.nn import BlockNorm
from loka.placing import convert, plan_everything
from loka.units import discover, refuse_unit
from loka.units.following import activation_of, make_activation


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "none"])
def test_every_activation_of_the_kernels_is_a_module_that_chains_know(name: str) -> None:
    assert activation_of(make_activation(name)) == name


def test_a_slope_is_kept_and_other_modules_are_none() -> None:
    leaky = make_activation("leaky_relu", 0.2)
    assert isinstance(leaky, nn.LeakyReLU)
    assert leaky.negative_slope == 0.2
    assert activation_of(nn.Mish()) is None


class _Louder:
    """What a user's subclass may do: another function under the name of a known class."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x) + 1  # type: ignore[misc]


def _subclass(kind: type[nn.Module], *args: object) -> nn.Module:
    return type(f"Loud{kind.__name__}", (_Louder, kind), {})(*args)


def _replaced(kind: type[nn.Module], *args: object) -> nn.Module:
    module, own = kind(*args), kind.forward
    module.forward = lambda x: 3 * own(module, x) + 1
    return module


KINDS = [
    (nn.ReLU,), (nn.SiLU,), (nn.GELU,), (nn.Tanh,), (nn.LeakyReLU,), (nn.Identity,), (nn.Dropout, 0.0), (nn.LayerNorm, 64), (nn.RMSNorm, 64),
    (BlockNorm, 64), (nn.BatchNorm1d, 64),
]  # fmt: skip


@pytest.mark.parametrize("change", [_subclass, _replaced])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0].__name__)
def test_a_module_with_a_forward_of_its_own_is_not_taken_for_its_class(kind: tuple, change) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), kind[0](*kind[1:]), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).eval()
    x = torch.randn(32, 64)
    (unit,) = discover(plain, x, serving=True).units
    assert unit.linears == ["0", "2"]

    plain[1] = change(*kind)
    assert refuse_unit(plain, unit), "a plan of the class must not fit"
    exact = plain(x)
    convert(plain, plan_everything(plain, x, linears=64, serving=True), example=x)
    assert [len(chain.links) for _, chain in chains_of(plain)] == [1, 1]
    assert float((plain(x) - exact).norm() / exact.norm()) < 0.2
