"""How a run ends: with a result, or with a loss that is not finite."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka.training.compilation import CompileChoice


class NonFiniteLossError(ValueError):
    """The loss (or a weight) became NaN or infinite."""


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run.

    Args:
        steps, examples: how many were trained.
        seconds, examples_per_s: time and speed of training, without evaluations and checkpoints.
        loss, metrics: of the last log line, and of the last evaluation.
        best: step, metric and value of the best evaluation.
        stopped_early: whether `patience` ran out.
        bad_batches: batches skipped because their loss was not finite.
        device, precision, compile: how it ran.
        resumed_from, damaged: step of the checkpoint it continued from, and newer ones that could not be read.
        checkpoint: the last checkpoint.

    Example:
        >>> Trainer(model, data, TrainConfig(steps=5, batch_size=64, evaluate_every=5)).fit().metrics["ne"]
    """

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
