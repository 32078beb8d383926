"""dots: every backend against the batch product and its index in float64, gradients by finite differences, Triton in its interpreter and compiled for Hopper."""

import gc
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch import Tensor

from kernels.interpreter import run_interpreted
from loka.kernels import BACKENDS, registry
from loka.kernels.backend import UnsupportedError
from loka.kernels.dots import DotsCall, dots, pairs

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
every_backend = pytest.mark.parametrize("name", BACKENDS["dots"])
# What rounding a product of bf16 to bf16 leaves; the interpreter truncates.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0 ** -(6 if INTERPRETED else 7)}


def supported(name: str, n: int, d: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
    verdict = registry.backend("dots", name).supports(DotsCall(1, n, d, count, dtype), device)
    if not verdict:
        pytest.skip(verdict.reason)


def triangle(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    i, j = torch.triu_indices(n, n, 1, device=device)
    return i, j


def exact(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
    wide = x.double()
    return torch.bmm(wide, wide.mT)[:, i, j]


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@every_backend
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_vectors_in_front(name: str, heads: int, gradients: bool, device: torch.device) -> None:
    supported(name, 9, 16, 1, torch.float32, device)
    i, j = triangle(9, device)
    head, x = (torch.randn(4, n, 16, device=device).requires_grad_(gradients) for n in (heads, 9 - heads))
    with torch.set_grad_enabled(gradients):
        y = dots(x, i, j, head=head, backend=name)
    assert y.requires_grad == gradients
    assert gap(y.detach(), exact(torch.cat([head, x], 1).detach(), i, j)) <= TOLERANCE[torch.float32]
    with pytest.raises(ValueError, match=r"head is \(4, .*expected \[4, m, 16\]"):
        dots(x, i, j, head=head[..., :8], backend=name)


@every_backend
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("b", "n", "d"), [(3, 27, 16), (2, 5, 33), (1, 40, 8)])
def test_is_the_indexed_product(name: str, dtype: torch.dtype, b: int, n: int, d: int, device: torch.device) -> None:
    supported(name, n, d, 1, dtype, device)
    i, j = triangle(n, device)
    order = torch.randperm(i.shape[0]).to(device)
    i, j = i[order], j[order]  # any order, not only row by row
    x = torch.randn(b, n, d, device=device).to(dtype).requires_grad_()
    y = dots(x, i, j, backend=name)
    assert y.dtype == dtype
    assert gap(y.detach(), exact(x.detach(), i, j)) <= TOLERANCE[dtype]
    assert gap(1.1 * y.detach(), exact(x.detach(), i, j)) > TOLERANCE[dtype]
    dy = torch.randn_like(y)
    twin = x.detach().double().requires_grad_()
    exact(twin, i, j).backward(dy.double())
    y.backward(dy)
    assert x.grad.dtype == dtype
    assert gap(x.grad, twin.grad) <= 2 * TOLERANCE[dtype]
    assert gap(x.grad.roll(1, 1), twin.grad) > 2 * TOLERANCE[dtype]


def assert_products_and_gradients(name: str, x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> None:
    y = dots(x, i, j, backend=name)
    assert gap(y.detach(), exact(x.detach(), i, j)) <= 1e-5
    dy = torch.randn_like(y)
    y.backward(dy)
    twin = x.detach().double().requires_grad_()
    exact(twin, i, j).backward(dy.double())
    assert gap(x.grad, twin.grad) <= 1e-5


@every_backend
def test_pairs_may_be_one_vector_twice_and_both_ways_round(name: str, device: torch.device) -> None:
    """The square of a vector has a gradient of twice the vector; (i, j) and (j, i) are two pairs."""
    supported(name, 3, 16, 4, torch.float32, device)
    i, j = torch.tensor([1, 0, 2, 0], device=device), torch.tensor([1, 2, 0, 1], device=device)
    x = torch.randn(2, 3, 16, device=device, requires_grad=True)
    assert_products_and_gradients(name, x, i, j)


@every_backend
@pytest.mark.parametrize(("b", "n", "count"), [(0, 4, 6), (2, 1, 0), (2, 1, 1), (3, 4, 0), (0, 1, 0), (2, 0, 0)])
def test_edges(name: str, b: int, n: int, count: int, device: torch.device) -> None:
    """No example, one vector, no pair."""
    supported(name, n, 16, count, torch.float32, device)
    i, j = torch.tril_indices(n, n, 0 if n == 1 else -1, device=device)[:, :count]
    x = torch.randn(b, n, 16, device=device, requires_grad=True)
    y = dots(x, i, j, backend=name)
    assert y.shape == (b, count)
    y.sum().backward()
    assert x.grad.shape == x.shape
    torch.testing.assert_close(x.grad, 2 * x.detach() if count == 1 else torch.zeros_like(x) if not count else x.grad)
    torch.testing.assert_close(y.detach().double(), exact(x.detach(), i, j), rtol=1e-4, atol=1e-4)


@every_backend
def test_a_sliced_input_is_read_where_it_says(name: str, device: torch.device) -> None:
    supported(name, 4, 16, 6, torch.float32, device)
    whole = torch.randn(6, 8, 16, device=device)
    part = whole[::2, 1::2]
    i, j = triangle(4, device)
    assert gap(dots(part, i, j, backend=name), exact(part, i, j)) <= 1e-5


@every_backend
def test_pairs_may_be_columns_of_one_tensor(name: str, device: torch.device) -> None:
    """As torch.combinations gives them: every second number in memory is the other column's."""
    supported(name, 5, 16, 10, torch.float32, device)
    columns = torch.combinations(torch.arange(5, device=device))
    i, j = columns.unbind(1)
    x = torch.randn(3, 5, 16, device=device, requires_grad=True)
    assert_products_and_gradients(name, x, i, j)


def test_compiled_the_reference_takes_what_an_index_takes() -> None:
    """Nothing looks at the values there: pairs from the end and pairs that occur twice have the products, and the gradient, that torch gives them."""
    i, j = torch.tensor([-1, 0, 0]), torch.tensor([0, 1, 1])
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    y = torch.compile(lambda t: dots(t, i, j, backend="reference"), fullgraph=True, backend="aot_eager")(x)
    dy = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad(exact(x, i, j), x, dy)
    torch.testing.assert_close(y, exact(x, i, j))
    torch.testing.assert_close(found, expected)


def test_gradients_by_finite_differences() -> None:
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    i, j = torch.tensor([0, 3, 4, 2, 2]), torch.tensor([1, 3, 0, 1, 0])
    assert torch.autograd.gradcheck(lambda t: dots(t, i, j, backend="reference"), (x,))


@every_backend
@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([0, 1, 0], [1, 2, 1], r"the pair \(0, 1\) occurs 2 times"),
        ([0, 1], [1, -1], "out of range, expected 0 to 3"),
        ([0, 4], [1, 1], "out of range"),
        ([0, 1], [1], "2 long on .* and second 1"),
        ([[0, 1]], [[1, 2]], r"first is \(1, 2\) of torch.int64"),
        ([0.0], [1.0], "of torch.float32, expected"),
        ([True, False, True, False], [False, True, True, False], "of torch.bool"),
    ],
)
def test_pairs_that_would_be_computed_otherwise_are_refused(
    name: str, first: list, second: list, said: str, device: torch.device
) -> None:
    x = torch.randn(2, 4, 16, device=device)
    with pytest.raises(ValueError, match=said):
        dots(x, torch.tensor(first, device=device), torch.tensor(second, device=device), backend=name)


def test_pairs_are_looked_at_once_and_again_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[int] = Counter()
    real = pairs._find_value_fault
    monkeypatch.setattr(pairs, "_find_value_fault", lambda i, j, n: (asked.update([n]), real(i, j, n))[1])
    x, (i, j) = torch.randn(2, 4, 16), torch.triu_indices(4, 4, 1)
    i, j = i.clone(), j.clone()
    for _ in range(3):
        dots(x, i, j)
    assert asked == {4: 1}
    dots(torch.randn(2, 5, 16), i, j)
    assert asked == {4: 1, 5: 1}
    j[0] = 2  # (0, 2) is there already
    with pytest.raises(ValueError, match=r"\(0, 2\) occurs 2 times"):
        dots(x, i, j)
    with pytest.raises(ValueError, match="occurs 2 times"):
        dots(x, i, j)


def test_what_is_known_about_pairs_dies_with_them() -> None:
    x, (i, j) = torch.randn(2, 4, 16), (t.clone() for t in torch.triu_indices(4, 4, 1))
    dots(x, i, j)
    gc.collect()
    before = len(pairs._FAULTS)
    del i
    gc.collect()
    assert len(pairs._FAULTS) == before - 1


def test_pairs_made_in_inference_mode() -> None:
    """They count no versions, so nothing is kept about them."""
    with torch.inference_mode():
        x, (i, j) = torch.randn(2, 4, 16), torch.triu_indices(4, 4, 1)
        torch.testing.assert_close(dots(x, i, j), torch.bmm(x, x.mT)[:, i, j])
        j[0] = 2
        with pytest.raises(ValueError, match="occurs 2 times"):
            dots(x, i, j)


def test_compiles_whole_and_says_what_it_cannot_take(device: torch.device) -> None:
    i, j = triangle(4, device)
    x = torch.randn(2, 4, 16, device=device, requires_grad=True)
    run = torch.compile(lambda t: dots(t, i, j).sin().sum(), fullgraph=True, backend="aot_eager")
    value = run(x)
    torch.testing.assert_close(value, dots(x, i, j).sin().sum())
    (found,) = torch.autograd.grad(value, x)
    (expected,) = torch.autograd.grad(dots(x, i, j).sin().sum(), x)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match=r"expected \[B, n, d\]"):
        dots(x[0], i, j)
    with pytest.raises(ValueError, match="multiplies"):
        dots(x.long(), i, j)
    with pytest.raises(UnsupportedError, match="64 vectors of 512"):
        dots(torch.randn(1, 65, 16, device=device), i, j, backend="triton")
    with pytest.raises(UnsupportedError, match="float64"):
        dots(x.double(), i, j, backend="triton")


@pytest.mark.parametrize(("first", "second"), [([0, 1, 0], [1, 2, 1]), ([0, 3], [1, 1]), ([0, -1], [1, 1])])
def test_pairs_without_a_place_give_nan_and_never_old_memory_triton(first: list[int], second: list[int], device: torch.device) -> None:  # fmt: skip
    """Compiled, the facade cannot look at values and nothing can raise: repeated pairs and ones out of range poison the product and its gradient."""
    supported("triton", 3, 16, len(first), torch.float32, device)
    i, j = torch.tensor(first, device=device), torch.tensor(second, device=device)
    backend, x = registry.backend("dots", "triton"), torch.randn(2, 3, 16, device=device)
    assert backend.run(x, i, j).isnan().all()
    assert backend.gradient(torch.randn(2, len(first), device=device), x, i, j).isnan().all()


def test_examples_do_not_touch_one_another_triton(device: torch.device) -> None:
    supported("triton", 5, 16, 10, torch.float32, device)
    i, j = triangle(5, device)
    x = torch.randn(3, 5, 16, device=device)
    x[1] = float("nan")
    y = dots(x, i, j, backend="triton")
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    code = "import torch; from loka.kernels.dots import dots; i, j = torch.triu_indices(4, 4, 1); print(*torch.compile(lambda x: dots(x, i, j), fullgraph=True, backend='eager')(torch.ones(3, 4, 16)).shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "3 6\n", done.stderr[-2000:]
