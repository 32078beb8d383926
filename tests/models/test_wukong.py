import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loka import models
from loka.models.wukong import Wukong, WukongConfig
from loka.nn import BlockNorm, HardSwish

from .checks import assert_compiles, assert_same_with_gradients, layer_norm, randomize, tower

CONFIG = WukongConfig(n=5, d=4, layers=2, n_l=2, n_f=3, k=2, hidden=6, depth=3, top=(6, 3))


def plain_wukong(model, x):
    """The equations of the paper, X^T Y by einsum, one example at a time where that is clearer."""
    for layer in model.layers:
        w_l, y, *w_r = layer.mix.weight.split(layer.mix.rows)
        products = torch.einsum("bnd,bmd,km->bnk", x, x, y)
        generated = tower(layer_norm(products.flatten(1), layer.fmb.norm), layer.fmb.mlp).view(len(x), -1, x.shape[-1])
        compressed = torch.einsum("mn,bnd->bmd", w_l, x)
        residual = torch.einsum("mn,bnd->bmd", w_r[0], x) if w_r else x
        x = layer_norm(torch.cat([generated, compressed], 1) + residual, layer.norm)
    return tower(x.flatten(1), model.head)


@pytest.mark.parametrize("n", [5, 7])
def test_same_as_the_equations_in_float64(n):
    torch.manual_seed(0)
    model = randomize(Wukong(WukongConfig(n=n, d=4, layers=2, n_l=2, n_f=3, k=2, hidden=6, top=(6, 3))).double())
    x = torch.randn(3, n, 4, dtype=torch.float64, requires_grad=True)
    assert_same_with_gradients(model, lambda x: plain_wukong(model, x), x)


def test_compiles_to_one_graph():
    torch.manual_seed(0)
    assert_compiles(Wukong(CONFIG), torch.randn(3, 5, 4))


@pytest.mark.parametrize("batch", [1, 0, 9])
def test_any_batch_size(batch):
    assert Wukong(CONFIG)(torch.randn(batch, 5, 4)).shape == (batch, 1)


def test_bf16_end_to_end_under_autocast():
    model, seen = Wukong(CONFIG), []
    for layer in model.layers:
        layer.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(3, 5, 4))
    assert seen == [torch.bfloat16] * 2


def test_mods_are_flags():
    model = models.build("wukong", "tiny", norm="block", tower_norm="block", activation="hard_swish", bias=False)
    biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert biases == ["head.last.bias"]
    kinds = {type(m) for m in model.modules()}
    assert {BlockNorm, HardSwish} <= kinds
    assert torch.nn.LayerNorm not in {base for kind in kinds for base in kind.__mro__}
    assert model(torch.randn(2, 16, 16)).isfinite().all()


def test_published_rows_by_name():
    config = models.configure("wukong", "8x96x3x8192")
    assert (config.layers, config.n_l, config.n_f, config.k, config.hidden, config.d) == (8, 96, 96, 96, 8192, 160)
    assert len([s for s in models.sizes("wukong") if s.count("x") == 3]) == 7


def test_cost_of_the_measured_model():
    """116 M dense parameters is what the plain implementation had on the GPU."""
    cost = models.count(models.configure("wukong", "plain"))
    assert round(cost.parameters / 1e6) == 117
    by_hand = 0
    for n in [128] + [64] * 5:
        rows = 32 + 24 + (64 if n != 64 else 0)
        by_hand += rows * n * 128 + n * 128 * 24 + n * 24 * 2048 + 2048 * 2048 + 2048 * 32 * 128
    by_hand += 64 * 128 * 2048 + 2048 * 1024 + 1024
    assert cost.flops_forward == 2 * by_hand


def test_wrong_shape_and_bad_config_say_what_was_expected():
    with pytest.raises(ValueError, match=r"\[B, 5, 4\].*\(2, 6, 4\)"):
        Wukong(CONFIG)(torch.randn(2, 6, 4))
    with pytest.raises(ValueError, match=r"WukongConfig.k is 0"):
        WukongConfig(k=0)


def test_no_tensor_of_vectors_is_copied_or_transposed_in_memory():
    """Forward and backward are products, norms, sums and one concat: nothing is cloned only to lie differently."""
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 3:
                seen.append(func)
            return out

    model = Wukong(WukongConfig(n=7, d=4, layers=2, n_l=2, n_f=3, k=2, hidden=6, top=(6, 3)))
    with Record():
        model(torch.randn(3, 7, 4, requires_grad=True)).sum().backward()
    copies = {torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
    assert torch.ops.aten.bmm.default in seen
    assert not copies & set(seen)
