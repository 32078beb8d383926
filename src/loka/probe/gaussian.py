"""Gaussian model of a site's rows: mean and covariance, accumulated online in one pass.

    mu_b = mean(X);  S_b = (X - mu_b)^T (X - mu_b);  n' = n + B;  d = mu_b - mu
    mu  <- mu + (B / n') d
    S   <- S + S_b + (n B / n') d d^T                       (Chan's merge of a batch of B rows)
    Sigma = S / (n' - 1)

The correction n B / n' d d^T is added as one more row, sqrt(n B / n') d, below the centered batch, so a batch costs one
product. Rows with a non-finite element are left out. Counts stay on the device, so updates do not synchronize.

Rows of up to `cap` channels have a full covariance, wider ones a sketch (`loka.probe.scatter`).

Only two moments are kept; `loka.probe.marginals` models tails.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from loka.probe.saving import load_tensors
from loka.probe.scatter import Factor, Scatter, SketchedScatter, WholeScatter

WIDTH_CAP = 4096


def draw_normal(shape: tuple[int, ...], generator: torch.Generator, device: torch.device) -> Tensor:
    """Draw from N(0, 1) on a device, float32, by a generator that may be on another one.

    A GPU draws by a generator of its own, seeded by the given one: drawing there and copying takes longer than the rest
    of an evaluation.
    """
    if generator.device.type != device.type:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device)


class Gaussian:
    """Mean and covariance of rows [*, width]."""

    def __init__(self, width: int, device: torch.device, *, cap: int = WIDTH_CAP, seed: int = 0) -> None:
        self.width = width
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(width, device=device)
        self.scatter: Scatter = (
            WholeScatter(width, device) if width <= cap else SketchedScatter(width, device, seed=seed)
        )
        self._factor: tuple[float, Factor] | None = None

    @staticmethod
    def bytes_for(width: int, cap: int = WIDTH_CAP) -> int:
        """Return the memory it takes, in bytes."""
        return (WholeScatter if width <= cap else SketchedScatter).bytes_for(width) + 4 * width

    @property
    def kind(self) -> str:
        """How the covariance is stored."""
        return self.scatter.kind if self.scatter.kind == "full" else f"{self.scatter.kind}, width {self.width}"

    @torch.no_grad()
    def update(self, rows: Tensor, usable: Tensor | None = None) -> None:
        """Add rows [R, width]. `usable` [R] is 0 for rows to leave out; if it is given, all elements must be finite."""
        if rows.shape[0] == 0:
            return
        rows = rows.float()
        if usable is None:
            usable = rows.isfinite().all(1).float()
            rows = torch.where(usable[:, None] > 0, rows, 0.0)
        size = usable.sum()
        mean = (usable @ rows) / size.clamp(min=1)
        self._absorb(size.double(), mean, (rows - mean).mul_(usable[:, None]))

    def _absorb(self, size: Tensor, mean: Tensor, centred: Tensor | None) -> None:
        """Merge a batch, given by its size, mean and centered rows, with Chan's formula."""
        # float64 scalars: they do not promote the float32 rows
        share = size / (self.count + size).clamp_(min=1)
        difference = mean - self.mean
        self.scatter.add((difference * (self.count * share).sqrt())[None], centred)
        self.mean += difference * share
        self.count += size
        self._factor = None

    @torch.no_grad()
    def merge(self, other: "Gaussian") -> None:
        """Add the rows of another Gaussian of the same width."""
        if other.width != self.width or other.scatter.kind != self.scatter.kind:
            raise ValueError(
                f"Gaussians of width {self.width} ({self.kind}) and {other.width} ({other.kind}) do not merge"
            )
        device = self.mean.device
        for name, mine in self.scatter.tensors().items():
            mine += other.scatter.tensors()[name].to(device)
        self._absorb(other.count.to(device), other.mean.to(device), None)

    def covariance(self) -> Tensor:
        """Return Sigma [width, width]; for a sketch, the covariance of its samples."""
        count = float(self.count)
        if isinstance(self.scatter, WholeScatter):
            return self.scatter.matrix / max(count - 1, 1)
        factor = self._get_factor()
        root = factor.apply(torch.eye(factor.noise, device=self.mean.device))
        return root.T @ root

    def deviation(self) -> Tensor:
        """Return the standard deviation of every channel of the samples."""
        return self._get_factor().deviation()

    def _get_factor(self) -> Factor:
        count = float(self.count)
        if count < 1:
            raise ValueError("nothing to sample from: no finite row was seen")
        if self._factor is None or self._factor[0] != count:
            self._factor = (count, self.scatter.factor(count))
        return self._factor[1]

    @torch.no_grad()
    def normals(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw rows with this covariance and mean zero, float32 [count, width]."""
        factor = self._get_factor()
        return factor.apply(draw_normal((count, factor.noise), generator, self.mean.device))

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw rows mu + L z, float32 [count, width]."""
        return self.mean + self.normals(count, generator)

    def release(self) -> None:
        """Free the cached factor of the covariance. It is recomputed on demand."""
        self._factor = None

    def _tensors(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, **self.scatter.tensors()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        return {name: value.detach().cpu().clone() for name, value in self._tensors().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        load_tensors("Gaussian", self._tensors(), state)
        self._factor = None
