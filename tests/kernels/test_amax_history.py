"""file_amax: the kernel against the law, number by number, over several steps; Triton in its interpreter."""

import os
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels.interpreter import run_interpreted
from loka.kernels.amax_history import file_amax, plain
from loka.kernels.triton_device import triton_runs_on

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass
class Operand:
    """What a linear or a chain remembers."""

    history: Tensor
    headroom: float = 1.0
    floor: float = 0.0
    largest: Tensor = field(init=False)
    pending: Tensor = field(init=False)
    scale: Tensor = field(init=False)
    saturated: Tensor = field(init=False)

    def __post_init__(self) -> None:
        for name in ("largest", "pending", "saturated"):
            setattr(self, name, self.history.new_zeros(()))
        self.scale = self.history.new_ones(())

    def facts(self) -> list[Tensor]:
        return [self.history, self.largest, self.pending, self.scale, self.saturated]


def make(device: torch.device) -> list[Operand]:
    kinds = [(16, 1.0, 0.0), (16, 2.0, 0.0), (1, 1.0, 0.0), (5, 4.0, 3.0), (16, 1.0, 0.0)]
    return [Operand(torch.zeros(length, device=device), headroom, floor) for length, headroom, floor in kinds]


STEPS = [
    [3.0, 0.0, 7.5, 0.1, 1e-40],
    [5.0, 2.0, 0.0, 0.2, 448.0],
    [1e5, 0.3, 7.4, 9.0, 3.0e38],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    *([1.0 + 0.37 * step, 0.01, 1.0 / (1 + step), 2.0, 3.0] for step in range(18)),
]


@pytest.mark.parametrize("tables", [1, 16], ids=["thrown away", "kept"])
def test_files_as_the_reference_does_triton(device: torch.device, tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not triton_runs_on(device):
        pytest.skip("Triton does not run here")
    from loka.kernels.amax_history import triton_kernels

    monkeypatch.setattr(triton_kernels, "_MOST_TABLES", tables)
    monkeypatch.setattr(triton_kernels, "_tables", {})
    found, expected, others = make(device), make(device), make(device)
    for step in STEPS:
        for side in (found, expected):
            for operand, amax in zip(side, step, strict=True):
                operand.pending.fill_(amax)
        file_amax(found)
        plain.file_amax(expected)
        file_amax(others)  # another model of the process
        assert len(triton_kernels._tables) == min(tables, 2)
        for a, b in zip(found, expected, strict=True):
            for mine, theirs in zip(a.facts(), b.facts(), strict=True):
                assert torch.equal(mine, theirs), (step, a, b)


def test_a_table_that_a_graph_reads_outlives_the_others_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    if not triton_runs_on(device):
        pytest.skip("Triton does not run here")
    from loka.kernels.amax_history import triton_kernels

    monkeypatch.setattr(triton_kernels, "_MOST_TABLES", 1)
    monkeypatch.setattr(triton_kernels, "_tables", {})
    monkeypatch.setattr(triton_kernels, "_captured", {})
    models = [make(device) for _ in range(3)]
    file_amax(models[0])
    (table, _) = next(iter(triton_kernels._tables.values()))
    if device.type == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            file_amax(models[0])
    else:  # the interpreter knows no graphs
        monkeypatch.setattr(triton_kernels, "_is_capturing", lambda device: True)
        file_amax(models[0])
        monkeypatch.setattr(triton_kernels, "_is_capturing", lambda device: False)
    for model in models[1:]:
        file_amax(model)
    assert len(triton_kernels._tables) == 1
    assert next(iter(triton_kernels._captured.values()))[0] is table


@pytest.mark.gpu
def test_files_in_a_cuda_graph(device: torch.device) -> None:
    """First inside of the graph, where no table of addresses can be made, then with one that is there."""
    for warm in (False, True):
        found, expected = make(device), make(device)
        if warm:
            file_amax(found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            file_amax(found)
        for step in STEPS[:3]:
            for side in (found, expected):
                for operand, amax in zip(side, step, strict=True):
                    operand.pending.fill_(amax)
            graph.replay()
            plain.file_amax(expected)
            assert all(torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x.facts(), y.facts(), strict=True))  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself")
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_triton_under_its_interpreter() -> None:
    run_interpreted(__file__)
