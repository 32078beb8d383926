"""DLRM: dot products of all pairs of feature vectors (Naumov et al., "Deep Learning Recommendation Model", 2019).

    logits = top([x_dense || <x_i, x_j> for i > j])

The bottom MLP of the paper, which turns the dense features into one vector, is Ranker's dense projection: it comes first in x. `dense_vectors`
says how many leading vectors are passed to the top MLP beside the dots; 0 for data without dense features.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from loka.models.ranker import Core, CoreConfig, check_positive
from loka.nn import DotInteraction, make_head

if TYPE_CHECKING:
    from loka.data.schema import Schema


@dataclass(frozen=True, kw_only=True)
class DLRMConfig(CoreConfig):
    """top: hidden widths of the top MLP; dense_vectors: leading vectors of x that the top MLP sees as they are."""

    dense_vectors: int = 1
    top: tuple[int, ...] = (64, 32)

    def __post_init__(self) -> None:
        """At least two vectors make a pair, and the dense ones are among them."""
        check_positive(self, except_for=("dense_vectors",))
        if self.n < 2:
            raise ValueError(f"DLRMConfig.n is {self.n}; pairwise dots need at least two feature vectors")
        if not 0 <= self.dense_vectors <= self.n:
            raise ValueError(f"DLRMConfig.dense_vectors is {self.dense_vectors}; expected 0 to n={self.n}")


class DLRM(Core):
    """x [B, n, d] -> logits [B, labels]."""

    config: DLRMConfig

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        self.config = config
        self.dots = DotInteraction(config.n)
        self.width = config.dense_vectors * config.d + self.dots.width
        self.head = make_head(self.width, config.top, config.labels, config.style)

    @classmethod
    def fit(cls, schema: "Schema", *, dense_vectors: int) -> dict[str, Any]:
        """The dense vectors of Ranker are the ones passed through."""
        return {"dense_vectors": dense_vectors if schema.dense else 0}

    def represent(self, x: Tensor) -> Tensor:
        """[x_dense || dots]."""
        return torch.cat([x[:, : self.config.dense_vectors].flatten(1), self.dots(x)], 1)


SIZES = {
    "tiny": DLRMConfig(),
    "small": DLRMConfig(d=32, top=(256, 128)),
    "large": DLRMConfig(n=128, d=128, top=(2048, 2048, 1024)),
    "wide": DLRMConfig(n=128, d=128, top=(4096, 4096, 4096, 2048)),
}
