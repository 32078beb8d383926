"""The same numbers on the GPU as on the CPU, with the state staying where the data is."""

import copy
from typing import Any

import pytest

from loka.metrics import Metric

from . import test_accumulator as cases
from .test_accumulator import CASES, Feed, draw, flatten

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("blank", "feed"), CASES, ids=[type(metric).__name__ for metric, _ in CASES])
def test_cuda_equals_cpu(blank: Metric[Any], feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = copy.deepcopy(blank), copy.deepcopy(blank)
    for part in range(2):
        feed(host, part)
    monkeypatch.setattr(cases, "draw", lambda part: {name: x.cuda() for name, x in draw(part).items()})
    for part in range(2):
        feed(device, part)
    assert device.device.type == "cuda"
    assert flatten(device.compute()) == pytest.approx(flatten(host.compute()), rel=1e-12)
    host.merge(device)  # across devices
    assert host.device.type == "cpu"
