"""What runs is heard, whoever runs it, and judged as it runs."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.planted import plant
from torch import Tensor, nn

import loka
from loka.kernels import registry
from loka.kernels.attention.call import AttentionCall
from loka.kernels.beam_attention.call import BeamAttentionCall
from loka.kernels.dots import dots
from loka.kernels.dots.call import DotsCall
from loka.kernels.interaction.call import InteractionCall
from loka.kernels.masked_attention.call import MaskedAttentionCall
from loka.kernels.mixed_dots.call import MixedDotsCall
from loka.measure import kernel_calls
from loka.measure.adapter import ADAPTERS
from loka.measure.conformance import Conformance
from loka.measure.kernel_calls import KernelCall, find_calls, judge_call
from loka.placing import plan_everything


class Every(nn.Module):
    """Chains with every activation, with and without norms and biases; dropout; a linear that stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(64, 64, bias=place % 2 == 0) for place in range(9))
        self.second = nn.ModuleList(nn.Linear(64, 64, bias=place % 3 == 0) for place in range(9))
        self.normed = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.layer, self.rms, self.batch = nn.LayerNorm(64), nn.RMSNorm(64), nn.BatchNorm1d(64)
        self.drop, self.twice, self.last = nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        steps = [
            F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.hardswish,
            lambda h: F.gelu(h, approximate="tanh"), lambda h: F.leaky_relu(h, 0.2), lambda h: h,
        ]  # fmt: skip
        parts = [step(second(step(first(x)))) for step, first, second in zip(steps, self.first, self.second, strict=True)]  # fmt: skip
        parts[0] = self.batch(self.drop(parts[0]))
        a, b, c = self.normed
        parts.append(c(F.relu(self.layer(b(self.drop(F.silu(self.rms(a(x)))))))))
        return self.last(self.twice(self.twice(sum(parts)))).squeeze(-1)


def run_all(model: nn.Module, x: Tensor, *, serving: bool) -> list[KernelCall]:
    plan = plan_everything(model, x, serving=serving, linears=64)
    with loka.placing.converted(model, plan):
        if serving:
            with torch.no_grad():
                return find_calls(lambda: model.eval()(x))
        model.train()(x).sum().backward()  # finds the first scales
        loka.refresh(model)
        return find_calls(lambda: model(x).sum().backward())


@pytest.mark.parametrize("serving", [False, True])
def test_every_call_of_a_converted_model_is_judged_and_correct(serving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of the autograd engine. The reference is judged as if it were another backend."""
    torch.manual_seed(0)
    calls = run_all(Every(), torch.randn(48, 64), serving=serving)
    ops = {one.op for one in calls}
    assert ops >= {"fused_linear", "scaled_mm", "quantize", "norm_quantize"}
    kinds = {type(one.call).__name__ for one in calls}
    assert kinds >= ({"FusedCall", "NormCall"} if serving else {"FusedCall", "DgradCall", "GradientCall", "NormGradientCall"})  # fmt: skip
    assert len(set(calls)) == len(calls)
    assert any(getattr(one.call, "dropout", False) for one in calls) is not serving
    for one in calls:
        assert ADAPTERS[one.op].adopt(one.call) is not None, one
        monkeypatch.setitem(registry._LOADED, f"{one.op}.triton", registry.backend(one.op, "reference"))
        verdict = judge_call(KernelCall(one.op, "triton", one.call), "cpu")
        assert verdict, f"{one}: {verdict.reason}"


def test_a_reference_and_what_the_gate_does_not_know_have_no_verdict() -> None:
    calls = run_all(Every(), torch.randn(48, 64), serving=True)
    assert {one.backend for one in calls} == {"reference"}
    assert all(judge_call(one, "cpu") is None for one in calls)
    assert judge_call(KernelCall("no such op", "triton", None), "cpu") is None


def test_listeners_nest_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = loka.Spec.parse("e4m3:row")

    def run() -> None:
        from loka.kernels.quantize import quantize

        quantize(torch.randn(4, 32), spec)

    inner: list[KernelCall] = []
    outer = find_calls(lambda: (inner.extend(find_calls(run)), run()))
    assert inner == outer
    assert registry._hearing == ()
    with pytest.raises(RuntimeError, match="stop"):
        find_calls(lambda: (_ for _ in ()).throw(RuntimeError("stop")))
    assert registry._hearing == ()
    found = find_calls(lambda: [thread.start() or thread.join() for thread in [threading.Thread(target=run)]])
    assert found == inner


def test_compiled_code_is_not_heard_and_not_guarded() -> None:
    from loka.kernels.quantize import quantize

    spec, traced = loka.Spec.parse("e4m3:tensor:static"), []

    def count(module: torch.fx.GraphModule, example: list[Tensor]) -> object:
        traced.append(module)
        return module.forward

    compiled = torch.compile(lambda x, scale: quantize(x, spec, scale=scale).data.float(), backend=count, dynamic=False)
    x, scale = torch.randn(4, 32), torch.ones(())
    with torch.no_grad():
        compiled(x, scale)
        assert find_calls(lambda: compiled(x, scale)) == []
    assert len(traced) == 1


def test_want_of_memory_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = run_all(Every(), torch.randn(48, 64), serving=True)
    starved = Conformance(False, float("inf"), 0.0, "OutOfMemoryError: CUDA out of memory", raised=True)
    monkeypatch.setattr(kernel_calls, "judge_backend", lambda *given, **options: starved)
    with pytest.raises(torch.OutOfMemoryError):
        judge_call(KernelCall(calls[0].op, "triton", calls[0].call), "cpu")


GRADIENTS: list[tuple[str, Any]] = [
    ("dots", DotsCall(64, 9, 16, 36)),
    ("dots", DotsCall(64, 9, 16, 10)),  # of users and items, say
    ("dots", DotsCall(64, 9, 16, 81)),
    ("mixed_dots", MixedDotsCall(48, 12, 32, 5)),
    ("mixed_dots", MixedDotsCall(48, 30, 64, 24, torch.float16)),
    ("interaction", InteractionCall(48, 12, 32, 5, 6, 6, False)),
    ("attention", AttentionCall(6, 40, 2, 16, 16)),
    ("masked_attention", MaskedAttentionCall(6, 33, 33, 4, 4, 32)),
]


@pytest.mark.parametrize(("op", "call"), GRADIENTS, ids=str)
@pytest.mark.parametrize("gradient", [False, True])
def test_gradients_that_one_call_describes_are_judged_too(op: str, call: Any, gradient: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    law = registry.backend(op, "reference")
    plant(monkeypatch, op, law)
    for name in ("planted", *(name for name in registry.BACKENDS[op] if registry.backend(op, name).supports(call, torch.device("cpu")))):  # fmt: skip
        if name != "reference":
            verdict = judge_call(KernelCall(op, name, call, gradient), "cpu")
            assert verdict, f"{name}: {verdict.reason}"


def test_a_step_of_training_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "dots", registry.backend("dots", "reference"), gradient=lambda dy, x, first, second: x * 0)
    x, pairs = torch.randn(8, 4, 16, requires_grad=True), torch.triu_indices(4, 4, 1)
    calls = find_calls(lambda: dots(x, pairs[0], pairs[1]).sum().backward(), training=True)
    assert [one.gradient for one in calls] == [False, True]
    assert str(calls[1]) == f"{calls[0]}, gradient"
    assert [bool(judge_call(one, "cpu")) for one in calls] == [True, False]
    assert find_calls(lambda: dots(x, pairs[0], pairs[1])) == calls[:1]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "call"), GRADIENTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_our_own_kernels_pass_on_a_gpu(op: str, call: Any, dtype: torch.dtype) -> None:
    call, device = replace(call, dtype=dtype), torch.device("cuda")
    for name in registry.BACKENDS[op]:
        if name != "reference" and registry.backend(op, name).supports(call, device):
            for gradient in (False, True):
                verdict = judge_call(KernelCall(op, name, call, gradient), device)
                assert verdict, f"{name}, gradient {gradient}: {verdict.reason}"


def test_attention_to_a_context_in_fp8_is_judged() -> None:
    plain = BeamAttentionCall(2, 5, 4, 2, 19, 16)
    assert judge_call(KernelCall("beam_attention", "torch", plain), "cpu")
    low = replace(plain, cache=torch.float8_e4m3fn)
    assert judge_call(KernelCall("beam_attention", "torch", low), "cpu")
