import pytest
import torch
from torch import nn

from loka.nn import MLP, BlockNorm, HardSwish, Style, make_head


def test_tower_is_linear_norm_activation_then_a_plain_linear():
    torch.manual_seed(0)
    style = Style(tower_norm="rms", activation="silu")
    mlp = MLP(6, [8, 10], 4, style=style).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    y = x
    for i in range(2):
        w, b = mlp.layers[i].linear.weight, mlp.layers[i].linear.bias
        y = y @ w.T + b
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mlp.layers[i].norm.weight
        y = y / (1 + (-y).exp())
    torch.testing.assert_close(mlp(x), y @ mlp.last.weight.T + mlp.last.bias)


def test_parts_are_named_children():
    mlp = MLP(6, [8], 4, style=Style(tower_norm="block", activation="hard_swish", bias=False))
    found = dict(mlp.named_modules())
    assert isinstance(found["layers.0.linear"], nn.Linear)
    assert isinstance(found["layers.0.norm"], BlockNorm)
    assert isinstance(found["layers.0.activation"], HardSwish)
    assert set(mlp.state_dict()) == {"layers.0.linear.weight", "last.weight"}


def test_prediction_layer_keeps_its_bias():
    head = make_head(6, [8], 2, Style(bias=False))
    assert head.last.bias is not None
    assert head.layers[0].linear.bias is None


def test_without_output_width_the_last_layer_has_norm_and_activation():
    mlp = MLP(6, [8], style=Style(activation="relu"))
    assert mlp.width_out == 8
    assert mlp(torch.randn(20, 6)).min() >= 0


def test_dropout_only_while_training():
    mlp = MLP(6, [64], style=Style(dropout=0.5, activation="gelu"))
    x = torch.randn(4, 6)
    assert (mlp(x) == 0).float().mean() > 0.25
    torch.testing.assert_close(mlp.eval()(x), mlp(x))


@pytest.mark.parametrize("bad", [{"norm": "batch"}, {"activation": "tanh"}, {"tower_norm": "group"}, {"dropout": 1.0}])
def test_style_refuses_what_it_does_not_know(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Style(**bad)


def test_bad_widths():
    with pytest.raises(ValueError, match="neither"):
        MLP(4, [])
    with pytest.raises(ValueError, match="positive"):
        MLP(4, [0], 1)
