"""Quantisation of one 2-D tensor, described without tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import Spec


@dataclass(frozen=True)
class QuantizeCall:
    """q = quantize(x[M, K]); with `transpose`, also q_t = quantize(x^T[K, M]) under its own spec, for the backward GEMMs."""

    m: int
    k: int
    spec: Spec
    in_dtype: torch.dtype = torch.bfloat16
    transpose: Spec | None = None

    @classmethod
    def of(cls, x: Tensor, spec: Spec, transpose: Spec | None = None) -> "QuantizeCall":
        """Describe a call by its operand."""
        if x.dim() != 2:
            raise ValueError(
                f"quantize takes a 2-D tensor, got shape {tuple(x.shape)}; hint: x.reshape(-1, x.shape[-1])"
            )
        return cls(x.shape[0], x.shape[1], spec, x.dtype, transpose)

    def __str__(self) -> str:
        also = f" + T {self.transpose}" if self.transpose else ""
        return f"{self.m}x{self.k} {str(self.in_dtype).removeprefix('torch.')} -> {self.spec}{also}"
