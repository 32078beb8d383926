import pytest
import torch

from loka.nn import HardSigmoid, HardSwish, Sigmoid
from loka.nn.activation import gate_for, make_activation, make_gate


def test_hard_swish_is_its_formula():
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)
    torch.testing.assert_close(HardSwish()(x), x * (x + 3).clamp(0, 6) / 6)
    torch.testing.assert_close(HardSigmoid()(x), (x + 3).clamp(0, 6) / 6)


def test_hard_forms_saturate_exactly():
    x = torch.tensor([-3.0, -100.0, 3.0, 100.0])
    assert HardSwish()(x).tolist() == [0.0, 0.0, 3.0, 100.0]
    assert HardSigmoid()(x).tolist() == [0.0, 0.0, 1.0, 1.0]


def test_names():
    x = torch.randn(5)
    torch.testing.assert_close(make_activation("silu")(x), x * torch.sigmoid(x))
    torch.testing.assert_close(make_activation("relu")(x), x.clamp(min=0))
    torch.testing.assert_close(make_activation("gelu")(x), x * 0.5 * (1 + torch.erf(x / 2**0.5)))
    torch.testing.assert_close(make_gate("sigmoid")(x), torch.sigmoid(x))
    assert isinstance(gate_for("hard_swish"), HardSigmoid)
    assert isinstance(gate_for("silu"), Sigmoid)
    with pytest.raises(ValueError, match=r"mish.*hard_swish"):
        make_activation("mish")
    with pytest.raises(ValueError, match="soft"):
        make_gate("soft")
