"""weighted_sums: the same values and gradients compiled, without a batch product in the graph; torch's own bits in eager mode; other contractions left."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from loka import mods

from .zoo import assert_same_state, snapshot

ROWS = 40


@pytest.fixture(autouse=True)
def _compile_anew() -> None:
    torch._dynamo.reset()  # one forward is compiled in many ways here


class Mixing(nn.Module):
    """A gate over experts, mixed by a function of its weights [B, E] and the experts [B, E, D]."""

    def __init__(self, mix: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], experts: int = 3) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 6) for _ in range(experts))
        self.gate = nn.Linear(8, experts)
        self.mix = mix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return self.mix(self.gate(x).softmax(-1).to(made.dtype), made)


WAYS = {
    "einsum": lambda g, v: torch.einsum("be,bed->bd", g, v),
    "einsum, other order": lambda g, v: torch.einsum("bij,bi->bj", v, g),
    "einsum over the last": lambda g, v: torch.einsum("bde, be -> bd", v.mT, g),
    "bmm": lambda g, v: torch.bmm(g.unsqueeze(1), v).squeeze(1),
    "matmul": lambda g, v: (g[:, None] @ v)[:, 0],
    "a column": lambda g, v: torch.matmul(v.transpose(1, 2), g[..., None]).squeeze(-1),
    "four dimensions": lambda g, v: (g[:, None, None] @ v[:, None]).flatten(1),
}


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = x.clone().requires_grad_()
    y = model(x)
    return y.detach(), list(torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]))


def compiled_ops(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Outputs and the functions of the graph."""
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        seen.extend(str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes)
        return graph.forward

    return torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x), seen


@pytest.mark.parametrize("way", WAYS)
def test_compiled_as_sums_and_eager_as_it_was(way: str) -> None:
    torch.manual_seed(0)
    model, x = Mixing(WAYS[way]), torch.randn(ROWS, 8)
    expected, before = step(model, x), snapshot(model)
    done = mods.apply(model, "weighted_sums", example=x)
    assert [change.site for change in done.summary.changed] == [""]
    for found, wanted in zip(step(model, x)[1], expected[1], strict=True):
        assert torch.equal(found, wanted)
    y, ops = compiled_ops(model, x)
    assert not {"einsum", "bmm", "matmul", "__matmul__"} & set(ops), ops
    torch.testing.assert_close(y, expected[0], rtol=1e-5, atol=1e-5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(step(compiled, x), expected, rtol=1e-5, atol=1e-5)
    mods.revert(model)
    assert_same_state(model, before)


def test_under_autocast_it_computes_in_that_type() -> None:
    model, x = Mixing(WAYS["einsum"]), torch.randn(ROWS, 8)
    mods.apply(model, "weighted_sums", example=x)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(x), torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


LEFT = {
    "products of matrices": lambda g, v: torch.einsum("bed,bfd->bef", v, v).flatten(1),
    "an outer product": lambda g, v: torch.einsum("be,bd->bed", g, v[:, 0]).flatten(1),
    "a sum over examples": lambda g, v: torch.einsum("be,bed->ed", g, v),
    "two summed": lambda g, v: torch.einsum("be,bed->b", g, v),
    "one matrix for all": lambda g, v: g.unsqueeze(1) @ v[0],
    "dots": lambda g, v: torch.einsum("...e,...ed->...d", g, v),
    "double precision": lambda g, v: torch.einsum("be,bed->bd", g.double(), v.double()),
}


@pytest.mark.parametrize("way", LEFT)
def test_other_contractions_are_left(way: str) -> None:
    model, x = Mixing(LEFT[way]), torch.randn(ROWS, 8)
    expected = model(x)
    assert not mods.apply(model, "weighted_sums", example=x).summary.changed
    assert torch.equal(model(x), expected)


def test_few_examples_are_left_and_that_is_said() -> None:
    """A product of a few large matrices is what libraries are made for."""
    done = mods.apply(Mixing(WAYS["bmm"]), "weighted_sums", example=torch.randn(4, 8))
    assert not done.summary.changed
    assert "4 products of a vector and a matrix in the example, fewer than 32" in done.summary.left[0].why


@pytest.mark.parametrize(
    "kinds", [(torch.float64, torch.float64), (torch.float64, torch.float32), (torch.float32, torch.float16)]
)
@pytest.mark.parametrize("autocast", [False, True])
def test_types_are_those_of_torch_and_so_are_its_errors(kinds: tuple[torch.dtype, torch.dtype], autocast: bool) -> None:
    """On a path that the example did not take."""

    class Typed(nn.Module):
        kinds = (torch.float32, torch.float32)

        def forward(self, g: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return torch.bmm(g.to(self.kinds[0]).unsqueeze(1), v.to(self.kinds[1])).squeeze(1)

    def run(model: nn.Module) -> torch.dtype | str:
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return model(*given).dtype
        except Exception:
            return "an error"

    model, given = Typed(), (torch.randn(ROWS, 3), torch.randn(ROWS, 3, 6))
    mods.apply(model, "weighted_sums", example=given)
    Typed.kinds = kinds
    expected = run(model)
    assert run(torch.compile(model, backend="aot_eager", fullgraph=True)) == expected


def test_an_einsum_that_does_not_fit_has_torchs_error() -> None:
    model = Mixing(lambda g, v: torch.einsum("be,bed->bd", g, v[0]))
    with pytest.raises(Exception, match="einsum"):
        mods.apply(model, "weighted_sums", example=torch.randn(ROWS, 8))


@pytest.mark.parametrize("way", ["einsum", "bmm"])
def test_batches_of_any_size_in_one_graph(way: str) -> None:
    model, x, graphs = Mixing(WAYS[way]), torch.randn(ROWS, 8), []
    mods.apply(model, "weighted_sums", example=x)

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for rows in (ROWS, 64, 5, 100):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(graphs) == 1


def test_exported_its_rows_are_free() -> None:
    model, x = Mixing(WAYS["einsum"]), torch.randn(ROWS, 8)
    mods.apply(model, "weighted_sums", example=x)
    exported = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
    other = torch.randn(7, 8)
    torch.testing.assert_close(exported.module()(other), model(other), rtol=1e-5, atol=1e-5)


def test_without_an_example_it_says_what_it_needs() -> None:
    done = mods.apply(Mixing(WAYS["bmm"]), "weighted_sums")
    assert "example" in done.summary.left[0].why
