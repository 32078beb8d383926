"""Progress of the demo's training stations."""

from collections.abc import Callable
from typing import Any

from loka.training import Callback, Trainer

Talk = Callable[[str, int, int | None], None]
"""talk(station, done, total) reports progress; total is None if unknown"""


class StepTalk(Callback):
    """Reports how far a training station is."""

    def __init__(self, station: str, talk: Talk) -> None:
        self._station, self._talk = station, talk

    def on_step_end(self, trainer: Trainer, log: Any) -> None:
        """Report one more step."""
        self._talk(self._station, trainer.step, trainer.config.steps)
