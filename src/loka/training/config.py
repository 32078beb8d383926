"""What a training run is asked to do: one frozen, validated record.

Everything that changes the numbers of a run is here and is written into every checkpoint, so a run can be read
back, repeated, and refused when somebody resumes it with different settings. Where the data come from, which model
is trained and what watches it are arguments of the Trainer: they are code, not settings.
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

# Settings that watch or store a run without changing its weights: a resumed run may choose them anew.
FREE_ON_RESUME = frozenset({"log_every", "checkpoint_every", "keep"})


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one run; `0` switches a periodic action off, `None` an optional limit.

    One optimiser step consumes `accumulate` batches of `batch_size` examples per rank. Learning rates are the peak
    values; the schedule multiplies both by the same factor (`loka.training.config`).
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
        """Plain values, ready for a JSON file."""
        return {**asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The inverse of `to_json`; an unknown or missing name raises."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown training settings {unknown}; known: {sorted(known)}")
        return cls(**{**values, "betas": tuple(values.get("betas", cls.betas))})

    def changes_since(self, stored: TrainConfig) -> list[str]:
        """Settings that differ from a stored run in a way that would make resuming it a different run.

        More or fewer `steps` are fine under a constant schedule; a decaying one spreads its curve over them.
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
    """The multiplier of every learning rate for the update that turns step `step` into `step + 1`: a pure function, since a schedule without state cannot be restored wrongly.

    With w warm-up steps, T steps in all, f the final fraction and t = (s - w) / (T - w):

        s < w:      (s + 1) / w            linear:     1 - (1 - f) t
        constant:   1                      cosine:     f + (1 - f) (1 + cos(pi t)) / 2
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.final_fraction + (1 - config.final_fraction) * shape
