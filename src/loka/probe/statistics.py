"""Online statistics of one operand that determine how a format represents it, without storing the tensor.

    count, mean, M2, M3, M4     central moments of each look, merged by Chan / Pebay in float64
    absmax, zeros, non-finite   per tensor; absmax also per channel (the last dimension), to find outlier channels
    histogram of |x|            in eighths of an octave; predicts saturation and underflow for any format, and gives the
                                quantiles of |x| to within an eighth of an octave

    n = n_a + n_b;  d = mean_b - mean_a
    mean <- mean_a + d n_b / n
    M2   <- M2_a + M2_b + d^2 n_a n_b / n                                      (M3, M4 alike)

The upper bits of a float32 are its exponent and leading mantissa bits, so the bin of |x| is its bits shifted right by
20, without a logarithm. The eight bins of an octave have equal width in x. Non-zero values below 2^-126 are counted in
the octave 2^-127, and below 2^-129 as zero, which they are in any narrower format. Non-finite elements have bins of
their own and are excluded from everything else.

Each look leaves seven numbers on the tensor's device without synchronization. They are copied to the host and merged on
demand, or every 256 looks, so a sampled step never waits for the GPU. Looks are kept in order for `loka.probe.drift`.
On a GPU the cost is dominated by kernel launches, so a look uses as few as possible: thirteen over the rows.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from loka.probe.saving import load_tensors
from loka.records import Role, TensorStats

OUTLIER_FACTOR = 8.0  # a channel is an outlier when its absmax exceeds this many times the median channel's
FINE = 8  # bins per octave
LOWEST = -127  # log2 of the first octave's lower end; the last one ends at 2^128
OCTAVES = 255
_BINS = OCTAVES * FINE
_ALL_BINS = _BINS + FINE  # the last eight hold non-finite elements
COLUMNS = ("count", "mean", "m2", "m3", "m4", "zeros", "non_finite", "absmax", "step")
MAX_PENDING = 256


class Statistics:
    """Accumulates statistics of 2-D tensors [rows, channels] of one width. `finish` returns the record."""

    def __init__(self, channels: int, device: torch.device) -> None:
        self.channel_absmax = torch.zeros(channels, dtype=torch.float32, device=device)
        self.raw_bins = torch.zeros(_ALL_BINS, dtype=torch.int64, device=device)  # zeros are in the first bin
        self._merged = torch.zeros(len(COLUMNS) - 1, dtype=torch.float64)  # totals of all settled looks
        self._pending: list[tuple[int, int, Tensor]] = []  # step, elements, result of `_summarise`
        self._settled: list[Tensor] = []

    @torch.no_grad()
    def update(self, values: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        """Add the elements of [rows, channels] observed at a step.

        Returns the elements in float32 with non-finite ones set to zero, and a vector that is 1 for rows that had none,
        else 0.
        """
        values = values.detach().float().contiguous()
        bits = values.view(torch.int32) & 0x7FFFFFFF
        finite = bits < 0x7F800000
        clean = torch.where(finite, values, 0.0)
        usable = finite.all(1).float()
        if values.numel() == 0:
            return clean, usable
        peaks = torch.linalg.vector_norm(clean, torch.inf, dim=0)
        self.channel_absmax = torch.maximum(self.channel_absmax, peaks)
        bins = _count_bins(bits)
        self.raw_bins += bins
        self._pending.append((step, clean.numel(), _summarise(clean, bins, peaks)))
        if len(self._pending) >= MAX_PENDING:
            self._settle()
        return clean, usable

    def _settle(self) -> None:
        if not self._pending:
            return
        steps, elements = torch.tensor([p[:2] for p in self._pending], dtype=torch.float64).unbind(1)
        fresh = _finish_moments(elements, torch.stack([look for *_, look in self._pending]).cpu().double())
        self._pending = []
        self._settled.append(torch.cat([fresh, steps[:, None]], 1))
        for look in fresh:
            self._merged = _merge_moments(self._merged, look)

    @property
    def count(self) -> int:
        """Number of looks so far; does not synchronize with the device."""
        return len(self._pending) + sum(len(part) for part in self._settled)

    @property
    def looks(self) -> Tensor:
        """One row per look in step order, float64 [looks, 9] on the CPU; see COLUMNS."""
        self._settle()
        self._settled = [torch.cat(self._settled)] if self._settled else []
        return self._settled[0] if self._settled else torch.zeros(0, len(COLUMNS), dtype=torch.float64)

    @property
    def moments(self) -> Tensor:
        """Count, mean, M2, M3, M4 over all looks, float64."""
        self._settle()
        return self._merged[:5]

    @property
    def bins(self) -> Tensor:
        """Counts of magnitudes, eight to an octave, on the CPU."""
        self._settle()
        bins = self.raw_bins[:_BINS].cpu().clone()
        bins[0] -= int(self._merged[5])
        return bins

    def merge(self, other: "Statistics") -> None:
        """Add another Statistics of the same width, for instance of another rank."""
        if other.channel_absmax.shape != self.channel_absmax.shape:
            raise ValueError(
                f"statistics of {self.channel_absmax.numel()} and {other.channel_absmax.numel()} channels do not merge"
            )
        looks = torch.cat([self.looks, other.looks])
        self._settled = [looks[looks[:, -1].argsort(stable=True)]]
        self._merged = _merge_moments(self._merged, other._merged)
        self.channel_absmax = torch.maximum(self.channel_absmax, other.channel_absmax.to(self.channel_absmax.device))
        self.raw_bins += other.raw_bins.to(self.raw_bins.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        return {
            "looks": self.looks.clone(),
            "merged": self._merged.clone(),
            "channel_absmax": self.channel_absmax.cpu().clone(),
            "raw_bins": self.raw_bins.cpu().clone(),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        load_tensors("statistics", {"channel_absmax": self.channel_absmax, "raw_bins": self.raw_bins}, state)
        self._pending, self._settled, self._merged = [], [state["looks"].clone()], state["merged"].clone()

    def finish(self, role: Role) -> TensorStats | None:
        """Return the record; None if nothing was observed."""
        bins = self.bins
        count, mean, m2, _, m4, zeros, non_finite, absmax = self._merged.tolist()
        if count + non_finite == 0:
            return None
        octaves = bins.reshape(OCTAVES, FINE).sum(1)
        used = octaves.nonzero().reshape(-1)
        first, last = (int(used[0]), int(used[-1])) if used.numel() else (0, -1)
        return TensorStats(
            role=role,
            elements=int(count + non_finite),
            non_finite=int(non_finite),
            mean=mean,
            std=(m2 / count) ** 0.5 if count else 0.0,
            absmax=absmax,
            abs_p99=min(quantile(bins, int(zeros), 0.99), absmax),  # the middle of the last bin may be above all values
            abs_p999=min(quantile(bins, int(zeros), 0.999), absmax),
            kurtosis=count * m4 / m2**2 - 3 if m2 > 0 else 0.0,
            zero_fraction=zeros / count if count else 0.0,
            outlier_channels=count_outliers(self.channel_absmax.cpu()),
            histogram_first=first + LOWEST if used.numel() else 0,
            histogram=octaves[first : last + 1].tolist(),
        )


def _count_bins(bits: Tensor) -> Tensor:
    """Count elements per bin. Not with bincount on a GPU, which synchronizes to find the largest index."""
    index = (bits >> 20).reshape(-1)
    if index.is_cuda:
        return torch.histc(index, _ALL_BINS, 0, _ALL_BINS).long()
    return torch.bincount(index, minlength=_ALL_BINS)


def _summarise(clean: Tensor, bins: Tensor, peaks: Tensor) -> Tensor:
    """Return non-finite count, zeros, absmax, mean, and sums of powers of clean - mean, of one look.

    Sums are in float64 on a CPU, and in float32 on a GPU, where they are tree reductions.
    """
    wide = clean if clean.is_cuda else clean.double()
    bad = bins[_BINS:].sum(dtype=wide.dtype)
    mean = wide.sum() / (clean.numel() - bad).clamp_(min=1)
    centred = (wide - mean).view(-1)
    square = centred * centred
    powers = [torch.dot(centred, centred), torch.dot(square, centred), torch.dot(square, square)]
    return torch.stack([bad, bins[0].to(wide.dtype), peaks.amax().to(wide.dtype), mean, *powers])


def _finish_moments(elements: Tensor, raw: Tensor) -> Tensor:
    """Return COLUMNS without the step. The part of non-finite elements, summed as zero minus the mean, is removed."""
    bad, zeros, absmax, mean, m2, m3, m4 = raw.unbind(1)
    m2, m3, m4 = m2 - bad * mean**2, m3 + bad * mean**3, m4 - bad * mean**4
    return torch.stack([elements - bad, mean, m2.clamp(min=0), m3, m4.clamp(min=0), zeros, bad, absmax], 1)


def _merge_moments(first: Tensor, second: Tensor) -> Tensor:
    na, mean_a, m2a, m3a, m4a, *_ = first.tolist()
    nb, mean_b, m2b, m3b, m4b, *_ = second.tolist()
    n = max(na + nb, 1.0)
    d = mean_b - mean_a
    m2 = m2a + m2b + d**2 * na * nb / n
    m3 = m3a + m3b + d**3 * na * nb * (na - nb) / n**2 + 3 * d * (na * m2b - nb * m2a) / n
    m4 = (
        m4a
        + m4b
        + d**4 * na * nb * (na**2 - na * nb + nb**2) / n**3
        + 6 * d**2 * (na**2 * m2b + nb**2 * m2a) / n**2
        + 4 * d * (na * m3b - nb * m3a) / n
    )
    counts = (first[5:7] + second[5:7]).tolist()
    absmax = max(float(first[7]), float(second[7]))
    return torch.tensor([na + nb, mean_a + d * nb / n, m2, m3, m4, *counts, absmax], dtype=torch.float64)


def quantile(bins: Tensor, zeros: int, level: float) -> float:
    """Return the magnitude below which a share `level` of the elements lies: the middle of its bin."""
    total = int(bins.sum()) + zeros
    rank = level * total - zeros
    if total == 0 or rank <= 0:
        return 0.0
    index = int(torch.searchsorted(bins.cumsum(0).double(), torch.tensor(rank, dtype=torch.float64)))
    octave, part = divmod(min(index, bins.numel() - 1), FINE)
    return float(2.0 ** (LOWEST + octave) * (1 + (part + 0.5) / FINE))


def count_outliers(channel_absmax: Tensor) -> int:
    """Count the channels whose absmax is far above the median of the non-zero channels."""
    alive = channel_absmax[channel_absmax > 0]
    return int((alive > OUTLIER_FACTOR * alive.median()).sum()) if alive.numel() else 0
