import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import loka.nn.mix
from loka.nn import DotInteraction, FactorizationMachine, FeatureMix
from loka.nn.mix import multiply_transposed


def test_feature_mix_is_w_x():
    torch.manual_seed(0)
    mix = FeatureMix(5, (2, 3)).double()
    x = torch.randn(4, 5, 7, dtype=torch.float64)
    expected = torch.einsum("mn,bnd->bmd", mix.weight, x)
    torch.testing.assert_close(mix(x), expected)
    a, b = mix.split(x)
    torch.testing.assert_close(a, expected[:, :2])
    torch.testing.assert_close(b, expected[:, 2:])
    assert set(mix.state_dict()) == {"weight"}


def test_feature_mix_gradients():
    torch.manual_seed(0)
    mix = FeatureMix(4, 3).double()
    x = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    mix(x).backward(grad)
    torch.testing.assert_close(x.grad, torch.einsum("mn,bmd->bnd", mix.weight, grad))
    torch.testing.assert_close(mix.weight.grad, torch.einsum("bmd,bnd->mn", grad, x))


class Largest(TorchDispatchMode):
    """The most elements that any operator wrote into one new tensor."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("products", [1, 25, 10**9])
def test_weight_gradient_is_the_sum_of_all_products_whatever_the_parts(products, monkeypatch):
    monkeypatch.setattr(loka.nn.mix, "PRODUCTS", products)
    torch.manual_seed(0)
    mix = FeatureMix(4, 3).double()
    x = torch.randn(7, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(mix, {"weight": w}, (x,)), (x, mix.weight))
    assert torch.autograd.gradgradcheck(
        lambda x, w: torch.func.functional_call(mix, {"weight": w}, (x,)), (x, mix.weight)
    )


def test_weight_gradient_never_writes_the_products_of_the_whole_batch(monkeypatch):
    monkeypatch.setattr(loka.nn.mix, "PRODUCTS", 32 * 48 * 64)
    mix, x = FeatureMix(64, 48), torch.randn(512, 64, 2, requires_grad=True)
    y = mix(x)
    with Largest() as largest:
        y.backward(torch.randn_like(y))
    assert largest.numel <= max(x.numel(), 32 * 48 * 64) < 512 * 48 * 64


def test_weight_gradient_of_bf16_products_is_summed_in_float32():
    torch.manual_seed(0)
    mix, x = FeatureMix(8, 8), torch.randn(4096, 8, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mix(x)
    grad = torch.ones_like(y)
    y.backward(grad)
    assert mix.weight.grad.dtype == torch.float32
    exact = torch.einsum("bmd,bnd->mn", grad.double(), x.bfloat16().double())
    torch.testing.assert_close(mix.weight.grad.double(), exact, rtol=1e-5, atol=1e-3)
    half = FeatureMix(8, 8).bfloat16()
    half(x.bfloat16()).sum().backward()
    assert half.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_feature_mix_has_the_gradients_of_the_eager_one(dtype):
    torch.manual_seed(0)
    mix = FeatureMix(6, (2, 3))
    x = torch.randn(5, 6, 4, requires_grad=True)
    results = []
    for run in (mix, torch.compile(mix, backend="aot_eager", fullgraph=True)):
        mix.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = run(x)
        y.float().square().sum().backward()
        results.append((y, x.grad, mix.weight.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)
        assert eager.abs().max() > 0


class LargestResult(TorchDispatchMode):
    """The most elements that any operation returns; what an operation allocates inside is its own business and differs from CPU to CPU."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        sizes = [t.untyped_storage().nbytes() // t.element_size() for t in tensors]  # an expanded view owns no copy
        self.largest = max([self.largest, *sizes])
        return result


def test_feature_mix_under_autocast_is_bf16_and_writes_no_copy_of_w_per_example():
    mix = FeatureMix(64, 64)
    x = torch.randn(512, 64, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16), LargestResult() as seen:
        y = mix(x)
    assert y.dtype == torch.bfloat16
    assert seen.largest < 512 * 64 * 64, "a copy of W per example would have this many elements"
    with LargestResult() as copied:
        torch.bmm(mix.weight.expand(512, 64, 64).clone(), x)
    assert copied.largest >= 512 * 64 * 64, "the look must see a copy where there is one"


def test_factorization_machine_is_x_xt_y_in_any_order():
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    y = torch.randn(6, 2, dtype=torch.float64)
    mixtures = torch.einsum("nk,bnd->bkd", y, x)
    torch.testing.assert_close(FactorizationMachine()(x, mixtures), (x @ x.mT) @ y)


def test_dots_are_every_pair_once():
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    expected = torch.stack([(x[:, i] * x[:, j]).sum(-1) for i in range(4) for j in range(i)], 1)
    dots = DotInteraction(4)
    assert dots.width == 6
    torch.testing.assert_close(dots(x), expected)


def test_gradients_of_the_products_are_those_of_the_plain_equations():
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(FactorizationMachine(), (x, y))
    assert torch.autograd.gradcheck(DotInteraction(5), (x,))
    assert torch.autograd.gradcheck(DotInteraction(2), (x[:, :2],))


def test_gradient_of_the_mixtures_has_their_own_layout():
    x = torch.randn(3, 5, 4, requires_grad=True)
    y = torch.randn(3, 2, 4, requires_grad=True)
    grads = torch.autograd.grad(multiply_transposed(x, y).square().sum(), (x, y))
    assert all(grad.is_contiguous() for grad in grads)


def test_bad_counts():
    with pytest.raises(ValueError, match="n=0"):
        FeatureMix(0, 2)
    with pytest.raises(ValueError, match="two"):
        DotInteraction(1)
