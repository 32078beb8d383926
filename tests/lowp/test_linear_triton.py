"""A Linear on our Triton quantisers, against the same Linear on the law. On a GPU; otherwise in Triton's interpreter.

The interpreter must be chosen before triton is imported: one test runs this file again in a child process that has it.
"""

import pytest
import torch
from torch import Tensor, nn

from kernels.interpreter import run_interpreted
from loka.dispatch import USUAL
from loka.kernels.triton_device import triton_runs_on
from loka.placing import LinearOptions, convert, refresh


def run(recipe: str, shape: tuple[int, int, int], quantizer: str, device: torch.device, **options: str) -> list[Tensor]:
    m, k, n = shape
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, n)).to(device)
    chosen = LinearOptions(quantizer=quantizer, **options)  # type: ignore[arg-type]
    convert(model, recipe=recipe, backend="reference", options=chosen)
    found = []
    for _ in range(2):  # the second step reads a cache that was written over, and scales with a history
        x = torch.randn(m, k).to(device).requires_grad_()
        y = model(x)
        y.backward(torch.randn(m, n).to(device))
        found += [y.detach(), x.grad, model[0].weight.grad.clone()]
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        refresh(model)
    return found


@pytest.fixture
def triton_device(device: torch.device) -> torch.device:
    if not triton_runs_on(device):
        pytest.skip("Triton runs neither on a GPU nor interpreted in this process; the child process runs this test")
    return device


def check(recipe: str, shape: tuple[int, int, int], device: torch.device, **options: str) -> None:
    ours, law = (run(recipe, shape, quantizer, device, **options) for quantizer in ("triton", "reference"))
    for a, b in zip(ours, law, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "shape"), [*((recipe, (5, 13, 27)) for recipe in USUAL), ("blockwise", (130, 140, 150))]
)
def test_on_triton_every_recipe_equals_the_law(
    recipe: str, shape: tuple[int, int, int], triton_device: torch.device
) -> None:
    check(recipe, shape, triton_device)


@pytest.mark.parametrize("save", ["fp8", "high"])
def test_on_triton_delayed_scales_and_e5m2_equal_the_law(save: str, triton_device: torch.device) -> None:
    check("tensorwise", (9, 140, 27), triton_device, scales="delayed", gradients="e5m2", save=save)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", USUAL)
def test_compiled_training_on_a_gpu(recipe: str) -> None:
    """The real backends, cached weights, inductor: gradients near the exact ones, and a changed weight is seen."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512, bias=False)).cuda()
    exact = nn.Sequential(nn.Linear(256, 512, bias=False)).cuda()
    convert(model, recipe=recipe)
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(3):
        exact.load_state_dict(model.state_dict())
        x = torch.randn(384, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            found = torch.autograd.grad(compiled(x), (x, model[0].weight), dy)
        wanted = torch.autograd.grad(exact(x.float()), (x, exact[0].weight), dy.float())
        for a, b in zip(found, wanted, strict=True):
            assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.06
        with torch.no_grad():
            model[0].weight.mul_(-1)


@pytest.mark.gpu
def test_a_captured_training_step_sees_new_weights() -> None:
    """A replay asks no version counter: the weight is quantised inside the graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).cuda().bfloat16()
    convert(model, recipe="tensorwise")
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = model(x)
    graph.replay()
    before = y.clone()
    with torch.no_grad():
        model[0].weight.mul_(-2)
    graph.replay()
    assert torch.allclose(y, -2 * before, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_evaluation_sees_refreshed_weights(compiled: bool) -> None:
    """Its buffers stay where they are, whatever happens between two replays."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).cuda().bfloat16().eval()
    convert(model, recipe="tensorwise")
    called = torch.compile(model, fullgraph=True) if compiled else model
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        called(x)
        called(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        y = called(x)
    address = model[0].state.weights.data.data_ptr()
    graph.replay()
    before = y.clone()
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.mul_(-2)
            called(x)
            torch.func.functional_call(model, {"0.weight": torch.zeros_like(model[0].weight)}, (x,))
        refresh(model)
    assert model[0].state.weights.data.data_ptr() == address
    graph.replay()
    assert torch.allclose(y, 4 * before, rtol=1e-2, atol=1e-2)


def test_triton_in_the_interpreter(device: torch.device) -> None:
    if triton_runs_on(device):
        pytest.skip("Triton runs in this process")
    run_interpreted(__file__, "on_triton")
