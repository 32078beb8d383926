"""DLRM: dot products of all pairs of feature vectors (Naumov et al., "Deep Learning Recommendation Model", 2019).

    logits = top([x_dense || <x_i, x_j> for i > j])

The bottom MLP of the paper, which maps the dense features to one vector, is Ranker's dense projection; its vectors come
first in x. `dense_vectors` is the number of leading vectors that the top MLP gets in addition to the dot products; 0
for data without dense features.
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
    """top: hidden widths of the top MLP; dense_vectors: leading vectors of x that the top MLP reads directly."""

    dense_vectors: int = 1
    top: tuple[int, ...] = (64, 32)

    def __post_init__(self) -> None:
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
        """Return the number of dense vectors, which are those of Ranker."""
        return {"dense_vectors": dense_vectors if schema.dense else 0}

    def represent(self, x: Tensor) -> Tensor:
        """Return [x_dense || dots]."""
        return torch.cat([x[:, : self.config.dense_vectors].flatten(1), self.dots(x)], 1)


SIZES = {
    "tiny": DLRMConfig(),
    "small": DLRMConfig(d=32, top=(256, 128)),
    "large": DLRMConfig(n=128, d=128, top=(2048, 2048, 1024)),
    "wide": DLRMConfig(n=128, d=128, top=(4096, 4096, 4096, 2048)),
}
