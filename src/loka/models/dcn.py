"""DCNv2: explicit feature crosses in parallel to a deep tower or below it (Wang et al., "DCN V2", 2021).

    x_{l+1} = x_0 * (W_l x_l + b_l) + x_l          x_0 = flatten(X), * element by element
    low rank:  W_l = U_l V_l^T with U, V of `rank` columns

"stacked": logits = head(deep(cross(x_0))).    "parallel": logits = head([cross(x_0) || deep(x_0)]).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from loka.models.ranker import Core, CoreConfig
from loka.nn import MLP, make_head


class CrossLayer(nn.Module):
    """x_0 * (W x + b) + x; with a rank, W = U V^T as the two linears `down` (V^T) and `up` (U, with the bias)."""

    def __init__(self, width: int, *, rank: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.down = nn.Identity() if rank is None else nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(width if rank is None else rank, width, bias=bias)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """x0 and x [B, width] -> [B, width]."""
        return torch.addcmul(x, x0, self.up(self.down(x)))


class CrossNetwork(nn.Module):
    """`layers` cross layers, each crossing with the same x_0."""

    def __init__(self, width: int, layers: int, *, rank: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CrossLayer(width, rank=rank, bias=bias) for _ in range(layers))

    def forward(self, x0: Tensor) -> Tensor:
        """[B, width] -> [B, width]."""
        x = x0
        for layer in self.layers:
            x = layer(x0, x)
        return x


@dataclass(frozen=True, kw_only=True)
class DCNv2Config(CoreConfig):
    """layers: crosses; rank: None for full matrices; deep: widths of the deep tower."""

    layers: int = 2
    rank: int | None = None
    deep: tuple[int, ...] = (64, 32)
    structure: Literal["stacked", "parallel"] = "stacked"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.structure not in ("stacked", "parallel"):
            raise ValueError(f"DCNv2Config.structure is {self.structure!r}; expected 'stacked' or 'parallel'")
        if not self.deep:
            raise ValueError("DCNv2Config.deep is empty; the deep tower needs at least one width")
        if self.rank is not None and self.rank >= self.n * self.d:
            raise ValueError(
                f"DCNv2Config.rank is {self.rank}, not below n * d = {self.n * self.d}; use None for full rank"
            )


class DCNv2(Core):
    """x [B, n, d] -> logits [B, labels]."""

    config: DCNv2Config

    def __init__(self, config: DCNv2Config) -> None:
        super().__init__()
        self.config = config
        width = config.n * config.d
        self.cross = CrossNetwork(width, config.layers, rank=config.rank, bias=config.style.bias)
        self.deep = MLP(width, config.deep, style=config.style)
        wide = 0 if config.structure == "stacked" else width
        self.head = make_head(wide + config.deep[-1], (), config.labels, config.style)

    def represent(self, x: Tensor) -> Tensor:
        """deep(cross(x_0)), or [cross(x_0) || deep(x_0)]."""
        x0 = x.flatten(1)
        crossed = self.cross(x0)
        if self.config.structure == "stacked":
            out: Tensor = self.deep(crossed)
            return out
        return torch.cat([crossed, self.deep(x0)], 1)


SIZES = {
    "tiny": DCNv2Config(),
    "tiny-low-rank": DCNv2Config(rank=16, structure="parallel"),
    "small": DCNv2Config(d=32, layers=3, deep=(256, 128)),
    "large": DCNv2Config(n=64, d=128, layers=3, deep=(4096, 2048)),
    "large-low-rank": DCNv2Config(n=64, d=128, layers=3, rank=1024, deep=(4096, 2048), structure="parallel"),
}
