"""How the demo watches its training stations."""

from collections.abc import Callable
from typing import Any

from loka.probe import Probe
from loka.training import Callback, CallbackState, Trainer

Talk = Callable[[str, int, int | None], None]
"""talk(station, done, total); total is None where it is unknown"""


class ProbeCallback(Callback):
    """Keeps a Probe in step with a Trainer, compiled models and checkpoints included."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    @property
    def name(self) -> str:
        """Key of the probe's part of a checkpoint."""
        return "probe"

    def wants_eager(self, step: int) -> bool:
        """Hooks fire in eager steps only."""
        return self.probe.sampling

    def on_step_end(self, trainer: Trainer, log: Any) -> None:
        """Count the step."""
        self.probe.step()

    def on_checkpoint(self, trainer: Trainer) -> CallbackState:
        """What was seen so far."""
        return CallbackState(tensors=self.probe.state_dict())

    def on_resume(self, trainer: Trainer, state: CallbackState) -> None:
        """Continue from it."""
        self.probe.load_state_dict(state.tensors)


class StepTalk(Callback):
    """Tells how far a training station is."""

    def __init__(self, station: str, talk: Talk) -> None:
        self._station, self._talk = station, talk

    def on_step_end(self, trainer: Trainer, log: Any) -> None:
        """One step done."""
        self._talk(self._station, trainer.step, trainer.config.steps)
