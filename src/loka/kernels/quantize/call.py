"""Quantisation of one 2-D tensor, described without tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import Spec


@dataclass(frozen=True)
class QuantizeCall:
    """q = quantize(x[M, K]), q_t = quantize(x^T[K, M]) for the backward GEMMs, or both, each under its own spec."""

    m: int
    k: int
    spec: Spec | None
    in_dtype: torch.dtype = torch.bfloat16
    transpose: Spec | None = None

    def __post_init__(self) -> None:
        if self.spec is None and self.transpose is None:
            raise ValueError("quantize was asked for nothing: give a spec, a transpose, or both")

    @classmethod
    def of(cls, x: Tensor, spec: Spec | None, transpose: Spec | None = None) -> "QuantizeCall":
        """Describe a call by its operand."""
        if x.dim() != 2:
            raise ValueError(
                f"quantize takes a 2-D tensor, got shape {tuple(x.shape)}; hint: x.reshape(-1, x.shape[-1])"
            )
        return cls(x.shape[0], x.shape[1], spec, x.dtype, transpose)

    def __str__(self) -> str:
        wanted = [str(self.spec)] * (self.spec is not None) + [f"T {self.transpose}"] * (self.transpose is not None)
        return f"{self.m}x{self.k} {str(self.in_dtype).removeprefix('torch.')} -> {' + '.join(wanted)}"
