"""Progress of the demo's training stations."""

from typing import Any

from loka.data.progress import Progress
from loka.training import Callback, Trainer


class StepTalk(Callback):
    """Reports how far a training station is."""

    def __init__(self, station: str, talk: Progress) -> None:
        self._station, self._talk = station, talk

    def on_step_end(self, trainer: Trainer, log: Any) -> None:
        """Report one more step."""
        self._talk(self._station, trainer.step, trainer.config.steps)
