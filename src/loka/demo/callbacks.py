"""How the demo watches its training stations."""

from collections.abc import Callable
from typing import Any

from loka.training import Callback, Trainer

Talk = Callable[[str, int, int | None], None]
"""talk(station, done, total); total is None where it is unknown"""


class StepTalk(Callback):
    """Tells how far a training station is."""

    def __init__(self, station: str, talk: Talk) -> None:
        self._station, self._talk = station, talk

    def on_step_end(self, trainer: Trainer, log: Any) -> None:
        """One step done."""
        self._talk(self._station, trainer.step, trainer.config.steps)
