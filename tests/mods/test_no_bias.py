from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loka import mods

from .zoo import run, subject

widths = st.integers(1, 33)


@settings(max_examples=20, deadline=None)
@given(st.lists(widths, min_size=2, max_size=5), st.integers(0, 2**31))
def test_a_chain_of_linears_keeps_its_function(sizes, seed):
    """Biases run down the chain into the prediction layer's."""
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes))).double()
    x = torch.randn(4, sizes[0], dtype=torch.float64)
    before = run(model, (x,))
    applied = mods.apply(model, "no_bias", example=(x,))
    assert [m.bias is None for m in model] == [True] * (len(model) - 1) + [False]
    assert len(applied.summary.changed) == len(model) - 1
    torch.testing.assert_close(run(model, (x,)), before, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(widths, widths, st.integers(1, 5), st.integers(0, 2**31))
def test_the_shift_of_a_norm_moves_through_a_flatten(n, d, outputs, seed):
    torch.manual_seed(seed)
    norm = nn.LayerNorm(d).double()
    nn.init.normal_(norm.bias)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(n * d, outputs).double())
    x = torch.randn(3, n, d, dtype=torch.float64)
    before = run(model, (x,))
    mods.apply(model, "no_bias", example=(x,))
    assert norm.bias is None
    torch.testing.assert_close(run(model, (x,)), before, rtol=1e-9, atol=1e-9)


def test_an_activation_in_between_makes_it_an_architecture_change():
    model, inputs = subject("mlp")
    applied = mods.apply(model, "no_bias", example=inputs)
    effects = {c.site: c.effect for c in applied.summary.changed}
    assert effects == {"0": "architecture", "1": "architecture", "3": "architecture", "5": "rounding"}
    assert [c.what for c in applied.summary.changed if c.site == "5"] == ["bias folded into that of 6"]


def test_without_an_example_the_prediction_layer_is_guessed_and_the_summary_says_so():
    model, _ = subject("residual")
    applied = mods.apply(model, "no_bias")
    assert model.last.bias is not None
    assert model.blocks[0].up.bias is None
    assert "guessed from their few outputs (last)" in applied.summary.notes[0]


def test_two_towers_that_are_added_are_both_prediction_layers():
    class WideAndDeep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.first, self.deep = nn.Linear(6, 1), nn.Linear(6, 9), nn.Linear(9, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.wide(x) + self.deep(self.first(x).relu()))

    model = WideAndDeep()
    mods.apply(model, "no_bias", example=torch.randn(3, 6))
    assert [m.bias is None for m in (model.wide, model.first, model.deep)] == [False, True, False]


def test_a_model_that_ends_in_a_residual_has_no_prediction_layer():
    model, inputs = subject("residual")
    body = model.blocks
    mods.apply(body, "no_bias", example=inputs)
    assert all(m.bias is None for m in body.modules() if isinstance(m, nn.Linear))


def test_multihead_attention_is_left_alone():
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.attention(x, x, x)[0])

    model = Attends()
    applied = mods.apply(model, "no_bias", example=torch.randn(2, 3, 8))
    assert [(left.site, left.why) for left in applied.summary.left] == [
        ("attention.out_proj", "nn.MultiheadAttention reads its bias itself"),
        ("last", "a prediction layer keeps its bias"),
    ]
