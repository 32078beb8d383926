"""How a run ends: with a result, or with a loss that is no number."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka.training.compilation import CompileChoice


class NonFiniteLossError(ValueError):
    """The loss (or a weight) became NaN or infinite."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. `seconds` is training time alone, without evaluations and checkpoints."""

    steps: int
    examples: int
    seconds: float
    examples_per_s: float
    loss: float
    metrics: dict[str, float]
    best: dict[str, Any] | None
    stopped_early: bool
    bad_batches: int
    device: str
    precision: str
    compile: CompileChoice
    resumed_from: int | None
    damaged: tuple[str, ...]
    checkpoint: Path | None
