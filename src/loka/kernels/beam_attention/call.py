"""Calls of the beam attention kernels, described without tensors."""

from dataclasses import dataclass

import torch

from loka.formats import Spec


@dataclass(frozen=True)
class BeamAttentionCall:
    """A call of `beam_attention`.

    Args:
        requests, beams, heads, d, dtype: q is [requests, beams, heads, d] in `dtype`.
        groups, length: key-value heads, and length of the longest context.
        shared: v is k.
        cache: dtype of k and v if it differs from q's: float8_e4m3fn.

    Example:
        >>> call = BeamAttentionCall(requests=8, beams=512, heads=8, groups=1, length=513, d=128)
    """

    requests: int
    beams: int
    heads: int
    groups: int
    length: int
    d: int
    dtype: torch.dtype = torch.bfloat16
    shared: bool = False
    cache: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.groups < 1 or self.heads % self.groups:
            raise ValueError(f"groups must divide the {self.heads} heads, got {self.groups}")

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        shared = ", v = k" if self.shared else ""
        shared += "" if self.cache is None else f", context in {str(self.cache).removeprefix('torch.')}"
        return f"{self.requests}x{self.beams} beams, {self.heads}/{self.groups} heads of {self.d}, context {self.length}, {kind}{shared}"


@dataclass(frozen=True)
class AncestorAttentionCall:
    """A call of `ancestor_attention`.

    Args:
        requests, beams, heads, d, dtype: q is [requests, beams, heads, d] in `dtype`.
        steps: earlier steps that are attended to.
        keep, spec: as in `ancestor_attention`.

    Example:
        >>> call = AncestorAttentionCall(requests=8, beams=512, heads=8, steps=2, d=128)
    """

    requests: int
    beams: int
    heads: int
    steps: int
    d: int
    dtype: torch.dtype = torch.bfloat16
    keep: bool = False
    spec: Spec | None = None

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        kept = ", kept" if self.keep else ""
        result = "" if self.spec is None else f" -> {self.spec}"
        return f"{self.requests}x{self.beams} beams, {self.heads} heads of {self.d}, {self.steps} steps{kept}, {kind}{result}"
