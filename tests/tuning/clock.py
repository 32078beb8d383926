"""A clock in the place of a GPU: all of tune that only a GPU takes part in runs, and takes as long as it is said to. Times of a CPU would mean nothing."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka.tuning import timing

TAKEN = {
    "bf16": 100.0,
    "chain": 60.0,
    "rowwise": 90.0,
    "loka": 60.0,
}  # microseconds of a run, by the first word of its name


class Clock:
    """Runs steps where a GPU would capture them; a replay writes to what the step wrote to, as a CUDA graph does, and to nothing that is in its place by then.

    Args:
        monkeypatch: puts it in, for a test.
        taken: microseconds, other than `TAKEN`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **taken: float) -> None:
        self.taken = TAKEN | taken
        self.captured: list[nn.Module] = []
        self.modes: list[set[bool]] = []  # of the modules of each
        self.compiled: list[dict[str, Any]] = []  # what torch.compile was given
        self.host: Callable[[nn.Module], float] = lambda model: 1.0  # microseconds of a launch
        self.fail: Callable[[nn.Module, dict[str, Any]], None] = lambda model, given: None
        monkeypatch.setattr(timing, "can_time", lambda device: None)
        monkeypatch.setattr(timing, "capture", self._capture)
        monkeypatch.setattr(timing, "time_in_turns", self._time)
        monkeypatch.setattr(torch, "compile", self._compile)

    def _compile(self, what: Any, **given: Any) -> Any:
        self.compiled.append(given)
        return what

    def _capture(self, step: timing.Run, model: nn.Module) -> timing.Captured:
        kept = timing.held_by(model)
        self.captured.append(model)
        self.modes.append({module.training for module in model.modules()})
        self.fail(model, self.compiled[-1])
        tensors = list({id(one): one for one in kept if isinstance(one, Tensor)}.values())
        before = [tensor.detach().clone() for tensor in tensors]
        for _ in range(3):
            step()
        written = [tensor for tensor, old in zip(tensors, before, strict=True) if not torch.equal(tensor, old)]

        def replay() -> None:
            torch.rand(1)  # a dropout in a graph moves its generator on
            with torch.no_grad():
                for tensor in written:
                    tensor.add_(1)

        return timing.Captured(replay, self.host(model), (step, kept))

    def _time(self, runs: Mapping[str, timing.Run]) -> dict[str, list[float]]:
        for run in runs.values():
            run()
        return {name: [self.taken.get(name, self.taken[name.partition(" ")[0]])] * 3 for name in runs}
