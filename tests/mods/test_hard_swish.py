import torch
from torch import Tensor, nn

from loka import mods
from loka.nn import HardSigmoid, HardSwish, Sigmoid

from .zoo import subject


class SwishNorm(nn.Module):
    """x * sigmoid(norm(x)), as ranking libraries write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.norm(x)


def test_activations_become_hard_and_relu_stays():
    model = nn.Sequential(nn.SiLU(), nn.GELU(), nn.ReLU(), nn.Hardswish(), nn.Linear(3, 3))
    applied = mods.apply(model, "hard_swish", example=torch.randn(2, 3))
    assert [type(m) for m in model] == [HardSwish, HardSwish, nn.ReLU, nn.Hardswish, nn.Linear]
    x = torch.linspace(-5, 5, 11)
    torch.testing.assert_close(model[0](x), x * (x + 3).clamp(0, 6) / 6)
    assert [c.site for c in applied.summary.changed] == ["0", "1"]


def test_a_gate_becomes_hard_and_a_probability_does_not():
    model, inputs = subject("gated")
    mods.apply(model, "hard_swish", example=inputs)
    assert isinstance(model.gate, HardSigmoid)
    assert isinstance(model.probability, nn.Sigmoid)


def test_without_an_example_a_sigmoid_is_left_unless_it_is_a_gate_by_contract():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), Sigmoid(), nn.Linear(3, 3))
    applied = mods.apply(model, "hard_swish")
    assert isinstance(model[1], nn.Sigmoid)
    assert isinstance(model[2], HardSigmoid)
    assert "pass example=" in applied.summary.left[0].why


def test_a_swish_norm_becomes_hard_inside():
    model = nn.Sequential(SwishNorm(4), nn.Linear(4, 1))
    x = torch.randn(5, 4)
    mods.apply(model, "hard_swish", example=x)
    normal = model[0].norm[0](x)
    torch.testing.assert_close(model[0](x), x * (normal + 3).clamp(0, 6) / 6)


def test_gates_can_be_kept():
    model, inputs = subject("gated")
    mods.apply(model, mods.UseHardSwish(gates=False), example=inputs)
    assert isinstance(model.gate, nn.Sigmoid)


class LoudGELU(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x) + 1


class TiltedSigmoid(nn.Sigmoid):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def test_an_activation_with_a_forward_of_its_own_is_left():
    model, x = nn.Sequential(LoudGELU(), nn.Linear(4, 4), TiltedSigmoid(), nn.Linear(4, 1)), torch.randn(3, 4)
    before = model(x)
    applied = mods.apply(model, "hard_swish", example=x)
    assert not applied.summary.changed
    assert "LoudGELU with a forward of its own" in str(applied)
    assert torch.equal(model(x), before)
