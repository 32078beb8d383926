"""ELFM: the "external large foundation model" of the LoKA evaluation, a mix of DHEN, DLRM and DCN.

    logits = head([flatten(DHEN layers(X)) || MLP(dots(X)) || MLP(cross(flatten(X)))])

Only the ingredients and the work per example (40 GFLOP) are published. The combination here, three branches that read
the same vectors and are joined by one over-arch tower, is ours; "large" is sized so that forward and backward cost
about that much.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from loka.models.dcn import CrossNetwork
from loka.models.dhen import DHENConfig, DHENLayer
from loka.models.ranker import Core, CoreConfig
from loka.nn import MLP, DotInteraction, make_head


@dataclass(frozen=True, kw_only=True)
class ELFMConfig(CoreConfig):
    """dhen: the DHEN branch (its n, d, labels and style are replaced); dots, cross: hidden widths of the other two."""

    dhen: DHENConfig = field(default_factory=DHENConfig)
    dots: tuple[int, ...] = (64,)
    cross_layers: int = 2
    rank: int | None = None
    cross: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64, 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dots or not self.cross:
            raise ValueError(f"ELFMConfig needs a width for both branches, got dots={self.dots} and cross={self.cross}")


class ELFM(Core):
    """x [B, n, d] -> logits [B, labels]."""

    config: ELFMConfig

    def __init__(self, config: ELFMConfig) -> None:
        super().__init__()
        self.config = config
        n, d, style, branch = config.n, config.d, config.style, config.dhen
        branch = DHENConfig(**{**vars(branch), "n": n, "d": d, "labels": config.labels, "style": style})
        counts = [n] + [branch.width] * (branch.layers - 1)
        self.dhen = nn.ModuleList(DHENLayer(count, branch) for count in counts)
        self.dots = DotInteraction(n)
        self.dot_tower = MLP(self.dots.width, config.dots, style=style)
        self.cross = CrossNetwork(n * d, config.cross_layers, rank=config.rank, bias=style.bias)
        self.cross_tower = MLP(n * d, config.cross, style=style)
        width = branch.width * d + config.dots[-1] + config.cross[-1]
        self.head = make_head(width, config.top, config.labels, style)

    def represent(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of the three branches."""
        deep = x
        for layer in self.dhen:
            deep = layer(deep)
        crossed = self.cross_tower(self.cross(x.flatten(1)))
        return torch.cat([deep.flatten(1), self.dot_tower(self.dots(x)), crossed], 1)


SIZES = {
    "tiny": ELFMConfig(dhen=DHENConfig(rank=16), rank=16),
    "small": ELFMConfig(d=32, dhen=DHENConfig(layers=3, m=12), dots=(256,), cross=(256,), top=(256, 128)),
    "large": ELFMConfig(
        n=128,
        d=128,
        dhen=DHENConfig(layers=10, m=64, rank=4096),
        dots=(4096, 2048),
        cross_layers=6,
        rank=4096,
        cross=(8192, 4096),
        top=(8192, 4096),
    ),
}
