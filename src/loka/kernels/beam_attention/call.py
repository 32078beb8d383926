"""Attention of beams, described without tensors."""

from dataclasses import dataclass

import torch

from loka.formats import Spec


@dataclass(frozen=True)
class BeamAttentionCall:
    """`requests` x `beams` queries of `heads` heads over a context of at most `length` tokens with `groups` key-value heads; shared: v is k.

    cache: the dtype of k and v where it is not that of q: float8_e4m3fn, without scales.
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
    """`requests` x `beams` queries over the tokens of `steps` earlier steps, found by their ancestors, and over their own; `keep`: file the own ones.

    spec: what the result, all heads of a beam as one row, is quantised to; None leaves it in `dtype`.
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
