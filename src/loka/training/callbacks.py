"""Callbacks: the interface for everything that observes or steers a run.

A callback overrides the hooks it needs:

    on_start        before the first step (after a resume: `trainer.step` > 0)
    on_step_begin   before a step's batches are drawn
    on_step_end     after the update; `log` is a LogLine on log steps, otherwise None (no device synchronization)
    on_evaluate     after an evaluation, with its metrics
    on_checkpoint   while a checkpoint is taken: return the state to restore after a crash, or None
    on_resume       the counterpart: gets what `on_checkpoint` returned
    on_end          after the last step, with the result
    on_error        instead of on_end if the run fails or is interrupted; the error is raised afterwards

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
    """Values at a log step. Means are over the steps since the last one."""

    step: int
    loss: float
    ne: float | None
    learning_rate: float
    examples: int
    examples_per_s: float
    seconds: float


@dataclass(frozen=True)
class CallbackState:
    """State of a callback in a checkpoint.

    Args:
        tensors: named tensors.
        values: JSON values.

    Example:
        >>> CallbackState(values={"lines": 3})
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


class Callback:
    """Base class whose hooks are all no-ops. `name` is the key of the callback's state in a checkpoint.

    Example:
        >>> class Stop(Callback):
        ...     def on_step_end(self, trainer, log): ...
    """

    every_rank = False

    @property
    def name(self) -> str:
        """Name of the callback, unique in a run."""
        return type(self).__name__

    def on_start(self, trainer: Trainer) -> None:
        """Called before the first step."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Called before a step; `trainer.step` steps are complete."""

    def on_step_end(self, trainer: Trainer, log: LogLine | None) -> None:
        """Called after a step, which `trainer.step` includes."""

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation."""

    def on_checkpoint(self, trainer: Trainer) -> CallbackState | None:
        """Return the state to store in the checkpoint that is being taken."""
        return None

    def on_resume(self, trainer: Trainer, state: CallbackState) -> None:
        """Restore the state found in the checkpoint; not called if there was none."""

    def on_end(self, trainer: Trainer, result: TrainResult) -> None:
        """Called after the last step."""

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        """Called if the run ends with an error."""
