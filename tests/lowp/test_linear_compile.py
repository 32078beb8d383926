"""A converted model under torch.compile: no graph breaks, recompilations counted, checkpointing and autocast inside."""

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka.lowp import weight_cache
from loka.placing import LinearOptions, convert

slow = pytest.mark.slow


def counting() -> torch._dynamo.testing.CompileCounterWithBackend:
    torch._dynamo.reset()
    return torch._dynamo.testing.CompileCounterWithBackend("aot_eager")


def gradients(model: nn.Module, run, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


@slow
@pytest.mark.parametrize("weights", ["step", "manual"])
def test_steps_accumulation_and_evaluation_compile_twice(weights: str) -> None:
    """One graph to train, one to evaluate, whatever the weights and scales do in between."""
    counter = counting()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16))
    options = LinearOptions(scales="delayed", weights=weights)  # type: ignore[arg-type]
    convert(model, recipe="tensorwise", backend="reference", options=options)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        model.train()
        for _ in range(2):
            compiled(torch.randn(8, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            compiled(torch.randn(8, 32))
    assert counter.frame_count == 2


@slow
def test_layers_compiled_one_by_one_share_their_code() -> None:
    """Regional compilation: nothing in a Linear's state is a constant of the graph, so twelve layers cost what two do."""
    counter = counting()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12)]
    model = nn.Sequential(*layers)
    convert(model, recipe="rowwise", backend="reference")
    compiled = nn.Sequential(*(torch.compile(layer, fullgraph=True, backend=counter) for layer in layers))
    x = torch.randn(8, 16, requires_grad=True)
    found = gradients(model, compiled, x)
    assert counter.frame_count <= 2
    assert same(found, gradients(model, model, x))


@slow
def test_checkpointing_inside_a_compiled_model() -> None:
    counter = counting()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    convert(inner, recipe="tensorwise", backend="reference", options=LinearOptions(scales="delayed"))

    def run(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(inner, x, use_reentrant=False)
        return out

    x = torch.randn(8, 32)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    assert same(gradients(inner, compiled, x), gradients(inner, inner, x))


@slow
def test_autocast_inside_a_compiled_step() -> None:
    counter = counting()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16))
    convert(model, recipe="tensorwise", backend="reference", options=LinearOptions(save="fp8"))

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = model(x)
        return out

    x = torch.randn(8, 32)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    found = gradients(model, compiled, x)
    assert found[0].dtype == torch.bfloat16
    assert found[2].dtype == torch.float32
    assert same(found, gradients(model, run, x))


@slow
def test_batches_of_any_size_compile_twice() -> None:
    counter = counting()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16))
    convert(model, recipe="tensorwise", backend="reference")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows in (8, 5, 12, 7):
        x = torch.randn(rows, 32)
        assert same(gradients(model, compiled, x), gradients(model, model, x)), rows
    assert counter.frame_count == 2  # one static, then one for every size


@slow
def test_autocast_around_a_backward_that_asks_for_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton quantiser does; dynamo then traces the backward twice, and a context that the first trace opened would stay open."""
    torch._dynamo.reset()
    for name in ("quantize", "quantize_both", "quantize_transposed"):
        real = getattr(weight_cache, name)

        def asking(x: Tensor, *rest: object, real=real, **named: object):
            return real(x if x.stride(-1) == 1 else x.contiguous(), *rest, **named)

        monkeypatch.setattr(weight_cache, name, asking)
    model = nn.Sequential(nn.Linear(32, 16))
    convert(model, recipe="rowwise", backend="reference")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (torch.autograd.grad(run(x).sum(), (x, model[0].weight)) for run in (compiled, model))
        assert torch.is_autocast_enabled("cpu")
    assert same(list(ours), list(theirs))
