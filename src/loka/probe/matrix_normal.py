"""The matrix normal of a weight: W ~ MN(M, U, V), rows correlated by U, columns by V, learned from snapshots of W.

    L_V L_V^T = V + eps I;  U_new = (1/K) (Wc L_V^-T)(Wc L_V^-T)^T
    L_U L_U^T = U + eps I;  V_new = (1/N) (L_U^-1 Wc)^T (L_U^-1 Wc)              flip-flop, for W [N, K]
    U <- m U + (1 - m) U_new (V alike);   U <- U N / tr(U)
    V scaled so that tr(V) / K is the mean square of Wc, averaged alike

M is a running mean of the snapshots that turns into an exponential one: the t-th snapshot has weight 1 / t, but at
least 1 - m. Wc is the deviation of a snapshot from the mean so far. For the first snapshot M is just its grand mean,
and U and V describe the spread of W itself. One matrix cannot determine two covariances, so U and V are shrunk towards
their diagonals before solving and sampling, by `loka.probe.scatter.shrink` with K t (for U) and N t (for V) rows.
Always evaluate the actual W as well. V is not simply rescaled by tr(U) / N: after few snapshots that makes samples a
quarter too small, because solving with a U fitted to the same W explains away part of V.

Sides wider than the cap keep only diagonal blocks. A weight too large to store M keeps its row and column means. `kind`
says so.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from loka.probe.gaussian import draw_normal
from loka.probe.saving import load_tensors
from loka.probe.scatter import BLOCK, cholesky, shrink

SIDE_CAP = 2048
MOMENTUM = 0.9
FIRST_SWEEPS = 3  # the first snapshot starts from the identity and needs a few flip-flops to converge


class Side:
    """U or V: a covariance stored as diagonal blocks; a single block if the width is within the cap."""

    def __init__(self, width: int, device: torch.device, cap: int) -> None:
        self.width, self.block = width, width if width <= cap else BLOCK
        self.count = -(-width // self.block)
        self.blocks = torch.eye(self.block, device=device).repeat(self.count, 1, 1)
        if self.padding:
            self.blocks[-1, self.block - self.padding :] = 0
        self._root: tuple[float, Tensor] | None = None

    @property
    def padding(self) -> int:
        """Number of channels by which the last block exceeds the width."""
        return self.count * self.block - self.width

    def split(self, columns: Tensor) -> Tensor:
        """Split [rows, width] into [count, rows, block]."""
        padded = torch.nn.functional.pad(columns, (0, self.padding))
        return padded.view(columns.shape[0], self.count, self.block).transpose(0, 1)

    def join(self, parts: Tensor) -> Tensor:
        """Undo `split`."""
        return parts.transpose(0, 1).reshape(parts.shape[1], -1)[:, : self.width]

    def root(self, samples: float) -> Tensor:
        """Return the Cholesky factors of the shrunk blocks, cached until the blocks change."""
        if self._root is None or self._root[0] != samples:
            self._root = (samples, self._factor(samples))
        return self._root[1]

    def learn(self, measured: Tensor, fresh: float) -> None:
        """Move the blocks towards `measured` by the fraction `fresh`."""
        self.blocks.lerp_(measured, fresh)
        self._root = None

    def scale(self, factor: Tensor | float) -> None:
        """Multiply the blocks by a factor."""
        self.blocks *= factor
        self._root = None

    def release(self) -> None:
        """Free the cached factors."""
        self._root = None

    def _factor(self, samples: float) -> Tensor:
        shrunk = shrink(self.blocks.double(), samples)
        if self.padding:  # a one on the diagonal of padding channels keeps the block invertible
            shrunk[-1].diagonal()[self.block - self.padding :] = 1
        return cholesky(shrunk).float()

    def whiten(self, columns: Tensor, root: Tensor) -> Tensor:
        """Return columns L^-T, block by block."""
        parts = self.split(columns).transpose(1, 2)
        return self.join(torch.linalg.solve_triangular(root, parts, upper=False).transpose(1, 2))

    def colour(self, columns: Tensor, root: Tensor) -> Tensor:
        """Return columns L^T, block by block."""
        return self.join(self.split(columns) @ root.transpose(1, 2))

    def measure(self, columns: Tensor) -> Tensor:
        """Return the diagonal blocks of the second moment of [rows, width]."""
        parts = self.split(columns)
        return parts.transpose(1, 2) @ parts / columns.shape[0]

    def mean_variance(self) -> Tensor:
        """Return trace / width."""
        return self.blocks.diagonal(dim1=1, dim2=2).sum() / self.width


class MatrixNormal:
    """The matrix normal (M, U, V) of weights [n, k]."""

    def __init__(
        self,
        n: int,
        k: int,
        device: torch.device,
        *,
        cap: int = SIDE_CAP,
        momentum: float = MOMENTUM,
        whole_mean: bool = True,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum}: expected 0 <= momentum < 1, the weight of the past")
        self.n, self.k, self._momentum = n, k, momentum
        self.u, self.v = Side(n, device, cap), Side(k, device, cap)
        self.snapshots = 0
        self._mean = torch.zeros((n, k) if whole_mean else (n + k,), device=device)

    @staticmethod
    def bytes_for(n: int, k: int, *, cap: int = SIDE_CAP, whole_mean: bool = True) -> int:
        """Return the memory it takes, in bytes."""
        sides = sum(width * width if width <= cap else -(-width // BLOCK) * BLOCK * BLOCK for width in (n, k))
        return 4 * (sides + (n * k if whole_mean else n + k))

    @property
    def kind(self) -> str:
        """How M, U and V are stored."""
        parts = [
            f"{name} block-diagonal ({side.block})" for name, side in (("U", self.u), ("V", self.v)) if side.count > 1
        ]
        if self._mean.dim() == 1:
            parts.append("M from row and column means")
        return ", ".join(parts) or "full"

    @property
    def mean(self) -> Tensor:
        """M [n, k]."""
        if self._mean.dim() == 2:
            return self._mean
        rows, columns = self._mean[: self.n], self._mean[self.n :]
        return rows[:, None] + columns - rows.mean()

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """Add a snapshot of W. A weight that is not finite is ignored."""
        weight = weight.detach().to(self._mean)
        if not bool(weight.isfinite().all()):
            return
        self.snapshots += 1
        fresh = max(1 / self.snapshots, 1 - self._momentum)
        if self.snapshots == 1:
            self._mean.fill_(weight.mean())
            for _ in range(FIRST_SWEEPS):
                self._flip_flop(weight - weight.mean(), 1.0)
            return
        # The mean lags behind, so deviations from it are too large; this factor corrects them.
        self._flip_flop((weight - self.mean) * (1 - fresh) ** 0.5, fresh)
        observed = weight if self._mean.dim() == 2 else torch.cat([weight.mean(1), weight.mean(0)])
        self._mean.lerp_(observed, fresh)

    def _flip_flop(self, centred: Tensor, fresh: float) -> None:
        if not bool(centred.any()):
            self.v.scale(1 - fresh if self.snapshots > 1 else 0.0)
            return
        seen = float(self.snapshots)
        energy = torch.lerp(self.v.mean_variance(), centred.square().mean(), fresh)
        if float(self.v.mean_variance()) > 0:
            whitened = self.v.whiten(centred, self.v.root(self.n * seen))
            self.u.learn(self.u.measure(whitened.T), fresh)
        whitened = self.u.whiten(centred.T, self.u.root(self.k * seen))
        self.v.learn(self.v.measure(whitened.T), fresh)
        self.u.scale(1 / self.u.mean_variance())
        self.v.scale(energy / self.v.mean_variance())

    @torch.no_grad()
    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw M + L_U Z L_V^T, float32 [n, k]."""
        if self.snapshots == 0:
            raise ValueError("nothing to sample from: no finite weight was seen")
        z = draw_normal((self.n, self.k), generator, self._mean.device)
        seen = float(self.snapshots)
        coloured = self.v.colour(z, self.v.root(self.n * seen))
        return self.mean + self.u.colour(coloured.T, self.u.root(self.k * seen)).T

    def release(self) -> None:
        """Free the cached factors of U and V. They are recomputed on demand."""
        self.u.release()
        self.v.release()

    def _tensors(self) -> dict[str, Tensor]:
        return {"mean": self._mean, "u": self.u.blocks, "v": self.v.blocks}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        state = {name: value.detach().cpu().clone() for name, value in self._tensors().items()}
        return {**state, "snapshots": torch.tensor(self.snapshots)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state_dict`."""
        load_tensors("matrix normal", self._tensors(), state)
        self.release()
        self.snapshots = int(state["snapshots"])
