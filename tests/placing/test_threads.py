"""Several threads call one converted model in eager mode, as the endpoints of a web framework do."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loka
from foreign_zoo import ZOO
from loka import mods
from loka.lowp import chains_of
from loka.lowp.chain_handing import AnotherPathError
from loka.placing import plan_everything

THREADS = 4


@pytest.fixture(autouse=True)
def _eager_switching() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether results are of different inputs; by how many threads a sum is computed may change its last digits."""
    return not bool((a - b).norm() <= 1e-2 * b.norm())


@pytest.mark.parametrize("name", ZOO)
def test_threads_share_a_serving_model(name: str) -> None:
    torch.manual_seed(0)
    build, inputs = ZOO[name]
    model, batches = build().eval(), [inputs(8) for _ in range(THREADS)]
    plan = plan_everything(model, batches[0], serving=True, mods=mods.FREE)
    loka.convert(model, plan, freeze=True, example=batches[0])
    assert list(chains_of(model))
    with torch.no_grad():
        expected = [model(*x) for x in batches]
    assert all(differ(a, b) for a, b in pairwise(expected))
    together = Barrier(THREADS)

    def serve(at: int) -> list[Tensor]:
        together.wait()
        with torch.no_grad():
            return [model(*batches[at]) for _ in range(6)]

    with ThreadPoolExecutor(THREADS) as pool:
        for found, wanted in zip(pool.map(serve, range(THREADS)), expected, strict=True):
            assert not any(differ(y, wanted) for y in found)


class Skipping(nn.Module):
    """Its hidden value is returned where asked, which no example showed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.last, self.asked = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1), False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        return h.sum(1) if self.asked else self.last(torch.relu(self.b(h)))


def test_another_path_in_one_thread_leaves_the_others_alone() -> None:
    model, x = Skipping(), torch.randn(16, 64)
    loka.convert(model, plan_everything(model, x))
    expected = model(x)
    model.asked = True
    with ThreadPoolExecutor(1) as pool, pytest.raises(AnotherPathError, match="reads a value inside the chain a"):
        pool.submit(model, x).result()
    model.asked = False
    assert not differ(model(x), expected)


class Broken(nn.Module):
    """Its graph breaks inside of the chain, and eager code runs between the two graphs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        torch._dynamo.graph_break()
        h = self.b(h)
        torch._dynamo.graph_break()
        return self.last(torch.relu(h))


class BrokenBefore(nn.Module):
    """The graph breaks in front of its linear; the last one of a chain leaves a frame without operations behind that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.linear(x)


def blocks() -> nn.Module:
    torch.manual_seed(0)
    parts = [(BrokenBefore(64), nn.LayerNorm(64), nn.SiLU()) for _ in range(3)]
    return nn.Sequential(*(module for part in parts for module in part), BrokenBefore(8))


@pytest.mark.parametrize("build", [Broken, blocks])
@pytest.mark.parametrize("trained", [False, True])
def test_threads_share_a_compiled_model_whose_graph_breaks_inside_a_chain(build: Any, trained: bool) -> None:
    torch._dynamo.reset()
    model, batches = build().train(trained), [torch.randn(16, 64) for _ in range(THREADS)]
    loka.convert(model, plan_everything(model, batches[0], serving=not trained), freeze=not trained, example=batches[0])
    with torch.set_grad_enabled(trained):
        model(batches[0])
        loka.placing.refresh(model)  # the scales of the first batch
        model.eval()  # which keep their scales from here on
        expected = [model(x).detach() for x in batches]
    compiled, together = torch.compile(model, backend="eager"), Barrier(THREADS)

    def warm_up() -> None:
        with torch.set_grad_enabled(trained):
            for _ in range(2):
                compiled(batches[0])

    def count_graphs() -> int:
        with ThreadPoolExecutor(1) as pool:  # in a new thread
            pool.submit(warm_up).result()
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    assert count_graphs() == count_graphs()  # nothing is compiled for each thread

    def serve(at: int) -> list[Tensor]:
        together.wait()
        with torch.set_grad_enabled(trained):
            return [compiled(batches[at]).detach() for _ in range(100)]

    with ThreadPoolExecutor(THREADS) as pool:
        for found, wanted in zip(pool.map(serve, range(THREADS)), expected, strict=True):
            assert not any(differ(y, wanted) for y in found)
