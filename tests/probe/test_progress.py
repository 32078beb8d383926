"""A bar on a terminal, silence elsewhere, and a caller's own function untouched. An evaluation keeps nothing but its report."""

import io
import sys

import pytest
import torch

from loka.probe import Probe
from loka.probe.progress import telling

from .small import Small, batches, train


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_bar_and_a_file_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with telling(None) as tell:
            tell("bottom.0", 1, 8)
        assert ("bottom.0" in stream.getvalue()) == shown


def test_a_function_of_ones_own_is_called_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    seen: list[tuple[str, int, int]] = []
    with telling(lambda *told: seen.append(told)) as tell:
        tell("bottom.0", 1, 8)
    assert seen == [("bottom.0", 1, 8)]
    assert stream.getvalue() == ""


def test_an_evaluation_gives_back_what_only_drawing_needed() -> None:
    torch.manual_seed(0)
    model = Small()
    probe = Probe(model, every=1)
    train(model, batches(3), probe)
    probe.evaluate(samples=3)
    learned = probe.watch("twice").learned
    assert learned is not None
    assert learned.matrix_normal is not None
    assert all(gaussian._factor is None for gaussian in learned.gaussians.values())
    assert learned.matrix_normal.u._root is None
    assert learned.matrix_normal.v._root is None
    again = probe.evaluate(samples=3)  # and it can be done again
    assert again.site("twice").candidates[0].mere is not None
