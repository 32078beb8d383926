"""Arrays reach the device in one copy, whatever their shapes and dtypes, and stay what they were until the next call."""

import numpy as np
import pytest
import torch

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
