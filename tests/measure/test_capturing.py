"""A capture that fails leaves the process as it was."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from loka.measure.capturing import capturing


@pytest.mark.parametrize("broken", [False, True])
def test_the_stream_is_put_back_and_the_error_is_raised(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torch that gives up in the middle, as it does: everything is tried, and nothing hides the error."""
    seen: list[object] = []
    now = SimpleNamespace(stream="the caller's")

    @contextmanager
    def graph(graph: object, pool: object = None, stream: object = None) -> Iterator[None]:
        now.stream = stream or "a side stream"
        yield
        raise RuntimeError("no second capture either")

    def fails(*given: object) -> None:
        seen.append(given)
        raise RuntimeError("not recording")

    def make_stream(device: int) -> str:
        if broken:
            raise RuntimeError("of the device, in every call from now on")
        return "new"

    for name, made in {
        "graph": graph, "current_stream": lambda: now.stream, "set_stream": lambda stream: setattr(now, "stream", stream),
        "graph_pool_handle": lambda: (0, 7), "current_device": lambda: 0, "Stream": make_stream, "CUDAGraph": object,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, made)
    monkeypatch.setattr(torch, "zeros", lambda *size, **given: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fails, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", fails, raising=False)

    def step() -> None:
        with capturing(object()):
            seen.append(now.stream)
            raise ValueError("of the step")

    with pytest.raises(ValueError, match="of the step"):
        step()
    assert now.stream == "the caller's"
    assert seen == ["a side stream", (0, (0, 7))]


@pytest.mark.gpu
def test_after_a_failed_capture_random_numbers_memory_and_graphs_work(device: torch.device) -> None:
    x = torch.ones(1024, device=device)
    x.sum().item()
    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    before = torch.cuda.memory_allocated()

    def step() -> None:
        with capturing(torch.cuda.CUDAGraph()):
            kept = torch.randn(2**20, device=device) * x.sum()
            float(kept.sum())  # not possible in a capture

    for _ in range(3):
        with pytest.raises(RuntimeError):
            step()
        assert torch.cuda.current_stream() == stream
        assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.randn(8, device=device).isfinite().all()
    gc.collect()  # the errors hold what their captures made
    assert torch.cuda.memory_allocated() <= before + 4096
    graph, y = torch.cuda.CUDAGraph(), torch.zeros(1024, device=device)
    with capturing(graph):
        y.copy_(2 * x)
    graph.replay()
    assert y.sum().item() == 2048
