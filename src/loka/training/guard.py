"""The guard inside the Trainer: sites that go wrong in FP8 go back to bf16 between steps, and remembered scales survive a restart.

    loka.convert(model, plan)
    Trainer(model, data, config, callbacks=[GuardCallback(GuardConfig(every=100))]).fit()

Scales that are remembered between steps, and what the guard did, live in the callback's own section of a checkpoint; the model's section stays a plain state_dict. A run that is
resumed starts with the sites switched, or bound to something else, that had been.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loka.lowp.guard import Decide, Guard, GuardConfig, GuardEvent
from loka.placing import load_scale_state, scale_state
from loka.training.callbacks import Callback, CallbackState, LogLine

if TYPE_CHECKING:
    from loka.training.trainer import Trainer


class GuardCallback(Callback):
    """Runs a Guard over a training; `events` is what happened so far."""

    every_rank = True  # all ranks count, and all must switch

    def __init__(self, config: GuardConfig | None = None, *, decide: Decide | None = None) -> None:
        self.config, self.decide = config or GuardConfig(), decide
        self.guard: Guard | None = None
        self.events: list[GuardEvent] = []

    def on_start(self, trainer: Trainer) -> None:
        """Attach to the converted linears."""
        self._attach(trainer)

    def on_step_begin(self, trainer: Trainer) -> None:
        """Look, where it is due."""
        self._attach(trainer).begin_step()

    def on_step_end(self, trainer: Trainer, log: LogLine | None) -> None:
        """Between steps: the safe point."""
        self.events += self._attach(trainer).check()

    def on_checkpoint(self, trainer: Trainer) -> CallbackState | None:
        """Scales and switches."""
        return CallbackState(scale_state(trainer.module), self._attach(trainer).state_dict())

    def on_resume(self, trainer: Trainer, state: CallbackState) -> None:
        """The counterpart; first the bindings, because the scales are those of what ran."""
        self._attach(trainer).load_state_dict(state.values)
        load_scale_state(trainer.module, state.tensors)

    def _attach(self, trainer: Trainer) -> Guard:
        if self.guard is None:
            self.guard = Guard(trainer.module, self.config, decide=self.decide)
        return self.guard
