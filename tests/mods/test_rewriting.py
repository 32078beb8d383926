import copy

import pytest
import torch
from torch import nn

import loka
from loka import models, mods
from loka.records import from_json, to_json
from loka.records.mods import ModSummary

from .zoo import MODDED, PLAIN, SUBJECTS, assert_same_state, build_family, run, snapshot, subject


@pytest.mark.parametrize("mod", mods.names())
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_mod_on_every_model_is_applied_and_reverted(name, mod):
    model, inputs = subject(name)
    before, out, tree = snapshot(model), run(model, inputs), repr(model)
    applied = mods.apply(model, mod, example=inputs)
    after = run(model, inputs)
    assert torch.isfinite(after).all()
    if applied.effect == "exact":
        torch.testing.assert_close(after, out, rtol=1e-12, atol=1e-12)
    elif applied.effect == "rounding":
        torch.testing.assert_close(after, out, rtol=1e-9, atol=1e-9)
    assert applied.summary.changed or applied.summary.left or repr(model) == tree, "a silent change"
    mods.revert(model)
    assert_same_state(model, before)
    assert torch.equal(run(model, inputs), out)
    assert repr(model) == tree
    assert mods.applied_to(model) == ()


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_core_mods_together_train_and_revert_to_the_original_architecture(name):
    model, inputs = subject(name)
    with torch.no_grad():
        model(*inputs)  # attention says what it ran, once it has
    before, tree = snapshot(model), repr(model)
    applied = mods.apply(model, mods.CORE, example=inputs)
    assert applied.effect == "architecture"
    model.train()
    out = model(*inputs)
    loss = sum(t.square().mean() for t in (out if isinstance(out, tuple) else (out,)))
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.01 * p.grad
    mods.revert(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert repr(model) == tree
    assert any(not torch.equal(after[k], before[k]) for k in before), "what was trained must stay trained"


@pytest.mark.parametrize("family", models.names())
def test_mods_on_the_plain_style_build_what_the_modded_style_builds(family):
    plain, modded = dict(PLAIN), dict(MODDED)
    if family == "onerec":  # its published style has no biases, so its prediction layers have none to keep
        plain["bias"] = False
    original, inputs = build_family(family, **plain)
    built, _ = build_family(family, **modded)
    mods.apply(original, mods.CORE)
    assert [(n, repr(m)) for n, m in original.named_modules()] == [(n, repr(m)) for n, m in built.named_modules()]
    built.load_state_dict(original.state_dict())
    assert torch.equal(run(built, inputs), run(original, inputs))


def test_a_summary_says_what_changed_what_was_left_and_survives_as_a_record():
    model, inputs = subject("gated")
    applied = mods.apply(model, mods.CORE, example=inputs, model_name="gated")
    text = str(applied)
    assert "gate: Sigmoid -> HardSigmoid" in text
    assert "left probability: it makes the model's result" in text
    assert "left batch: BatchNorm1d keeps statistics over the batch" in text
    assert "silu as a function" in text
    assert from_json(to_json(applied.summary), ModSummary) == applied.summary
    assert applied.summary.removed == ["make_gate.bias"]
    assert applied.sites == {"no_bias": ["make_gate"], "hard_swish": ["gate"]}


def test_a_filter_keeps_modules_out():
    model, inputs = subject("mlp")
    applied = mods.apply(model, "no_bias", example=inputs, module_filter_fn=lambda module, name: name != "0")
    assert model[0].bias is not None
    assert model[1].bias is None
    assert [left.site for left in applied.summary.left if "module_filter_fn" in left.why] == ["0"]


def test_copies_of_a_modified_model_revert_on_their_own():
    model, inputs = subject("residual")
    before = snapshot(model)
    mods.apply(model, mods.CORE, example=inputs)
    twin = copy.deepcopy(model)
    assert torch.equal(run(twin, inputs), run(model, inputs))
    mods.revert(twin)
    assert_same_state(twin, before)
    assert mods.applied_to(model) == mods.CORE
    mods.revert(model)
    assert_same_state(model, before)


def test_all_mods_together_compile_to_one_graph_and_take_gradients():
    model, inputs = build_family("wukong", layers=1, **PLAIN)
    model.float()
    (x,) = (t.float() for t in inputs)
    everything = [*mods.CORE, "norm_order", "protect_residual", "protect_intermediates", "align_shapes", "fuse"]
    applied = mods.apply(model, everything, example=x)
    assert {"protect_residual", "protect_intermediates", "fuse"} <= set(applied.sites)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    model(x).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled(x).sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_mods_come_before_conversion():
    model = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
    loka.convert(model, recipe="tensorwise")
    with pytest.raises(ValueError, match=r"already in low precision: 0, 2; call loka\.revert"):
        mods.apply(model, "hard_swish")
    loka.revert(model)
    mods.apply(model, "hard_swish")
    loka.convert(model, recipe="tensorwise")
    with pytest.raises(ValueError, match="still in low precision"):
        mods.revert(model)


def test_unknown_and_repeated_mods_are_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"no mod 'magic'; the mods are no_bias, block_norm"):
        mods.apply(model, ["magic"])
    with pytest.raises(ValueError, match="given twice: no_bias"):
        mods.apply(model, "no_bias,no_bias")
    with pytest.raises(ValueError, match="no mod given"):
        mods.apply(model, [])
    with pytest.raises(ValueError, match="got int"):
        mods.apply(model, [3])  # type: ignore[list-item]


def test_options_are_spelled_where_they_are_not_the_default():
    assert mods.spell(mods.UseBlockNorm(block=128)) == "block_norm(block=128)"
    assert mods.spell(mods.UseBlockNorm()) == "block_norm"


@pytest.mark.parametrize("mod", mods.names())
def test_a_part_that_torchscript_runs_is_left_alone(mod):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.SiLU()))
    model, x = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), scripted, nn.Linear(16, 1)), torch.randn(8, 16)
    before = model(x)
    mods.apply(model, mod, example=x)
    assert model[2] is scripted
    mods.revert(model)
    assert torch.equal(model(x), before)
