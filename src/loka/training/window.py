"""The losses since the last log line, read from the device all at once.

Reading a value from a GPU waits for everything queued before it. So the loop keeps each step's loss on the device, and
reads a whole window at once: the mean for the log, and the first loss that was not finite. On a GPU a bad loss is
therefore noticed at the next log line, evaluation or checkpoint, but always before anything is saved.

The training NE of a window is its mean loss over the entropy of the window's own label rates (mean over labels). It is
a rough value for the progress bar; the NE of an evaluation is exact.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Window:
    """Losses by (step, batch), and label counts."""

    examples: int = 0
    _pending: list[tuple[int, int, Tensor]] = field(default_factory=list)
    _losses: list[float] = field(default_factory=list)
    _positives: Tensor | None = None
    _labelled: int = 0

    def add(self, step: int, batch: int, loss: Tensor, size: int, labels: Tensor | None) -> None:
        """Record one batch, without waiting for the device."""
        self._pending.append((step, batch, loss.detach()))
        self.examples += size
        if labels is not None:
            sums = labels.detach().float().sum(dim=0)
            self._positives = sums if self._positives is None else self._positives + sums
            self._labelled += size

    def find_bad(self) -> tuple[int, int] | None:
        """Return (step, batch) of the first loss that is not finite; waits for the device."""
        pending, self._pending = self._pending, []
        if not pending:
            return None
        values = torch.stack([loss.float() for _, _, loss in pending]).tolist()
        self._losses.extend(values)
        bad = (where[:2] for where, value in zip(pending, values, strict=True) if not math.isfinite(value))
        return next(bad, None)

    def loss(self) -> float:
        """Return the mean loss of the window; call `find_bad` first."""
        return math.fsum(self._losses) / len(self._losses) if self._losses else math.nan

    def ne(self) -> float | None:
        """Return the training NE of the window, or None if labels are unknown or all equal."""
        if self._positives is None:
            return None
        rates = (self._positives / self._labelled).reshape(-1).tolist()
        if not all(0 < rate < 1 for rate in rates):
            return None
        entropy = math.fsum(-rate * math.log(rate) - (1 - rate) * math.log1p(-rate) for rate in rates) / len(rates)
        return self.loss() / entropy
