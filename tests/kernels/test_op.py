"""Ops registered directly: what autograd and compilers make of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from loka.kernels.op import differentiate, fake_of, on_device, torch_op


@torch_op("test_twice")
def twice(x: Tensor) -> Tensor:
    return 2 * x


@torch_op("test_twice_low")
def twice_low(x: Tensor) -> tuple[Tensor, Tensor]:
    return (2 * x).to(torch.float8_e4m3fn), x.argmax()


@torch_op("test_thrice")
def thrice(x: Tensor) -> Tensor:
    return 3 * x


fake_of(twice)(torch.empty_like)
fake_of(thrice)(torch.empty_like)
differentiate(thrice, lambda ctx, dy: 3 * dy, save=lambda ctx, inputs, output: None)


@pytest.mark.parametrize("function", [twice, lambda x: twice_low(x)[0].float()], ids=["one result", "several"])
def test_an_op_without_a_gradient_raises_in_backward_and_not_before(function) -> None:  # type: ignore[no-untyped-def]
    x = torch.ones(3, requires_grad=True)
    y = function(x)
    assert torch.equal(y.detach(), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="has no gradient"):
        (y * x).sum().backward()


def test_a_compiled_op_without_a_gradient_raises_where_a_gradient_is_traced() -> None:
    compiled = torch.compile(lambda x: twice(x) * x, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(Exception, match="has no gradient"):
        compiled(torch.ones(3, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_an_op_with_a_gradient_has_it(compiled: bool) -> None:
    def function(x: Tensor) -> Tensor:
        return thrice(x) * x

    x = torch.full((3,), 2.0, requires_grad=True)
    run = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    run(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 12.0))


def test_results_of_inputs_without_gradients_need_none() -> None:
    assert not twice(torch.ones(3)).requires_grad
    with torch.no_grad():
        assert not twice(torch.ones(3, requires_grad=True)).requires_grad


@pytest.mark.parametrize(("current", "entered"), [(0, [1]), (1, [])], ids=["another GPU is current", "its own is"])
def test_a_kernel_runs_on_the_gpu_of_its_tensors(current: int, entered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    class OnTheSecond(Tensor):
        is_cuda = True

        def get_device(self) -> int:
            return 1

    seen: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        seen.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    x = torch.ones(2).as_subclass(OnTheSecond)
    assert on_device(lambda a, b, c: c)(None, x, "ran") == "ran"
    assert seen == entered
    assert on_device(lambda a: a)(torch.ones(1)) == 1  # no GPU is asked for
