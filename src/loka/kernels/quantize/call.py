"""Quantization of a 2-D tensor, described without tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.formats import Spec, scale_shape


@dataclass(frozen=True)
class QuantizeCall:
    """One call: q = quantize(x[M, K]), q_t = quantize(x^T[K, M]) for backward GEMMs, or both, each with its spec."""

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
        """Return the call for this operand."""
        if x.dim() != 2:
            raise ValueError(
                f"quantize takes a 2-D tensor, got shape {tuple(x.shape)}; hint: x.reshape(-1, x.shape[-1])"
            )
        return cls(x.shape[0], x.shape[1], spec, x.dtype, transpose)

    def __str__(self) -> str:
        wanted = [str(self.spec)] * (self.spec is not None) + [f"T {self.transpose}"] * (self.transpose is not None)
        return f"{self.m}x{self.k} {str(self.in_dtype).removeprefix('torch.')} -> {' + '.join(wanted)}"


def check_scale(spec: Spec, scale: Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError for a missing, unexpected or misshapen scale, which a kernel would read out of bounds."""
    if spec.mode == "dynamic" and scale is not None:
        raise ValueError(
            f"{spec} computes its scale from x; hint: a given scale needs {spec.format}:{spec.block}:static"
        )
    if spec.mode != "dynamic" and scale is None:
        raise ValueError(f"{spec} needs a scale: its scales do not come from x")
    if scale is not None and scale.shape != scale_shape(shape, spec.block):
        expected = tuple(scale_shape(shape, spec.block))
        raise ValueError(f"{spec} of shape {tuple(shape)} needs scales of {expected}, got {tuple(scale.shape)}")
