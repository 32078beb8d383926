"""HSTU's attention as a module: what it ran is known, what it cannot run it says, and nothing runs in its place."""

import copy
import os

import pytest
import torch
from torch import Tensor

from kernels.interpreter import run_interpreted
from loka.kernels.attention import silu_attention
from loka.kernels.backend import UnsupportedError
from loka.nn.silu_attention import SiluAttention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")


def operands(dtype: torch.dtype = torch.float32, d_v: int = 8) -> tuple[Tensor, ...]:
    q, k, v = torch.randn(7, 2, 8, dtype=dtype), torch.randn(7, 2, 8, dtype=dtype), torch.randn(7, 2, d_v, dtype=dtype)
    return q, k, v, torch.tensor([0, 4, 7]), torch.randn(2, 5, dtype=dtype)


def test_auto_says_what_ran_and_why_not_another() -> None:
    module = SiluAttention(4)
    assert module.chosen is None
    q, k, v, offsets, bias = operands(torch.float64)
    out = module(q, k, v, offsets, bias, None, None, None)
    assert module.chosen == "reference"
    assert "not torch.float64" in module.refusals["triton"]
    assert "ran reference" in str(module)
    law = silu_attention(q, k, v, offsets, max_length=4, position_bias=bias, divisor=4.0, backend="reference")
    assert torch.equal(out, law)


def test_heads_too_wide_for_the_kernel_are_named() -> None:
    module = SiluAttention(4)
    q, k, v, offsets, bias = operands(d_v=300)
    module(q, k, v, offsets, bias, None, None, None)
    assert "head widths go up to 256" in module.refusals["triton"]


def test_a_backend_that_cannot_run_raises_and_nothing_runs_in_its_place() -> None:
    module = SiluAttention(4, backend="triton")
    q, k, v, offsets, bias = operands(torch.float64)
    with pytest.raises(UnsupportedError, match=r"'triton' cannot run 2 rows <= 4, .* not torch\.float64"):
        module(q, k, v, offsets, bias, None, None, None)
    assert module.chosen is None
    with pytest.raises(ValueError, match="no backend 'cuda'; backends are auto, reference, triton"):
        SiluAttention(4, backend="cuda")


def test_it_can_be_copied_after_it_ran() -> None:
    module = SiluAttention(4)
    arguments = (*operands(), None, None, None)
    out = module(*arguments)
    assert torch.equal(copy.deepcopy(module)(*arguments), out)


def test_interpreted_auto_takes_the_kernel_also_when_compiled() -> None:
    if not INTERPRETED:
        pytest.skip("the child process runs this test")
    module = SiluAttention(4)
    arguments = (*operands(), None, None, None)
    plain = module(*arguments)
    assert module.chosen == "triton"
    assert module.refusals == {}
    torch._dynamo.reset()
    targets: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(module, fullgraph=True, backend=look)
    torch.testing.assert_close(compiled(*arguments), plain)
    assert any("silu_attention" in target for target in targets)


@pytest.mark.skipif(INTERPRETED, reason="this is the child")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
def test_under_the_interpreter() -> None:
    run_interpreted(__file__, "interpreted_auto")
