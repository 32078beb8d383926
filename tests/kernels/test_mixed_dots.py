"""mixed_dots: every backend against two batched products in float64, with gradients; Triton in its interpreter."""

import os

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kernels.interpreter import run_interpreted
from loka.kernels import BACKENDS, registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.mixed_dots import MixedDotsCall, mix_and_multiply, mixed_dots

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
every_backend = pytest.mark.parametrize("name", BACKENDS["mixed_dots"])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def supported(name: str, n: int, d: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    verdict = registry.backend("mixed_dots", name).supports(MixedDotsCall(1, n, d, k, dtype), device)
    if not verdict:
        pytest.skip(verdict.reason)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x.double(), (weight.double() @ x.double()).mT)


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("b", "n", "d", "k"), [(3, 27, 16, 5), (2, 5, 33, 24), (1, 40, 8, 16), (5, 17, 20, 1)])
def test_is_two_products(name: str, dtype: torch.dtype, b: int, n: int, d: int, k: int, device: torch.device) -> None:
    supported(name, n, d, k, dtype, device)
    torch.manual_seed(0)
    x = torch.randn(b, n, d, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(k, n, device=device) / n**0.5).to(dtype).requires_grad_()
    y = mixed_dots(x, weight, backend=name)
    assert y.dtype == dtype
    assert y.shape == (b, n, k)
    assert gap(y.detach(), exact(x.detach(), weight.detach())) <= TOLERANCE[dtype]
    assert gap(1.1 * y.detach(), exact(x.detach(), weight.detach())) > TOLERANCE[dtype]
    dy = torch.randn_like(y)
    twins = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact(*twins).backward(dy.double())
    y.backward(dy)
    for leaf, twin in zip((x, weight), twins, strict=True):
        assert leaf.grad is not None
        assert twin.grad is not None
        assert leaf.grad.dtype == dtype
        assert gap(leaf.grad, twin.grad) <= 2 * TOLERANCE[dtype]
        assert gap(1.1 * leaf.grad, twin.grad) > 2 * TOLERANCE[dtype]


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n", "d", "k", "m"),
    [(27, 16, 5, 12), (9, 33, 0, 3), (17, 20, 4, 130), (8, 16, 3, 0), (1, 1, 1, 1), (127, 255, 63, 127)],
)
def test_other_mixtures_come_with_the_products(name: str, dtype: torch.dtype, n: int, d: int, k: int, m: int, device: torch.device) -> None:  # fmt: skip
    """130 mixtures are more than the kernel holds."""
    supported(name, n, d, k, dtype, device)
    torch.manual_seed(0)
    x = torch.randn(3, n, d, device=device).to(dtype).requires_grad_()
    weight, mixing = ((torch.randn(r, n, device=device) / n**0.5).to(dtype).requires_grad_() for r in (k, m))
    found = mix_and_multiply(x, weight, mixing, backend=name)
    twins = [t.detach().double().requires_grad_() for t in (x, weight, mixing)]
    expected = exact(*twins[:2]), twins[2] @ twins[0]
    gradients = [torch.randn_like(y) for y in found]
    torch.autograd.backward(found, gradients)
    torch.autograd.backward(expected, [g.double() for g in gradients])
    seen = [(y.detach(), e.detach()) for y, e in zip(found, expected, strict=True)]
    for y, twin in [*seen, *((t.grad, e.grad) for t, e in zip((x, weight, mixing), twins, strict=True))]:
        assert y.dtype == dtype
        assert y.shape == twin.shape
        if y.numel():
            assert gap(y, twin) <= 2 * TOLERANCE[dtype]


@every_backend
def test_a_weight_of_more_bits_is_cast_and_its_gradient_is_not(name: str, device: torch.device) -> None:
    supported(name, 9, 16, 4, torch.float16, device)
    x = torch.randn(6, 9, 16, device=device).half()
    wide = torch.randn(9, 4, device=device).requires_grad_()  # transposed, as a forward has it
    y = mixed_dots(x, wide.T, backend=name)
    assert gap(y.detach(), exact(x, wide.detach().T.half())) <= TOLERANCE[torch.float16]
    y.float().sum().backward()
    assert wide.grad is not None
    assert wide.grad.dtype == torch.float32


@every_backend
def test_a_long_batch_does_not_overflow_the_gradient_of_the_weight(name: str, device: torch.device) -> None:
    supported(name, 8, 16, 3, torch.float16, device)
    x = (
        8 * torch.randn(24, 8, 16, device=device).abs()
    ).half()  # large values of few examples: the interpreter is slow
    weight = (torch.randn(3, 8, device=device) / 8).requires_grad_()
    mixed_dots(x, weight, backend=name).float().sum().backward()
    twin = weight.detach().double().requires_grad_()
    exact(x, twin).sum().backward()
    assert float(twin.grad.abs().max()) > 65504  # more than float16 has
    assert gap(weight.grad, twin.grad) <= 2.0**-9


@every_backend
@pytest.mark.parametrize(("b", "n", "d", "k"), [(0, 9, 16, 4), (3, 9, 0, 4), (2, 9, 16, 0)])
def test_nothing_to_multiply(name: str, b: int, n: int, d: int, k: int, device: torch.device) -> None:
    supported(name, n, d, k, torch.float16, device)
    x = torch.randn(b, n, d, device=device).half().requires_grad_()
    weight = torch.randn(k, n, device=device).half().requires_grad_()
    y = mixed_dots(x, weight, backend=name)
    assert y.shape == (b, n, k)
    assert not y.any()
    y.float().sum().backward()
    assert not x.grad.any()
    assert not weight.grad.any()


@every_backend
def test_views_are_read_where_they_lie(name: str, device: torch.device) -> None:
    supported(name, 9, 16, 4, torch.float16, device)
    x = torch.randn(16, 5, 9, device=device).half().permute(1, 2, 0)
    weight = torch.randn(4, 18, device=device).half()[:, ::2]
    assert gap(mixed_dots(x, weight, backend=name), exact(x, weight)) <= TOLERANCE[torch.float16]


@every_backend
def test_what_is_not_finite_stays_in_its_example(name: str, device: torch.device) -> None:
    supported(name, 9, 16, 4, torch.float16, device)
    x, weight = torch.randn(4, 9, 16, device=device).half(), torch.randn(4, 9, device=device).half()
    expected = mixed_dots(x, weight, backend=name)
    x[1, 2, 3] = torch.nan
    found = mixed_dots(x, weight, backend=name)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])


@every_backend
def test_compiled_it_is_one_graph(name: str, device: torch.device) -> None:
    supported(name, 9, 16, 4, torch.float16, device)
    torch._dynamo.reset()
    x = torch.randn(6, 9, 16, device=device).half().requires_grad_()
    weight = torch.randn(4, 9, device=device).half().requires_grad_()
    compiled = torch.compile(mixed_dots, backend="aot_eager", fullgraph=True)
    for found, expected in zip(
        torch.autograd.grad(compiled(x, weight, backend=name).float().square().sum(), [x, weight]),
        torch.autograd.grad(mixed_dots(x, weight, backend=name).float().square().sum(), [x, weight]),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


@every_backend
def test_compiled_with_other_mixtures_it_is_one_graph(name: str, device: torch.device) -> None:
    """How the kernel is launched is decided while the compiler traces."""
    supported(name, 9, 16, 4, torch.float16, device)
    torch._dynamo.reset()
    shapes = (6, 9, 16), (4, 9), (5, 9)
    leaves = [torch.randn(*shape, device=device).half().requires_grad_() for shape in shapes]
    compiled = torch.compile(mix_and_multiply, backend="aot_eager", fullgraph=True)
    results = [run(*leaves, backend=name) for run in (compiled, mix_and_multiply)]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    losses = [sum(part.float().square().sum() for part in parts) for parts in results]
    for found, expected in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.05)


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"x is \(2, 9, 16\) and mixing \(9, 3\), expected \[B, n, d\] and \[m, n\]"):
        mix_and_multiply(torch.zeros(2, 9, 16), torch.zeros(4, 9), torch.zeros(9, 3))
    with pytest.raises(ValueError, match=r"x is \(2, 9, 16\) and weight \(9, 4\), expected \[B, n, d\] and \[k, n\]"):
        mixed_dots(torch.zeros(2, 9, 16), torch.zeros(9, 4))


def test_what_triton_cannot_hold_is_refused_by_name_and_computed_by_another() -> None:
    x, weight = torch.randn(2, 200, 4).half(), torch.randn(3, 200).half()
    with pytest.raises(UnsupportedError):
        mixed_dots(x, weight, backend="triton")
    assert gap(mixed_dots(x, weight), exact(x, weight)) <= 2 * TOLERANCE[torch.float16]


@pytest.fixture
def triton_device(device: torch.device) -> torch.device:
    if not registry.backend("mixed_dots", "triton").supports(MixedDotsCall(1, 9, 16, 4, torch.float16), device):
        pytest.skip("Triton runs neither on a GPU nor interpreted in this process; the child process runs this test")
    return device


def test_on_triton_flops_are_those_of_two_products(triton_device: torch.device) -> None:
    from loka.kernels.mixed_dots import triton_ops  # noqa: F401  # a counter knows what was there when it was opened

    x = torch.randn(6, 9, 16, device=triton_device).half().requires_grad_()
    weight = torch.randn(4, 9, device=triton_device).half().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        mixed_dots(x, weight, backend="triton").sum().backward()
    assert counter.get_total_flops() == 3 * 4 * 6 * 9 * 16 * 4


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_triton_in_its_interpreter() -> None:
    run_interpreted(__file__)
