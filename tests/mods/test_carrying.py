"""Modified models are pickled, copied, saved, wrapped and compiled like any other."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loka import mods

from .zoo import Residual, assert_same_state, run, snapshot, subject

NAMES = ["mlp", "residual", "shared", "wukong"]


def save_and_load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


CARRIERS = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "torch.save": save_and_load,
}


@pytest.mark.parametrize("carry", CARRIERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_modified_model_is_carried_with_what_its_mods_did(name, carry):
    model, inputs = subject(name)
    before = snapshot(model)
    mods.apply(model, [*mods.names()], example=inputs)
    out = run(model, inputs)
    twin = CARRIERS[carry](model)
    assert torch.equal(run(twin, inputs), out)
    assert mods.applied_to(twin) == mods.applied_to(model)
    mods.revert(twin)
    assert_same_state(twin, before)
    assert torch.equal(run(model, inputs), out), "reverting a copy must not reach the original"
    mods.revert(model)
    assert_same_state(model, before)


@pytest.mark.parametrize("order", ["epilogue", "pre", "post"])
@pytest.mark.parametrize("name", ["mlp", "residual", "post-residual"])
def test_moved_norms_are_carried(name, order):
    model, inputs = subject(name)
    mods.apply(model, mods.NormOrder(order), example=inputs)
    out = run(model, inputs)
    twin = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # a copy has norms of its own
    assert torch.equal(run(twin, inputs), out)


class Encoder(nn.Module):
    def __init__(self, *, packs: bool = False, **options: object) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1, **options)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=packs), nn.Linear(16, 1)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.last(self.encoder(x, src_key_padding_mask=padding))


@pytest.mark.parametrize("mod", [*mods.names(), "norm_order:pre", "norm_order:post"])
@pytest.mark.parametrize("options", [{}, {"activation": nn.GELU()}, {"norm_first": True}])
def test_the_fused_path_of_torch_goes_past_no_mod(mod, options):
    """In eval mode, with and without a mask, the result is what the parts compute one by one."""
    torch.manual_seed(0)
    model, x = Encoder(**options), torch.randn(3, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 2 + [True] * 3])
    name, _, order = mod.partition(":")
    before = snapshot(model)
    applied = mods.apply(model, mods.NormOrder(order) if order else name, example=(x, padding))
    assert not [left for left in applied.summary.left if "undone" in left.why], applied
    model.eval()
    for mask in (None, padding):
        with torch.no_grad():
            fast = model(x, mask)
        slow = model(x, mask)  # with gradients torch takes the ordinary path
        real = slice(None) if mask is None else ~mask
        torch.testing.assert_close(fast[real], slow.detach()[real], rtol=1e-5, atol=1e-5)
    mods.revert(model)
    assert_same_state(model, before)
    with torch.no_grad():
        model(x, padding)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_an_encoder_that_packs_padded_batches_keeps_its_zeros():
    torch.manual_seed(0)
    model, x = Encoder(packs=True), torch.randn(3, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 2 + [True] * 3])
    model.eval()
    with torch.no_grad():
        before = model(x, padding)
        applied = mods.apply(model, "protect_residual", example=(x, padding))
        torch.testing.assert_close(model(x, padding), before)
        assert applied.summary.changed
        assert not any("undone" in left.why for left in applied.summary.left)
        mods.revert(model)
        mods.apply(model, "block_norm", example=(x, padding))
        after = model(x, padding)
    assert torch.isfinite(after).all()
    mods.revert(model)
    with torch.no_grad():
        assert torch.equal(model(x, padding), before)


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    world = torch.distributed.group.WORLD  # held here: a DDP model that is the last to hold it may wait for ever
    yield world
    gc.collect()
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "compiled ddp": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize(
    "mod", ["protect_residual", "align_shapes", "hard_swish", "norm_order", "protect_intermediates"]
)
def test_wrappers_are_seen_through_and_names_are_plain(group, wrapper, mod):
    plain, inputs = subject("post-residual")
    wrapped, _ = subject("post-residual")
    outer = WRAPPERS[wrapper](wrapped)
    outer(*inputs)  # what was compiled before the mod must not serve after it
    expected = mods.apply(plain, mod, example=inputs)
    found = mods.apply(outer, mod, example=inputs)
    assert found.summary.changed == expected.summary.changed
    assert found.summary.left == expected.summary.left
    assert mods.applied_to(outer) == mods.applied_to(plain) == (mod,)
    torch.testing.assert_close(outer(*inputs), plain(*inputs), rtol=0, atol=0)
    assert mods.revert(outer) == mods.revert(plain)
    torch.testing.assert_close(outer(*inputs), plain(*inputs), rtol=0, atol=0)


def test_a_compiled_part_is_named_as_if_it_were_not():
    plain, inputs = subject("residual")
    model, _ = subject("residual")
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    for mod in ("align_shapes", "protect_residual", "block_norm"):
        found, expected = (mods.apply(m, mod, example=inputs).summary for m in (model, plain))
        assert [(c.site, c.effect) for c in found.changed] == [(c.site, c.effect) for c in expected.changed]
    assert torch.equal(run(model, inputs), run(plain, inputs))


def test_parameters_that_ddp_waits_for_are_not_taken_away(group):
    torch.manual_seed(0)
    model = DistributedDataParallel(Residual())
    x = torch.randn(4, 12)
    applied = mods.apply(model, ["no_bias", "block_norm", "hard_swish"], example=x)
    assert set(applied.sites) == {"hard_swish"}
    assert all("before wrapping" in left.why for left in applied.summary.left if "undone" in left.why)
    for _ in range(2):
        model(x).sum().backward()


def test_hooks_on_a_module_that_is_replaced_go_on_seeing_it():
    model, inputs = subject("mlp")
    seen: list[str] = []
    handle = model[1].register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    mods.apply(model, "block_norm", example=inputs)
    seen.clear()
    model(*inputs)
    assert seen == ["BlockNorm"]
    handle.remove()
    model(*inputs)
    mods.revert(model)
    model(*inputs)
    assert seen == ["BlockNorm"]


class Behind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.norm = nn.Linear(32, 32), nn.ReLU(), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.act(self.linear(x)))


def test_a_kernel_never_goes_past_a_norm_that_a_hook_runs():
    torch.manual_seed(0)
    model, x = nn.Sequential(Behind(), nn.Linear(32, 16)), torch.randn(4, 32)
    mods.apply(model, "norm_order", example=x)
    moved = model(x)
    applied = mods.apply(model, mods.Fuse(precision="fp8", linears=16, narrow=16), example=x)
    assert any("hook" in left.why for left in applied.summary.left)
    assert float((model(x) - moved).detach().norm() / moved.detach().norm()) < 0.2
