"""Ops registered directly: what autograd and compilers make of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loka.kernels import op as op_module
from loka.kernels.op import differentiate, fake_of, invoke, on_device, torch_op


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

    monkeypatch.setattr(op_module, "_current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    x = torch.ones(2).as_subclass(OnTheSecond)
    assert on_device(lambda a, b, c: c)(None, x, "ran") == "ran"
    assert seen == entered
    assert on_device(lambda a: a)(torch.ones(1)) == 1  # no GPU is asked for


@pytest.mark.parametrize(("current", "entered"), [(0, [1]), (1, [])], ids=["another GPU is current", "its own is"])
def test_past_the_dispatcher_a_kernel_runs_on_the_gpu_of_its_tensors(current: int, entered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    seen: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        seen.append(index)
        yield

    monkeypatch.setattr(op_module, "_current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", device)
    x = torch.ones(3)
    with torch.no_grad(), monkeypatch.context() as pretended:
        pretended.setattr(Tensor, "is_cuda", True)
        pretended.setattr(Tensor, "get_device", lambda self: 1)
        made = twice(x)
    assert torch.equal(made, torch.full((3,), 2.0))
    assert seen == entered


CALLS: list[bool] = []


@torch_op("test_counted")
def counted(x: Tensor) -> Tensor:
    CALLS.append(torch._C._functorch.is_batchedtensor(x))
    return 2 * x


@torch_op("test_halves")
def halves(x: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor]:
    return x / 2, (x / 2 if second else None), None  # type: ignore[return-value]


@fake_of(halves)
def _(x: Tensor, second: bool) -> tuple[Tensor, Tensor, Tensor]:
    nothing = x.new_empty(0, dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(x) if second else nothing, torch.empty_like(nothing)


def test_an_absent_result_of_an_op_is_empty() -> None:
    with torch.no_grad():
        assert [tuple(half.shape) for half in halves(torch.ones(3), False)] == [(3,), (0,), (0,)]
        assert [tuple(half.shape) for half in halves(torch.ones(3), True)] == [(3,), (3,), (0,)]
        assert invoke(halves, torch.ones(3), False)[1] is None
    torch.library.opcheck(halves, (torch.ones(3), False))


class Seen(TorchDispatchMode):
    """Names of the ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **kwargs or {})


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def call_op(op: Any, *args: Any) -> Any:
    """As compiled code does."""
    return op(*args)


either_way = pytest.mark.parametrize("call", [invoke, call_op])


@either_way
@pytest.mark.parametrize("mode", [Seen, SeenFunctions])
def test_a_mode_sees_the_op(mode: type, call: Any) -> None:
    with torch.no_grad(), mode() as seen:
        call(twice, torch.ones(3))
    assert "loka.test_twice.default" in seen.names


@either_way
def test_a_profiler_sees_the_op(call: Any) -> None:
    with torch.no_grad(), torch.profiler.profile() as profile:
        call(twice, torch.ones(3))
    assert "loka::test_twice" in {event.key for event in profile.key_averages()}


@either_way
def test_tracers_and_transforms_see_the_op(call: Any) -> None:
    def run(x: Tensor) -> Tensor:
        found: Tensor = call(twice, x)
        return found

    with torch.no_grad():
        traced = make_fx(run)(torch.ones(3))
        assert "loka.test_twice" in traced.code
        exported = torch.export.export(_Runs(run), (torch.ones(3),))
        assert "loka.test_twice" in str(exported.graph)
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
        CALLS.clear()
        torch.func.vmap(lambda x: call(counted, x))(torch.ones(2, 3))
        assert CALLS == [False, False]  # once for each row, as vmap does with ops that it has no rule for
        assert call(twice, torch.ones(3, device="meta")).is_meta
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(torch.ones(3))
        assert type(call(twice, fake)) is type(fake)  # the mode is left, its tensors are not


class _Runs(torch.nn.Module):
    def __init__(self, function) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function(x)
        return found


def test_autograd_sees_the_op_and_where_nobody_looks_the_function_is_called() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="has no gradient"):
        invoke(twice, x).sum().backward()
    CALLS.clear()
    before, op_module._functions[counted] = op_module._functions[counted], lambda x: "called"
    try:
        with torch.no_grad():
            assert invoke(counted, x) == "called"
        assert torch.equal(invoke(counted, torch.ones(3)), torch.full((3,), 2.0))
        assert CALLS == [False]
    finally:
        op_module._functions[counted] = before


def test_an_argument_that_compiled_code_would_pass_by_name_is_refused() -> None:
    """Inductor writes `op(x, p=0.0)` where a default is used; such a call would go through the dispatcher."""

    def with_default(x: Tensor, p: float = 0.0) -> Tensor: ...
    def by_name(x: Tensor, *, p: float) -> Tensor: ...

    for function in (with_default, by_name):
        with pytest.raises(ValueError, match="p would be passed by name"):
            torch_op("test_refused")(function)


def test_compiled_code_calls_the_function_past_the_dispatcher() -> None:
    """And gets what the op would give. Past the dispatcher a place whose result is absent has one empty tensor for all calls; no two places share one, which torch refuses in compiled code."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: halves(x, False), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        first, nothing, neither = compiled(torch.ones(3))
        assert nothing is not neither
        assert torch.equal(first, torch.full((3,), 0.5))
        assert (nothing.shape, nothing.dtype) == ((0,), torch.float32)
        assert halves(torch.ones(3), False)[1] is halves(torch.ones(3), False)[1]
        with torch.profiler.profile():
            assert halves(torch.ones(3), False)[1] is not halves(torch.ones(3), False)[1]
        assert torch.equal(halves(x=torch.ones(3), second=True)[1], first)  # by name, too


@either_way
def test_forward_mode_is_refused_and_not_lost(call: Any) -> None:
    with torch.no_grad(), forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(3), torch.ones(3))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            call(twice, x)


def test_an_op_with_a_gradient_is_never_called_past_autograd() -> None:
    assert thrice not in op_module._functions


def test_a_kernel_never_sees_a_tensor_whose_sign_is_not_in_memory() -> None:
    """A Triton kernel would read the imaginary part of a conjugate with the wrong sign; the dispatcher resolves it."""
    seen: list[bool] = []

    @torch_op("test_signs")
    def read(x: Tensor) -> Tensor:
        seen.append(x.is_neg())
        return x * 2

    fake_of(read)(torch.empty_like)
    z = torch.complex(torch.ones(3), torch.ones(3)).conj().imag
    with torch.no_grad():
        for call in (read, lambda x: invoke(read, x)):
            assert torch.equal(call(z), torch.full((3,), -2.0))
    assert seen == [False, False]
