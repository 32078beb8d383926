"""Guard as a Trainer callback: it reverts sites that go wrong in FP8 to bf16, between steps.

    loka.convert(model, plan)
    Trainer(model, data, config, callbacks=[GuardCallback(GuardConfig(every=100))]).fit()

The callback's state in a checkpoint holds the delayed scales and what the guard did; the model's section stays a plain
state_dict. A resumed run starts with the same sites reverted or rebound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loka.lowp.guard import Decide, Guard, GuardConfig, GuardEvent
from loka.placing import load_scale_state, scale_state
from loka.training.callbacks import Callback, CallbackState, LogLine

if TYPE_CHECKING:
    from loka.training.trainer import Trainer


class GuardCallback(Callback):
    """Runs a Guard during training; `events` lists what happened so far."""

    every_rank = True  # every rank contributes to the counts, and all must switch together

    def __init__(self, config: GuardConfig | None = None, *, decide: Decide | None = None) -> None:
        self.config, self.decide = config or GuardConfig(), decide
        self.guard: Guard | None = None
        self.events: list[GuardEvent] = []

    def on_start(self, trainer: Trainer) -> None:
        """Attach to the converted linears."""
        self._attach(trainer)

    def on_step_begin(self, trainer: Trainer) -> None:
        """Let the guard observe the step if it is due."""
        self._attach(trainer).begin_step()

    def on_step_end(self, trainer: Trainer, log: LogLine | None) -> None:
        """Check between steps, where it is safe to switch sites."""
        self.events += self._attach(trainer).check()

    def on_checkpoint(self, trainer: Trainer) -> CallbackState | None:
        """Return scales and switched sites."""
        return CallbackState(scale_state(trainer.module), self._attach(trainer).state_dict())

    def on_resume(self, trainer: Trainer, state: CallbackState) -> None:
        """Restore them. Bindings come first, since the scales belong to what was running."""
        self._attach(trainer).load_state_dict(state.values)
        load_scale_state(trainer.module, state.tensors)

    def _attach(self, trainer: Trainer) -> Guard:
        if self.guard is None:
            self.guard = Guard(trainer.module, self.config, decide=self.decide)
        return self.guard
