"""An input that several chains of a serving model read is quantised once in compiled code."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import loka
from loka.lowp.chain import chains_of


class SwiGLU(nn.Module):
    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.w1, self.w2, self.w3, self.out = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 96), nn.Linear(64, 1)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        gate = F.silu(self.w1(x))
        if self.in_place:
            F.relu_(x)  # the same tensor, other values
        return self.out(F.layer_norm(self.w2(gate * self.w3(x)), (64,)))


def served(model: nn.Module, x: Tensor) -> loka.Plan:
    plan = loka.placing.plan_everything(model.eval(), x, serving=True, linears=64)
    loka.convert(model, plan, freeze=True)
    return plan


def compile_and_count(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The result in compiled code, and how often something is cast to FP8."""
    counts: list[int] = []

    def compiler(graph: Any, _: Any) -> Any:
        counts.append(sum("float8" in str(node.kwargs) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler)
    with torch.no_grad():
        found = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    [count] = counts
    return found, count


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    x[0, 0] = 9.0  # the largest magnitude is positive: a ReLU keeps it, and with it the scale
    return x


def test_two_readers_quantise_once(x: Tensor) -> None:
    model = SwiGLU()
    plan = served(model, x)
    assert {unit.name: unit.reads_with for unit in plan.units} == {"w1": None, "w3": "w1", "w2": None}
    twin = copy.deepcopy(model)
    for _, chain in chains_of(twin):
        chain.shared = None
    found, count = compile_and_count(model, x)
    expected, more = compile_and_count(twin, x)
    assert torch.equal(found, expected)
    assert count == more - 1
    assert all(chain.shared.given is None and chain.shared.made is None for _, chain in chains_of(model) if chain.shared)  # fmt: skip
    again, count = compile_and_count(copy.deepcopy(model), x)
    assert torch.equal(again, expected)
    assert count == more - 1


def test_a_tensor_that_was_changed_in_place_is_another_input(x: Tensor) -> None:
    model = SwiGLU(in_place=True)
    plan = served(model, x)
    assert all(unit.reads_with is None for unit in plan.units)
    with torch.no_grad():
        torch.testing.assert_close(compile_and_count(model, x)[0], model(x), rtol=0.1, atol=0.01)


def test_a_reader_that_is_released_is_not_waited_for(x: Tensor) -> None:
    model = SwiGLU()
    served(model, x)
    chains = dict(chains_of(model))
    chains["w3"].release()
    compile_and_count(model, x)
    assert chains["w1"].shared is not None
    assert chains["w1"].shared.given is None


def test_training_plans_say_nothing_of_it(x: Tensor) -> None:
    plan = loka.placing.plan_everything(SwiGLU(), x, linears=64)
    assert all(unit.reads_with is None for unit in plan.units)
