"""The quantiser that Inductor fuses: nothing opaque in the graph, the law's bits, and never `auto`'s choice."""

import shutil

import pytest
import torch
from torch import Tensor, nn

from loka.formats import Spec
from loka.formats import quantize as quantize_by_law
from loka.kernels import pick, registry
from loka.kernels.quantize import QuantizeCall, quantize, quantize_both, quantize_transposed

CPU = torch.device("cpu")
PAIRS = [
    ("e4m3:tensor", "e4m3:tensor"),
    ("e4m3:row", "e4m3:row"),
    ("e4m3:1x128", "e4m3:1x128"),
    ("e4m3:row", "e4m3:tensor"),
    ("e5m2:1x128", "e4m3:128x128"),
]


def captured(function, *operands: Tensor) -> tuple[list[torch.fx.GraphModule], object]:
    """The graphs that torch.compile makes of a function, after decomposition to torch's own ops, and what the function returns."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    return graphs, torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*operands)


@pytest.mark.parametrize(("spec", "turned"), PAIRS)
def test_a_compiled_caller_sees_only_torchs_own_ops(spec: str, turned: str) -> None:
    registry.load("quantize")
    first, second = Spec.parse(spec), Spec.parse(turned)
    norm = nn.LayerNorm(130).requires_grad_(False)

    def layer(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, q_t = quantize_both(norm(x), first, second, backend="compiled")
        return q.data.float(), q.scale, q_t.data.float(), q_t.scale

    x = torch.randn(20, 130)
    graphs, found = captured(layer, x)
    assert len(graphs) == 1
    assert foreign(graphs[0]) == []
    for ours, eager in zip(found, layer(x), strict=True):
        assert torch.equal(ours, eager)


def foreign(graph: torch.fx.GraphModule) -> list[str]:
    """What a graph calls that is not torch's own."""
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert targets
    return [target for target in targets if not target.startswith(("aten.", "prims.", "<built-in"))]


def test_the_check_notices_a_custom_op() -> None:
    @torch.library.custom_op("loka_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    twice.register_fake(torch.empty_like)
    graphs, _ = captured(lambda x: twice(x).relu(), torch.randn(4, 8))
    assert foreign(graphs[0]) == ["loka_test.twice.default"]


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="Inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("spec", ["e4m3:row", "e4m3:1x128", "e4m3:tensor:static", "e4m3:row:pow2"])
def test_on_cpu_inductor_gives_the_laws_bits(spec: str) -> None:
    registry.load("quantize")
    wanted = Spec.parse(spec)
    scale = torch.tensor(0.01) if wanted.mode == "static" else None

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        q = quantize(torch.relu(x), wanted, scale=scale, backend="compiled")
        return q.data, q.scale

    x = torch.randn(33, 200)
    torch._dynamo.reset()
    data, made = torch.compile(layer, fullgraph=True)(x)
    law = quantize_by_law(torch.relu(x), wanted, scale=scale)
    assert torch.equal(made, law.scale)
    assert torch.equal(data.float(), law.data.float())


@pytest.mark.parametrize("shape", [(5, 27), (32, 48), (130, 261)])
def test_rows_start_at_multiples_of_sixteen(shape: tuple[int, int]) -> None:
    spec = Spec.parse("e4m3:row")
    x = torch.randn(shape)
    for q in (*quantize_both(x, spec, spec, backend="compiled"), quantize_transposed(x, spec, backend="compiled")):
        assert q.data.stride(1) == 1
        assert q.data.stride(0) % 16 == 0


def test_auto_never_picks_it_and_says_why() -> None:
    call = QuantizeCall(4, 32, Spec.parse("e4m3:row"))
    assert registry.backend("quantize", "compiled").supports(call, CPU)
    chosen = pick("quantize", "auto", call, CPU)
    assert chosen.name == "reference"
    assert "asked for by name" in chosen.refusals["compiled"]
    assert pick("quantize", "compiled", call, CPU).name == "compiled"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (QuantizeCall(4, 32, Spec.parse("int8:row")), "int8 is not"),
        (QuantizeCall(4, 32, None, transpose=Spec.parse("e4m3:row:stochastic")), "to nearest, not stochastic"),
        (QuantizeCall(4, 32, Spec.parse("e4m3:1x16:e4m3")), "two-level scales"),
        (QuantizeCall(4, 32, Spec.parse("e4m3:row"), torch.float64), "not torch.float64"),
    ],
    ids=str,
)
def test_it_says_what_it_cannot_do(call: QuantizeCall, reason: str) -> None:
    verdict = registry.backend("quantize", "compiled").supports(call, CPU)
    assert not verdict
    assert reason in verdict.reason
