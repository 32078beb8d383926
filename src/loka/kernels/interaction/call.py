"""Calls of the interaction kernels, described without tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import QTensor


@dataclass(frozen=True)
class InteractionCall:
    """The sizes of a Wukong layer.

    Args:
        rows, n, d, dtype: x is [rows, n, d] in `dtype`: n vectors per example.
        k: mixtures that the input vectors are multiplied by.
        n_l, n_f: output vectors that are linear mixtures, and that come from the tower.
        project: the residual is W_r X, not X.

    Example:
        >>> call = InteractionCall(rows=8192, n=64, d=128, k=32, n_l=32, n_f=32, project=False)
    """

    rows: int
    n: int
    d: int
    k: int
    n_l: int
    n_f: int
    project: bool
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if min(self.n, self.d, self.k, self.n_l, self.n_f) < 1 or self.rows < 0:
            raise ValueError(f"an interaction needs positive counts, got {self}")
        if not self.project and self.n != self.n_l + self.n_f:
            raise ValueError(
                f"the residual x has {self.n} vectors, the output {self.n_l + self.n_f}; hint: project it, project=True"
            )

    @property
    def weights(self) -> int:
        """Return the number of rows of W_l, W_k and W_r together."""
        return self.n_l + self.k + (self.n_l + self.n_f if self.project else 0)

    def __str__(self) -> str:
        kind = "projected" if self.project else "plain"
        return f"{self.rows}x{self.n}x{self.d} k={self.k} -> {self.n_f}+{self.n_l}, {kind} residual"


@dataclass(frozen=True)
class Interacted:
    """The result of `interact`.

    Args:
        products: the tower's input [B, n k] in FP8.
        next: the next x [B, n_f + n_l, d]; `finish` writes its first n_f vectors.
        residual: of those, [B, n_f, d].
        rstd: of the norm of next, [B, n_f + n_l]; empty without `keep`. `finish` writes the first n_f.

    Example:
        >>> q = interact(x, weight, call, scale).products
    """

    products: QTensor
    next: Tensor
    residual: Tensor
    rstd: Tensor
