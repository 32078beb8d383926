"""Converted models are one graph to torch.compile, with the free mods and every chain: a break anywhere sends whole forwards to eager code, right and slow, without a word.

Run this under the oldest torch that is supported before a GPU is used: compilers differ in what they trace.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import loka
from foreign_zoo import DLRM, ZOO, Tower, encoder
from loka import mods
from loka.models import build
from loka.nn import BlockNorm
from loka.nn.tower import Style

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import zoo_more


class Wukong(nn.Module):
    """One layer as a user writes it: an einsum, transposes, a residual."""

    def __init__(self, n: int = 16, d: int = 16, k: int = 8) -> None:
        super().__init__()
        self.p, self.norm = nn.Parameter(torch.randn(n, k) / n**0.5), nn.LayerNorm(n * k)
        self.mlp = nn.Sequential(nn.Linear(n * k, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8 * d))
        self.lcb, self.residual = nn.Linear(n, 8, bias=False), nn.Linear(n, 16, bias=False)
        self.top = nn.Linear(16 * d, 1)
        self.d = d

    def forward(self, x: Tensor) -> Tensor:
        products = torch.bmm(x, torch.einsum("bnd,nk->bdk", x, self.p)).flatten(1)
        made = self.mlp(self.norm(products)).view(-1, 8, self.d)
        compressed = self.lcb(x.transpose(1, 2)).transpose(1, 2)
        x = torch.cat([made, compressed], 1) + self.residual(x.transpose(1, 2)).transpose(1, 2)
        return self.top(x.flatten(1))


class Dropping(nn.Module):
    """Dropout everywhere: behind an activation, behind a norm, as a function, one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(64, 64) for _ in range(4))
        self.norm, self.drop, self.top = nn.LayerNorm(64), nn.Dropout(0.2), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.a(x)))
        x = self.drop(torch.nn.functional.silu(self.norm(self.b(x))))
        x = torch.nn.functional.dropout(torch.nn.functional.gelu(self.c(x)), 0.1, self.training)
        return self.top(self.d(x))


class Encoder(nn.Module):
    """torch's own layer with a prediction layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = encoder(layers=1), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x).mean(1))


MODELS = {  # as shallow as shows every join: tracing a layer takes a second
    "dlrm": (lambda: DLRM(top=(64,)), ZOO["dlrm"][1]),
    "tower": (lambda: Tower(n=2), ZOO["tower"][1]),
    "encoder": (Encoder, ZOO["encoder"][1]),
    "wukong": (Wukong, lambda b: (torch.randn(b, 16, 16),)),
    "llama": (
        lambda: zoo_more.Llama(**{**zoo_more.MODELS["llama"].tiny, "layers": 1}),
        lambda b: (torch.randint(100, (b, 12)), torch.randint(100, (b, 12))),
    ),
    "dropping": (Dropping, lambda b: (torch.randn(b, 64),)),
}


@pytest.mark.parametrize("serving", [False, True], ids=["train", "serve"])
@pytest.mark.parametrize("name", MODELS)
def test_one_graph(name: str, serving: bool) -> None:
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model, inputs = build().train(not serving), draw(16)
    plan = loka.placing.plan_everything(model, inputs, mods=list(mods.FREE), serving=serving, linears=64)
    assert plan.units
    loka.convert(model, plan, example=inputs, freeze=serving)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    with torch.set_grad_enabled(not serving):
        for _ in range(0 if serving else 2):  # so that delayed scales are known
            model(*inputs).square().mean().backward()
        torch.manual_seed(1)
        expected = model(*inputs)
        torch.manual_seed(1)  # the same dropout
        found = compiled(*inputs)
    # compiled, an input is quantised before it is rounded to 16 bits, so that some values become the neighbouring FP8 number
    assert float((found - expected).detach().norm() / expected.detach().norm()) < 0.1
    if not serving:
        found.square().mean().backward()


class Several(nn.Module):
    """Chains whose slopes, epsilons and scales are numbers of objects and modules, and a linear that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        acts = (nn.LeakyReLU(0.2), nn.Sequential(nn.LayerNorm(64), nn.ReLU()), nn.Sequential(BlockNorm(64), nn.ReLU()))
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), act, nn.Linear(64, 64)) for act in (*acts, acts[-1]))  # fmt: skip
        self.twice, self.top = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.stack([tower(x) for tower in self.towers]).sum(0)
        return self.top(self.twice(h) * self.twice(x))


def wukong_with_block_norms() -> nn.Module:
    return build("wukong", "tiny", style=Style(norm="block", tower_norm="block", bias=False))


def several_on_this_torch() -> nn.Module:
    if torch.__version__ < (2, 13):  # type: ignore[operator]
        pytest.skip(
            "torch before 2.13 fails with an assertion of its own on a linear that a forward calls twice, with dynamic=True"
        )
    return Several()


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shape"), [(several_on_this_torch, (64,)), (wukong_with_block_norms, (16, 16))])
def test_training_with_dynamic_shapes(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """To torch.compile(dynamic=True) numbers of objects and modules are variables, which two autograd functions cannot share."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(16, *shape)
    loka.convert(model, loka.placing.plan_everything(model, x, linears=16))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for rows in (16, 7):
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            run(x[:rows]).square().mean().backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("serving", [False, True], ids=["train", "serve"])
@pytest.mark.parametrize("name", MODELS)
def test_the_compilers_own_cuda_graphs(name: str, serving: bool) -> None:
    """mode="reduce-overhead" gives up on a graph that writes to tensors whose address may change, with a line in a log and no more, and refuses one that keeps tensors from call to call."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    build, draw = MODELS[name]
    model, inputs = build().cuda().train(not serving), tuple(value.cuda() for value in draw(256))
    plan = loka.placing.plan_everything(model, inputs, mods=list(mods.FREE), serving=serving, linears=64)
    loka.convert(model, plan, example=inputs, freeze=serving)
    optimizer = None if serving else torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(run: nn.Module) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(not serving):
            out = run(*inputs).float()
        if optimizer is not None:
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return out.detach().clone()

    for _ in range(2):
        step(model)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, mode="reduce-overhead", dynamic=False, fullgraph=True)
    found = [step(compiled) for _ in range(6)]
    assert not counters["inductor"]["cudagraph_skips"]
    if serving:
        assert all(torch.equal(out, found[0]) for out in found)
        assert (found[0] - step(model)).norm() <= 0.1 * found[0].norm()
    else:
        loss = [float(out.square().mean()) for out in found]
        assert loss[-1] < loss[0] * (
            1.2 if name == "dropping" else 1.0
        )  # it learns; what dropout draws is larger than a step
