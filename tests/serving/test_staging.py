"""Arrays reach the device in one copy, whatever their shapes and dtypes, and stay what they were until the next call."""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from loka.serving.staging import Staging

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def arrays(draw: np.random.Generator, rows: int) -> list[np.ndarray]:
    wide = draw.normal(size=(rows, 7)).astype(np.float32)
    return [
        draw.integers(0, 9, rows), wide, np.empty((0, 3), np.float32), wide.T, draw.integers(0, 2**62, (rows, 3)),
        np.frombuffer(wide.tobytes(), "<f4"), np.array(rows, np.int32),
    ]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inference", [True, False])
def test_arrays_arrive_as_they_are(device: str, inference: bool) -> None:
    draw, staging = np.random.default_rng(0), Staging(torch.device(device))
    for rows in (3, 1, 0, 5000, 17):  # also growing, and smaller again
        sent = arrays(draw, rows)
        with torch.inference_mode(inference):
            found = staging.send(sent)
        assert len(found) == len(sent)
        for tensor, array in zip(found, sent, strict=True):
            assert tensor.device.type == device
            assert np.array_equal(tensor.cpu().numpy(), array)
            assert tensor.cpu().numpy().dtype == array.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_kept_until_they_are_read(device: str) -> None:
    """Whatever was sent and computed since; and their memory is used again."""
    staging, draw = Staging(torch.device(device)), np.random.default_rng(0)
    for rows in (5, 3000, 2, 700):
        sent = [draw.normal(size=(rows, 3)).astype(np.float32) for _ in range(3)]
        static, waiting = torch.zeros(rows, 3, device=device), []
        for array in sent:
            static.copy_(staging.send([array])[0])
            waiting.append(staging.fetch(static))
        for array, collect in zip(sent, waiting, strict=True):
            assert np.array_equal(collect(), array)
    assert len(staging._free) <= 6  # three at most at a time, small and large
    assert (staging.seconds > 0) == (device != "cpu")


def test_sending_takes_one_call_of_torch_for_each_array() -> None:
    """Under load every call waits for the lock of the interpreter."""
    calls: list[str] = []

    class Count(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            calls.append(function.__name__)
            return function(*args, **(kwargs or {}))

    staging, draw = Staging(torch.device("cpu")), np.random.default_rng(0)
    for rows in (64, 32):
        sent = arrays(draw, rows)
        with Count():
            staging.send(sent)
    assert calls.count("as_strided") == 2 * len(sent)
    calls.clear()
    with Count():
        staging.send(sent)
    assert len(calls) <= len(sent) + 4


def test_nothing_is_no_array() -> None:
    assert Staging(torch.device("cpu")).send([]) == []


@pytest.mark.gpu
def test_one_copy_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    staging, draw = Staging(torch.device("cuda")), np.random.default_rng(0)
    staging.send(arrays(draw, 64))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        staging.send(arrays(draw, 64))
        torch.cuda.synchronize()
    copies = [event for event in profile.key_averages() if "Memcpy HtoD" in event.key]
    assert sum(event.count for event in copies) == 1
