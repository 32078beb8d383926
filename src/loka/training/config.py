"""The settings of a training run: one frozen, validated record.

Everything that changes the numbers of a run is here and is written into every checkpoint, so a run can be read back and
repeated, and is refused if it is resumed with other settings. The data, the model and the callbacks are arguments of
the Trainer: they are code, not settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

PrecisionName = Literal["fp32", "tf32", "bf16"]
CompileRequest = Literal["off", "on", "auto"]
ScheduleName = Literal["constant", "linear", "cosine"]
Direction = Literal["auto", "min", "max"]

# Settings that observe or store a run without changing its weights: a resumed run may change them.
FREE_ON_RESUME = frozenset({"log_every", "checkpoint_every", "keep"})


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run. A period of 0, or a limit of None, means off.

    One optimizer step consumes `accumulate` batches of `batch_size` examples per rank. Learning rates are peak values;
    the schedule multiplies both by `learning_rate_factor`.

    Args:
        steps, batch_size, accumulate, seed: length of the run, examples per batch, batches per step, random seed.
        device, precision, compile: "auto" is the GPU if there is one; see `loka.training.precision` and `.compilation`.
        learning_rate, weight_decay, betas, clip_norm: of AdamW, for dense parameters; the norm to clip gradients to.
        embedding_learning_rate: of rowwise Adagrad, for embedding tables.
        schedule, warmup_steps, final_fraction: see `learning_rate_factor`.
        evaluate_every, evaluate_batch_size: steps between evaluations; None uses `batch_size`.
        monitor, monitor_direction, patience: the metric that defines the best evaluation, whether "min" or "max" is
            better, and how many evaluations without improvement end the run.
        log_every, checkpoint_every, keep: steps between log lines and checkpoints, and how many checkpoints to keep.
        max_bad_batches: batches with a loss that is not finite to skip before the run fails.

    Example:
        >>> TrainConfig(steps=1000, precision="bf16", schedule="cosine", warmup_steps=100)
    """

    steps: int = 1000
    batch_size: int = 1024
    accumulate: int = 1
    seed: int = 0
    device: str = "auto"
    precision: PrecisionName = "fp32"
    compile: CompileRequest = "off"

    learning_rate: float = 1e-3
    embedding_learning_rate: float = 2e-2
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    clip_norm: float | None = None
    schedule: ScheduleName = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0

    evaluate_every: int = 0
    evaluate_batch_size: int | None = None
    monitor: str = "ne"
    monitor_direction: Direction = "auto"
    patience: int | None = None

    log_every: int = 50
    checkpoint_every: int = 0
    keep: int = 2
    max_bad_batches: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("learning_rate", "embedding_learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive or None (off), got {self.clip_norm}")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction must be in [0, 1], got {self.final_fraction}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        if self.patience is not None and self.evaluate_every == 0:
            raise ValueError("patience needs evaluations to count: set evaluate_every above 0")

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return {**asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build settings from the result of `to_json`. An unknown name raises."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown training settings {unknown}; known: {sorted(known)}")
        return cls(**{**values, "betas": tuple(values.get("betas", cls.betas))})

    def changes_since(self, stored: TrainConfig) -> list[str]:
        """List settings that differ from a stored run and would make resuming it a different run.

        More or fewer `steps` are allowed under a constant schedule; other schedules depend on them.
        """
        free = FREE_ON_RESUME | ({"steps"} if self.schedule == "constant" else frozenset())
        return [
            f"{field.name}: {getattr(stored, field.name)!r} -> {getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name not in free and getattr(stored, field.name) != getattr(self, field.name)
        ]


_LEAST = {
    "steps": 1, "batch_size": 1, "accumulate": 1, "seed": 0, "warmup_steps": 0, "weight_decay": 0,
    "evaluate_every": 0, "evaluate_batch_size": 1, "patience": 1, "log_every": 1, "checkpoint_every": 0,
    "keep": 1, "max_bad_batches": 0,
}  # fmt: skip
_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": get_args(PrecisionName),
    "compile": get_args(CompileRequest),
    "schedule": get_args(ScheduleName),
    "monitor_direction": get_args(Direction),
}


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """Return the multiplier of every learning rate for the update that turns step `step` into `step + 1`.

    It is a pure function: a schedule without state cannot be restored wrongly. With s the step, w warm-up steps,
    T steps in total, f the final fraction and t = (s - w) / (T - w):

        s < w:      (s + 1) / w            linear:     1 - (1 - f) t
        constant:   1                      cosine:     f + (1 - f) (1 + cos(pi t)) / 2

    Args:
        config: settings of the run.
        step: steps completed.

    Returns:
        The factor, from 0 to 1.

    Example:
        >>> learning_rate_factor(TrainConfig(steps=100, warmup_steps=10), 4)
        0.5
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.final_fraction + (1 - config.final_fraction) * shape
