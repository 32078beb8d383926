"""Linear keeps its weights as its backend reads them: laid out once per step, the same gradients, compiled or not."""

from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

from kernels.padding import in_place_of_the_reference
from loka.kernels import registry
from loka.kernels.backend import YES
from loka.kernels.prepared import layout_of
from loka.kernels.scaled_mm import torch as library
from loka.placing import LinearOptions, convert, refresh

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The reference behind a layout; it counts the operands it lays out."""
    return in_place_of_the_reference(monkeypatch)


def make(recipe: str, weights: str = "step") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 27), nn.ReLU(), nn.Linear(27, 479))
    convert(model, recipe=recipe, backend="reference", options=LinearOptions(weights=weights))  # type: ignore[arg-type]
    return model


def train(model: nn.Module, run, steps: int, accumulate: int) -> list[Tensor]:
    """Losses and, at last, parameters and their gradients."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            loss = run(torch.randn(8, 13, generator=generator, requires_grad=True)).square().mean()
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
    return [*seen, *(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
def test_prepared_weights_train_as_plain_ones(padding: SimpleNamespace, monkeypatch, recipe: str) -> None:
    cached = make(recipe)
    found = train(cached, cached, 3, 2)
    weights = cached[0].state.weights
    assert [layout is not None for layout in weights.layouts] == [True, True]
    assert (weights.data.shape, weights.data_t.shape) == ((32, 16), (16, 32))
    fresh = make(recipe, "fresh")  # quantised in every forward, never prepared
    assert same(found, train(fresh, fresh, 3, 2))
    monkeypatch.delattr(padding, "prepare")
    plain = make(recipe)
    assert same(found, train(plain, plain, 3, 2))
    assert plain[0].state.weights.layouts == (None, None)
    assert plain[0].state.weights.data.shape == (27, 13)


def test_weights_are_laid_out_once_per_step(padding: SimpleNamespace) -> None:
    """rowwise_with_gw_hp: fprop and dgrad read weights, wgrad has no quantised operand; so everything counted is a weight."""
    model = make("rowwise_with_gw_hp")
    made = padding.count
    assert made == 4  # W and W^T of two layers
    train(model, model, 3, 5)
    assert (
        padding.count - made == 4 * 2
    )  # after the first and the second step; the third's are made when they are needed
    padding.count = 0
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(8, 13))
    assert padding.count == 4
    refresh(model)
    assert padding.count == 8
    fresh = make("rowwise_with_gw_hp", "fresh")
    padding.count = 0
    train(fresh, fresh, 3, 5)
    assert padding.count == 3 * 5 * 4  # every forward and backward of both layers


def test_buffers_stay_where_they_are_and_follow_the_weight(padding: SimpleNamespace) -> None:
    model = make("rowwise")
    weights = model[0].state.weights
    before = [buffer.data_ptr() for buffer in weights._buffers() if buffer is not None]
    x = torch.randn(4, 13)
    with torch.no_grad():
        model[0].weight.mul_(3)
        expected = make("rowwise", "fresh")
        expected.load_state_dict(model.state_dict())
        assert torch.equal(model(x), expected(x))
    assert [buffer.data_ptr() for buffer in weights._buffers() if buffer is not None] == before
    assert weights.nbytes == sum(buffer.nbytes for buffer in weights._buffers() if buffer is not None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_it_is_one_graph_and_the_same(padding: SimpleNamespace, recipe: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = make(recipe)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    found = train(model, compiled, 2, 2)
    eager = make(recipe)
    assert same(found, train(eager, eager, 2, 2))
    assert counter.frame_count == 1
    assert model[0].state.weights.layouts[0] is not None


@pytest.mark.slow
def test_compiled_by_inductor_odd_widths_are_the_same(padding: SimpleNamespace) -> None:
    torch._dynamo.reset()
    model = make("rowwise").eval()
    x = torch.randn(8, 13)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True)(x), model(x))


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch has no scaled_mm on the CPU (2.11 has none, 2.13 has)",
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_torchs_own_kernels_on_odd_widths(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.setattr(library, "supports", lambda call, device: YES)  # as if this CPU were a GPU
    monkeypatch.setattr(registry, "_CACHE", {})  # which keeps that answer
    model, fresh = (nn.Sequential(nn.Linear(13, 27), nn.Linear(27, 479)) for _ in range(2))
    fresh.load_state_dict(model.state_dict())
    convert(model, recipe=recipe, backend="torch")
    convert(fresh, recipe=recipe, backend="torch", options=LinearOptions(weights="fresh"))
    q, _ = model[0].state.weights.get(model[0].weight, training=True)  # type: ignore[union-attr, arg-type]
    assert layout_of(q)[0] == "torch"  # type: ignore[index]
    assert same(train(model, model, 2, 2), train(fresh, fresh, 2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [*RECIPES, "blockwise"])
@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_on_a_gpu_prepared_weights_train_as_plain_ones(backend: str, recipe: str) -> None:
    def build(weights: str) -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(13, 479), nn.ReLU(), nn.Linear(479, 640), nn.Linear(640, 27)).cuda().bfloat16()
        convert(model, recipe=recipe, backend=backend, options=LinearOptions(weights=weights))  # type: ignore[arg-type]
        return model

    registry.load("scaled_mm")
    found = []
    for weights in ("step", "fresh"):
        model = build(weights)
        generator = torch.Generator("cuda").manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(4):
            x = torch.randn(256, 13, device="cuda", dtype=torch.bfloat16, generator=generator)
            model(x).float().square().mean().backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    assert same(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [*RECIPES, "blockwise"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_on_a_gpu_compiled_odd_widths_are_one_graph(backend: str, recipe: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(13, 479), nn.ReLU(), nn.Linear(479, 27)).cuda().bfloat16()
    convert(model, recipe=recipe, backend=backend)
    compiled = torch.compile(model, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(256, 13, device="cuda", dtype=torch.bfloat16)
        model.zero_grad()
        model(x).float().square().mean().backward()
        expected = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        model.zero_grad()
        compiled(x).float().square().mean().backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad, rtol=0.05, atol=0.02 * float(grad.abs().max()))
        optimizer.step()
