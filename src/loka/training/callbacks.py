"""Callbacks: how anything that watches or steers a run attaches to it.

A callback overrides the moments it cares about:

    on_start        before the first step (after a resume: `trainer.step` > 0)
    on_step_begin   before a step's batches are drawn
    on_step_end     after the update; `log` is a LogLine on log steps, otherwise None (no waiting for the device)
    on_evaluate     after an evaluation, with its metrics
    on_checkpoint   a checkpoint is being taken: return what must come back after a crash, or None
    on_resume       the counterpart: gets what `on_checkpoint` returned
    on_end          after the last step, with the result
    on_error        instead of on_end, when the run fails or is interrupted; the error is raised afterwards

With several processes, callbacks run on rank 0 only, unless they set `every_rank`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from loka.training.result import TrainResult
    from loka.training.trainer import Trainer


@dataclass(frozen=True)
class LogLine:
    """What is known at a log step; means are over the steps since the last one."""

    step: int
    loss: float
    ne: float | None
    learning_rate: float
    examples: int
    examples_per_s: float
    seconds: float


@dataclass(frozen=True)
class CallbackState:
    """What a callback wants to find again: named tensors and JSON values."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Callback:
    """Base class: every moment does nothing. `name` keys the callback's part of a checkpoint."""

    every_rank = False

    @property
    def name(self) -> str:
        """Unique among the callbacks of a run."""
        return type(self).__name__

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Before a step; `trainer.step` steps are complete."""

    def on_step_end(self, trainer: Trainer, log: LogLine | None) -> None:
        """After a step; `trainer.step` counts it."""

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """After an evaluation."""

    def on_checkpoint(self, trainer: Trainer) -> CallbackState | None:
        """State to store in the checkpoint that is being taken."""
        return None

    def on_resume(self, trainer: Trainer, state: CallbackState) -> None:
        """State found in the checkpoint; only called when there was any."""

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        """After the last step."""

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """The run ends with this error."""
