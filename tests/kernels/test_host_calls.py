"""What an op costs the host: calls of Python functions, which no machine changes. And that a call launches the same whatever was called before."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", exc_type=ImportError)

from loka.kernels import op as op_module
from loka.kernels import plans, triton_bound
from loka.kernels.dots import triton_ops as dots
from loka.kernels.fused_linear import triton_ops as fused
from loka.kernels.interaction import triton_ops as interaction
from loka.kernels.norm_quantize import triton_ops as norms
from loka.kernels.quantize import triton_ops as quantizer
from loka.kernels.tile import INTERPRETED
from loka.kernels.triton_launcher import Quick

pytestmark = pytest.mark.skipif(INTERPRETED, reason="launches are noted here, not interpreted")
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


class Noted:
    """In place of a compiled kernel. It takes its arguments, and that is all."""

    def is_left_to_triton(self) -> bool:
        return False

    def map_at(self, position: int, address: int, x: Tensor, block: list[int]) -> list[Any]:
        return [("map", position, tuple(x.shape), x.stride(), block)]

    def launch(self, grid: tuple[int, ...], device: int, args: list[Any]) -> None:
        NOTES.append((grid, [shape_of(arg) for arg in args]))


NOTES: list[Any] = []


def shape_of(arg: Any) -> Any:
    return (arg.dtype, tuple(arg.shape), arg.stride()) if isinstance(arg, Tensor) else (type(arg), arg)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every launch finds a kernel that was compiled before, and memory on the host is as good as any."""
    for module in (op_module, triton_bound):
        monkeypatch.setattr(module, "_current_device", lambda: 0)
    monkeypatch.setattr(Quick, "launch", lambda self, grid, args, options: Noted())
    forget()
    with torch.no_grad():
        yield
    forget()


def forget() -> None:
    assert len(plans._caches) >= 13
    plans.forget_plans()


def of(rows: int, columns: int, dtype: torch.dtype = BF16, *, apart: int = 0) -> Tensor:
    return torch.zeros(rows, columns + apart, dtype=torch.float32).to(dtype)[:, :columns]


ONE, AMAX, SEED = torch.ones(()), torch.zeros(()), torch.zeros(1, dtype=torch.int64)
NOTHING, DRAWN = (None, 0.0, 0), (SEED, 0.5, 3)
STATIC = "e4m3:tensor:f32:static"


def cases(m: int = 64, k: int = 96, apart: int = 0) -> dict[str, tuple[Any, tuple[Any, ...], int]]:
    """Op, arguments, and how many Python functions it may call."""
    x, row, statistic, low = of(m, k, apart=apart), torch.ones(k), torch.ones(m, 1), of(m, k, E4M3, apart=16 * apart)
    w, x3 = of(k, k, E4M3), torch.zeros(m, 27, 64, dtype=BF16)
    place = torch.zeros(28 * 28 + 1, dtype=torch.int32)
    forward = x, None, None, row, row, ONE, AMAX, 0, 2, 1e-5, E4M3, 1, False, None
    backward = x, x, None, row, row, statistic, statistic
    layer = 1, 1, False, 4, 0.01
    return {
        "quantize both, tensor": (quantizer.quantize, (x, "e4m3:tensor", None, "e4m3:tensor", None, 0), 8),
        "quantize both, given": (quantizer.quantize, (x, STATIC, ONE, STATIC, ONE, 0), 9),
        "quantize both, 1x128": (quantizer.quantize, (x, "e4m3:1x128", None, "e4m3:1x128", None, 0), 6),
        "quantize both, rows": (quantizer.quantize, (x, "e4m3:row", None, "e4m3:row", None, 0), 8),
        "quantize, tensor": (quantizer.quantize, (x, "e4m3:tensor", None, "", None, 0), 8),
        "quantize, rows": (quantizer.quantize, (x, "e4m3:row", None, "", None, 0), 7),
        "norm": (norms.norm_quantize, (*forward, *NOTHING, None), 7),
        "norm, dropout": (norms.norm_quantize, (*forward, *DRAWN, None), 7),
        "norm, both": (norms.norm_quantize_both, (x, None, row, row, ONE, AMAX, 0, 2, 1e-5, E4M3, *NOTHING), 7),
        "norm, gradient": (norms.norm_gradient, (*backward, None, AMAX, 0, 2, *NOTHING), 8),
        "norm, gradient both": (norms.norm_gradient_both, (*backward, ONE, AMAX, 0, 2, E5M2, *NOTHING), 8),
        "fused": (fused.fused_linear, (low, w, ONE, ONE, row, ONE, None, *layer, 1, E4M3, False, 0, False, None, *NOTHING), 9),
        "fused, kept": (fused.fused_linear, (low, w, ONE, ONE, row, ONE, AMAX, *layer, 1, E4M3, False, 2, True, None, *NOTHING), 9),
        "fused, gradient": (fused.fused_linear_gradient, (x, low, ONE, None, ONE, *layer[2:4], 2, 0.01, True, False, E5M2, E5M2, False, False, *NOTHING, 0), 7),
        "fused, dgrad": (fused.fused_linear_dgrad, (low, w, ONE, ONE, low, ONE, ONE, AMAX, 4, 2, 0.01, E5M2, True, None, *NOTHING, 0), 9),
        "places": (dots.places, (torch.arange(m), torch.arange(m), 28), 6),
        "dots": (dots.dots, (x3, torch.zeros(m, 1, 64, dtype=BF16), place, 378), 6),
        "dots, gradient": (dots.dots_gradient, (of(m, 351), x3, place), 6),
        "interact": (interaction.interact, (x3, of(40, 27), ONE, 8, 8, 16, True, True), 6),
        "interact, gradient": (interaction.interact_gradient, (x3, of(40, 27), of(m, 216), x3, 8, 8, 16, True), 6),
    }  # fmt: skip


def count(function: Callable[[], Any]) -> int:
    """Calls of Python functions below this one."""
    calls = -1  # of `function` itself

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals.get("__name__") != __name__

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls + 1  # `function` is of this file, like what stands in for Triton


@pytest.mark.parametrize("name", list(cases()))
def test_a_repeated_call_goes_through_few_python_functions(name: str) -> None:
    op, args, most = cases()[name]
    assert not any(argument.has_default_value() for argument in op._schema.arguments)
    for _ in range(2):
        op(*args)
    assert count(lambda: op(*args)) <= most


@pytest.mark.parametrize("name", list(cases()))
def test_what_is_launched_follows_from_the_call_alone(name: str) -> None:
    """Sizes, strides and addresses in turn, with what is remembered of one another and with nothing."""
    sizes = ((64, 96, 0), (64, 96, 32), (64, 96, 1), (65, 96, 0), (1, 96, 0), (64, 100, 0), (128, 1024, 0))
    calls = [cases(*size)[name][:2] for size in sizes]

    def launched(op: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        op(*args)  # the first is Triton's
        NOTES.clear()
        made = op(*args)
        return [shape_of(result) for result in (made if isinstance(made, tuple) else (made,))], list(NOTES)

    alone = []
    for op, args in calls:
        forget()
        alone.append(launched(op, args))
    for _ in range(2):
        assert [launched(op, args) for op, args in calls] == alone
    assert len({repr(notes) for _, notes in alone}) >= 2
