"""Several threads call one converted model in eager mode, as the endpoints of a web framework do."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

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
