"""Online statistics of one operand: what a format needs to know about a tensor, in one pass, without storing it.

    count, mean, M2, M3, M4     central moments, merged batch by batch (Chan / Pebay), in float64
    absmax, zeros, non-finite   per tensor; absmax also per channel (the last dimension), to find outlier channels
    histogram of log2 |x|       in eighths of an octave; it predicts saturation and underflow for any format, and gives the
                                quantiles of |x| to within 2^(1/8), about 9 %

    n = n_a + n_b;  d = mean_b - mean_a
    mean <- mean_a + d n_b / n
    M2   <- M2_a + M2_b + d^2 n_a n_b / n                                      (M3, M4 alike)

Everything stays on the tensor's device until `finish`, so that a sampled step does not wait for the GPU. Non-finite elements are
counted and left out of everything else.
"""

import torch
from torch import Tensor

from loka.records import Role, TensorStats

OUTLIER_FACTOR = 8.0  # a channel is an outlier when its absmax exceeds this many times the median channel's
_FINE = 8  # bins per octave
_LOWEST = -149  # log2 of the smallest float32
_OCTAVES = 128 - _LOWEST


class Statistics:
    """Accumulates over 2-D tensors [rows, channels] of one width. `merge` adds another rank's; `finish` gives the record."""

    def __init__(self, channels: int, device: torch.device) -> None:
        self.moments = torch.zeros(5, dtype=torch.float64, device=device)  # count, mean, M2, M3, M4
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # zeros, non-finite
        self.channel_absmax = torch.zeros(channels, dtype=torch.float32, device=device)
        self.bins = torch.zeros(_OCTAVES * _FINE, dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Add the elements of [rows, channels]."""
        if values.numel() == 0:
            return
        values = values.detach().float()
        finite = values.isfinite()
        kept = torch.where(finite, values, torch.zeros_like(values))
        self.moments = _merge_moments(self.moments, _moments_of(kept.double(), finite))
        self.counts += torch.stack([((values == 0) & finite).sum(), (~finite).sum()])
        magnitude = kept.abs()
        self.channel_absmax = torch.maximum(self.channel_absmax, magnitude.amax(dim=0))
        self._count_magnitudes(magnitude.reshape(-1))

    def _count_magnitudes(self, magnitude: Tensor) -> None:
        mantissa, exponent = torch.frexp(magnitude)  # magnitude = mantissa * 2^exponent, 0.5 <= mantissa < 1
        fine = ((mantissa.log2() + 1) * _FINE).floor().clamp(0, _FINE - 1).long()
        index = ((exponent.long() - 1 - _LOWEST) * _FINE + fine).clamp(0, self.bins.numel() - 1)
        self.bins.index_add_(0, index, (magnitude > 0).long())

    def merge(self, other: "Statistics") -> None:
        """Add what another Statistics of the same width has seen."""
        if other.channel_absmax.shape != self.channel_absmax.shape:
            raise ValueError(
                f"statistics of {self.channel_absmax.numel()} and {other.channel_absmax.numel()} channels do not merge"
            )
        self.moments = _merge_moments(self.moments, other.moments.to(self.moments.device))
        self.counts += other.counts.to(self.counts.device)
        self.channel_absmax = torch.maximum(self.channel_absmax, other.channel_absmax.to(self.channel_absmax.device))
        self.bins += other.bins.to(self.bins.device)

    def state_dict(self) -> dict[str, Tensor]:
        """Everything, as tensors."""
        return {name: getattr(self, name).detach().cpu() for name in ("moments", "counts", "channel_absmax", "bins")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""
        for name, value in state.items():
            mine = getattr(self, name)
            if mine.shape != value.shape:
                raise ValueError(f"statistics: {name} is {tuple(value.shape)}, expected {tuple(mine.shape)}")
            setattr(self, name, value.to(mine.device))

    def finish(self, role: Role) -> TensorStats | None:
        """The record; None when nothing was seen."""
        zeros, non_finite = self.counts.tolist()
        count, mean, m2, _, m4 = self.moments.tolist()
        if count + non_finite == 0:
            return None
        bins = self.bins.cpu()
        octaves = bins.reshape(_OCTAVES, _FINE).sum(1)
        used = octaves.nonzero().reshape(-1)
        first, last = (int(used[0]), int(used[-1])) if used.numel() else (0, -1)
        return TensorStats(
            role=role,
            elements=int(count) + non_finite,
            non_finite=non_finite,
            mean=mean,
            std=(m2 / count) ** 0.5 if count else 0.0,
            absmax=float(self.channel_absmax.max()),
            abs_p99=_quantile(bins, zeros, 0.99),
            abs_p999=_quantile(bins, zeros, 0.999),
            kurtosis=count * m4 / m2**2 - 3 if m2 > 0 else 0.0,
            zero_fraction=zeros / count if count else 0.0,
            outlier_channels=_count_outliers(self.channel_absmax),
            histogram_first=first + _LOWEST if used.numel() else 0,
            histogram=octaves[first : last + 1].tolist(),
        )


def _moments_of(kept: Tensor, finite: Tensor) -> Tensor:
    """Count, mean and central moments of the finite elements; `kept` is zero elsewhere."""
    count = finite.sum().double()
    mean = kept.sum() / count.clamp(min=1)
    centred = torch.where(finite, kept - mean, torch.zeros_like(kept))
    square = centred.square()
    return torch.stack([count, mean, square.sum(), (square * centred).sum(), square.square().sum()])


def _merge_moments(first: Tensor, second: Tensor) -> Tensor:
    na, mean_a, m2a, m3a, m4a = first.unbind()
    nb, mean_b, m2b, m3b, m4b = second.unbind()
    n = (na + nb).clamp(min=1)
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
    return torch.stack([na + nb, mean_a + d * nb / n, m2, m3, m4])


def _quantile(bins: Tensor, zeros: int, level: float) -> float:
    """The magnitude below which a share `level` of the elements lies: the geometric middle of its bin."""
    total = int(bins.sum()) + zeros
    rank = level * total - zeros
    if total == 0 or rank <= 0:
        return 0.0
    index = int(torch.searchsorted(bins.cumsum(0).double(), torch.tensor(rank, dtype=torch.float64)))
    return float(2.0 ** (_LOWEST + (min(index, bins.numel() - 1) + 0.5) / _FINE))


def _count_outliers(channel_absmax: Tensor) -> int:
    alive = channel_absmax[channel_absmax > 0]
    return int((alive > OUTLIER_FACTOR * alive.median()).sum()) if alive.numel() else 0
