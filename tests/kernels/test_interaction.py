"""interaction: every backend against the layer written with float64 matmuls and torch's own norm, and in Triton's interpreter."""

import os

import pytest
import torch
import torch.nn.functional as F

from kernels.fp8_bounds import excess
from kernels.interpreter import run_interpreted
from loka.kernels import BACKENDS, registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.interaction import InteractionCall, finish, interact, interact_gradient, norm_gradient

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
every_backend = pytest.mark.parametrize("name", BACKENDS["interaction"])
CASES = [
    InteractionCall(5, 32, 32, 24, 16, 16, False),
    InteractionCall(3, 48, 16, 12, 20, 28, False),
    InteractionCall(2, 64, 32, 7, 8, 24, True),
    InteractionCall(1, 16, 16, 3, 4, 12, False),
]
# What rounding the mixtures and the result to bf16 leaves; the interpreter truncates.
ROUNDING = 2.0 ** -(6 if INTERPRETED else 7)


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([F.rms_norm(part, part.shape[-1:], eps=1e-6) for part in x.split(256, -1)], -1)


def operands(call: InteractionCall, device: torch.device):
    x = norm(torch.randn(call.rows, call.n, call.d)).to(call.dtype).to(device)
    weight = (torch.randn(call.weights, call.n) * call.n**-0.5).to(call.dtype).to(device)
    return x, weight, torch.full((), 1 / 16, device=device)


def exact(call: InteractionCall, x: torch.Tensor, weight: torch.Tensor, tower: torch.Tensor):
    """The layer's equations in float64."""
    x, mixed = x.double(), weight.double() @ x.double()
    mixtures = mixed[:, call.n_l : call.n_l + call.k]
    residual = mixed[:, call.n_l + call.k :] if call.project else x
    products = norm((x @ mixtures.mT).flatten(1))
    vectors = torch.cat([tower.double().view(call.rows, call.n_f, call.d), mixed[:, : call.n_l]], 1)
    return products, norm(vectors + residual)


@every_backend
@pytest.mark.parametrize("call", CASES, ids=str)
def test_is_the_layer_up_to_rounding(name: str, call: InteractionCall, device: torch.device) -> None:
    verdict = registry.backend("interaction", name).supports(call, device)
    if not verdict:
        pytest.skip(verdict.reason)
    x, weight, scale = operands(call, device)
    tower = torch.randn(call.rows, call.n_f * call.d, device=device).to(call.dtype)
    products, following = exact(call, x, weight, tower)
    made = interact(x, weight, call, scale, backend=name)
    assert excess(made.products, products, 4 * ROUNDING) <= 1
    assert excess(made.products, products * 1.2, 4 * ROUNDING) > 1
    out = finish(made, tower, call, backend=name)
    assert out.shape == following.shape
    assert (out.double() - following).abs().max() <= 4 * ROUNDING * following.abs().max()
    assert not (out.double() * 1.2 - following).abs().max() <= 4 * ROUNDING * following.abs().max()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


@every_backend
@pytest.mark.parametrize("call", CASES, ids=str)
def test_gradients_are_autograds_up_to_rounding(name: str, call: InteractionCall, device: torch.device) -> None:
    """x, W and the tower's output get the gradients autograd finds in float64, when the products' gradient is autograd's too."""
    verdict = registry.backend("interaction", name).supports(call, device)
    if not verdict:
        pytest.skip(verdict.reason)
    x, weight, scale = operands(call, device)
    tower = torch.randn(call.rows, call.n_f * call.d, device=device).to(call.dtype)
    made = interact(x, weight, call, scale, keep=True, backend=name)
    following = finish(made, tower, call, backend=name)
    g = torch.randn(following.shape, device=device).to(call.dtype)
    dq = torch.randn(call.rows, call.n * call.k, device=device).to(call.dtype)
    leaves = [t.double().requires_grad_() for t in (x, weight, tower)]
    products, out = exact(call, *leaves)
    ((out * g.double()).sum() + (products * dq.double()).sum()).backward()
    ds = norm_gradient(g, following, made.rstd, call, backend=name)
    dx, dw = interact_gradient(x, weight, dq, ds, call, backend=name)
    assert relative(ds[:, : call.n_f].flatten(1), leaves[2].grad) < 0.02
    assert relative(dx, leaves[0].grad) < 0.02
    assert dw.dtype == torch.float32
    for part in (slice(0, call.n_l), slice(call.n_l, call.n_l + call.k), slice(call.n_l + call.k, call.weights)):
        if call.weights > part.start:
            assert relative(dw[part], leaves[1].grad[part]) < 0.02
    assert relative(dx * 1.05, leaves[0].grad) > 0.02


@every_backend
def test_examples_do_not_touch_one_another(name: str, device: torch.device) -> None:
    call = InteractionCall(3, 32, 32, 24, 16, 16, False)
    if not registry.backend("interaction", name).supports(call, device):
        pytest.skip("not here")
    x, weight, scale = operands(call, device)
    x[1] = float("nan")
    made = interact(x, weight, call, scale, backend=name)
    out = finish(made, torch.zeros(3, 16 * 32, device=device, dtype=call.dtype), call, backend=name)
    assert made.products.dequantize()[1].isnan().all()
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()
    assert made.products.dequantize()[[0, 2]].isfinite().all()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="project it"):
        InteractionCall(2, 32, 16, 8, 8, 8, False)
    with pytest.raises(ValueError, match="positive counts"):
        InteractionCall(2, 32, 16, 0, 16, 16, False)
    triton = registry.backend("interaction", "triton")
    too_wide = InteractionCall(2, 256, 128, 8, 128, 128, False)
    assert "at most 128 vectors" in triton.supports(too_wide, torch.device("cuda")).reason
    with pytest.raises(UnsupportedError, match="at most 128 vectors"):
        interact(torch.zeros(2, 256, 128), torch.zeros(136, 256), too_wide, torch.ones(()), backend="triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
