"""attention_layout: plain self-attention gives the same values and gradients, and every other call is torch's own."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka import mods

from .zoo import assert_same_state, snapshot


class Attending(nn.Module):
    """Self-attention without its weights, as encoder layers call it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(16, 4, **options), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(x, x, x, need_weights=False)[0])


def make(**options: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model = Attending(**options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))  # torch starts with biases of zero, which hide a lost one
    return model, torch.randn(5, 3, 16)


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(2)
    x = x.clone().requires_grad_()
    y = model(x)
    return y.detach(), list(torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bias": False}], ids=str)
def test_the_same_up_to_rounding(options: dict[str, Any], training: bool) -> None:
    model, x = make(**options)
    expected = step(model.train(training), x)
    done = mods.apply(model, "attention_layout", example=x)
    assert [change.site for change in done.summary.changed] == ["attention"]
    torch.testing.assert_close(step(model.train(training), x), expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        model.eval()
        out = model(x)
        mods.revert(model)
        torch.testing.assert_close(out, model(x), rtol=1e-5, atol=1e-6)


def test_dropout_is_on_in_training_alone() -> None:
    model, x = make(dropout=0.5, batch_first=True)
    mods.apply(model, "attention_layout", example=x)
    model.eval()
    assert torch.equal(step(model, x)[0], model(x).detach())
    model.train()
    torch.manual_seed(1)
    a, b = model(x), model(x)
    assert not torch.equal(a, b)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: m(x, x, x, need_weights=True),
        lambda m, x: m(x, x, x),
        lambda m, x: m(x, x, x, None, False),
        lambda m, x: m(x, x.flip(0), x, need_weights=False),
        lambda m, x: m(x, x[:2], x[:2], need_weights=False),
        lambda m, x: m(x, x, x, need_weights=False, key_padding_mask=torch.eye(3, 5).bool()),
        lambda m, x: m(x, x, x, need_weights=False, attn_mask=torch.ones(5, 5).triu(1).bool()),
        lambda m, x: m(x, x, x, need_weights=False, attn_mask=torch.full((5, 5), -1e9).triu(1), is_causal=True),
        lambda m, x: m(x[:, 0], x[:, 0], x[:, 0], need_weights=False),
    ],
    ids=["weights", "default", "positional", "key", "cross", "padding", "mask", "causal", "no batch"],
)
def test_other_calls_are_torchs_own(call: Any) -> None:
    model, x = make()
    model.train()
    expected = call(model.attention, x)
    mods.apply(model, "attention_layout", example=x)
    found = call(model.attention, x)
    assert (found[1] is None) == (expected[1] is None)
    assert torch.equal(found[0], expected[0])
    if expected[1] is not None:
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("options", [{"kdim": 8, "vdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_unpacked_projections_are_left(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 4, **options))
    done = mods.apply(model, "attention_layout")
    assert not done.summary.changed
    assert "not packed" in done.summary.left[0].why


def test_attention_over_another_key_is_left() -> None:
    class Crossing(Attending):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.attention(x[:1], key=x, value=x, need_weights=False)[0])

    done = mods.apply(Crossing(), "attention_layout", example=torch.randn(5, 3, 16))
    assert not done.summary.changed
    assert "another key" in done.summary.left[0].why


def test_a_parametrised_projection_is_left() -> None:
    model = nn.Sequential(nn.MultiheadAttention(16, 4))
    nn.utils.parametrizations.orthogonal(model[0], "in_proj_weight")
    done = mods.apply(model, "attention_layout")
    assert not done.summary.changed
    assert "parametrised" in done.summary.left[0].why


def test_a_forward_of_its_own_is_left() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            return query, None

    model = nn.Sequential(Own(16, 4))
    done = mods.apply(model, "attention_layout")
    assert not done.summary.changed
    assert "forward of its own" in done.summary.left[0].why


def test_under_autocast() -> None:
    model, x = make(batch_first=True)
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, x)
        mods.apply(model, "attention_layout", example=x)
        found = step(model, x)
    assert found[0].dtype == expected[0].dtype
    torch.testing.assert_close(found[0], expected[0], rtol=0.03, atol=0.03)
    for a, b in zip(found[1], expected[1], strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 0.05 * b.norm() + 1e-3


@pytest.mark.parametrize("training", [True, False])
def test_compiles_whole(training: bool) -> None:
    model, x = make(batch_first=True)
    mods.apply(model, "attention_layout", example=x)
    model.train(training)
    expected = step(model, x)
    found = step(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_inside_torchs_encoder() -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(3, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 5])
    for training in (True, False):
        model.train(training)
        expected, masked = model(x).detach(), model(x, src_key_padding_mask=padding).detach()
        mods.apply(model, "attention_layout", example=x)
        model.train(training)
        torch.testing.assert_close(model(x).detach(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            model(x, src_key_padding_mask=padding).detach()[~padding], masked[~padding], rtol=1e-5, atol=1e-5
        )
        mods.revert(model)


def test_reverts_and_keeps_parameters_and_keys() -> None:
    model, x = make()
    before, parameters = snapshot(model), list(model.parameters())
    mods.apply(model, "attention_layout", example=x)
    assert_same_state(model, before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    model.eval()
    out = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), out)
    mods.revert(model)
    assert type(model.attention) is nn.MultiheadAttention
    assert_same_state(model, before)


def test_is_the_formula() -> None:
    """Against attention written out, so that torch's own cannot hide a mistake both make."""
    model, x = make(batch_first=True)
    mods.apply(model, "attention_layout", example=x)
    m = model.attention.train()
    q, k, v = F.linear(x, m.in_proj_weight, m.in_proj_bias).chunk(3, -1)
    heads = [t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v)]
    weights = (heads[0] @ heads[1].mT / 2.0).softmax(-1)
    expected = m.out_proj((weights @ heads[2]).transpose(1, 2).flatten(2))
    torch.testing.assert_close(m(x, x, x, need_weights=False)[0], expected, rtol=1e-5, atol=1e-6)


def test_projections_are_sites_that_convert_and_revert() -> None:
    import loka

    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
    model, x = nn.Sequential(layer, nn.Linear(64, 1)), torch.randn(4, 8, 64)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    before = model(x).detach()
    plan = loka.placing.plan_everything(model, x, mods=["attention_layout"], linears=64)
    assert {"0.self_attn.in_proj", "0.self_attn.out_proj"} <= {name for unit in plan.units for name in unit.linears}
    loka.convert(model, plan, example=x)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    found = model(x)
    assert 0 < float((found.detach() - before).norm() / before.norm()) < 0.2
    found.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    model.load_state_dict({key: torch.zeros_like(value) for key, value in model.state_dict().items()}, assign=True)
    assert torch.equal(model(x), torch.zeros_like(found)), "assigned parameters are those that are multiplied"
    loka.revert(model)
    assert type(model[0].self_attn) is nn.MultiheadAttention
    assert list(model.state_dict()) == keys
