"""Learning-rate factor as a pure function of the step.

A schedule without state cannot be restored wrongly: the factor of step s is computed from the configuration alone.
With w warm-up steps, T steps in all, f the final fraction and t = (s - w) / (T - w):

    s < w:      (s + 1) / w
    constant:   1
    linear:     1 - (1 - f) t
    cosine:     f + (1 - f) (1 + cos(pi t)) / 2
"""

import math

from loka.training.config import TrainConfig


def learning_rate_factor(config: TrainConfig, step: int) -> float:
    """The multiplier of every learning rate for the update that turns step `step` into `step + 1`."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    shape = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.final_fraction + (1 - config.final_fraction) * shape
