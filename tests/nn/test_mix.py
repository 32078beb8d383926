import pytest
import torch

from loka.nn import DotInteraction, FactorizationMachine, FeatureMix, multiply_transposed


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


def test_feature_mix_under_autocast_is_bf16_and_writes_no_copy_of_w_per_example():
    mix = FeatureMix(64, 64)
    x = torch.randn(512, 64, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.profiler.profile(profile_memory=True) as profile:
        y = mix(x)
    assert y.dtype == torch.bfloat16
    written = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert written < 512 * 64 * 64 * 2, "one bf16 copy of W per example would be at least this large"


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
