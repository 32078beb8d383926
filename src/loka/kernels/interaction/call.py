"""A Wukong layer around its tower, described without tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import QTensor


@dataclass(frozen=True)
class InteractionCall:
    """n vectors of width d in; n_l linear mixtures and n_f vectors from the tower out; k mixtures inside. `project`: the residual is W_r X."""

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
            raise ValueError(f"x itself is the residual of {self.n_l + self.n_f} vectors, but has {self.n}: project it")

    @property
    def weights(self) -> int:
        """Rows of the FeatureMix."""
        return self.n_l + self.k + (self.n_l + self.n_f if self.project else 0)

    def __str__(self) -> str:
        kind = "projected" if self.project else "plain"
        return f"{self.rows}x{self.n}x{self.d} k={self.k} -> {self.n_f}+{self.n_l}, {kind} residual"


@dataclass(frozen=True)
class Interacted:
    """The tower's input [B, n k] in FP8; next x [B, n_f + n_l, d], its first n_f vectors not written yet; their residual [B, n_f, d].

    `rstd` [B, n_f + n_l] is what the norm of next divided by, kept for backward where asked and empty otherwise; its first n_f are written by `finish` too.
    """

    products: QTensor
    next: Tensor
    residual: Tensor
    rstd: Tensor
