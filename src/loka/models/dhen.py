"""DHEN: layers that ensemble several kinds of interaction.

Zhang et al., "DHEN: A Deep and Hierarchical Ensemble Network", 2022.

    X_{l+1} = Norm(Ensemble_i Interaction_i(X_l) + ShortCut(X_l))

Every interaction maps [B, n, d] to [B, m, d]; the ensemble concatenates or sums their outputs. The shortcut is the
identity, or W X if the numbers of vectors differ.

    dot        all pairwise dots, then a linear to m vectors
    cross      one DCNv2 cross of the flattened vectors, then a linear to m vectors
    linear     W X
    attention  self-attention over the n vectors, then W X
"""

from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn

from loka.models.dcn import CrossLayer
from loka.models.ranker import Core, CoreConfig
from loka.nn import DotInteraction, FeatureMix, SelfAttention, Style, make_head, make_norm


class DotEnsemble(nn.Module):
    """Pairwise dots mapped to m vectors."""

    def __init__(self, n: int, d: int, m: int, style: Style) -> None:
        super().__init__()
        self.shape = (m, d)
        self.dots = DotInteraction(n)
        self.project = nn.Linear(self.dots.width, m * d, bias=style.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, m, d]."""
        out: Tensor = self.project(self.dots(x))
        return out.view(-1, *self.shape)


class CrossEnsemble(nn.Module):
    """One cross of the flattened vectors with themselves, mapped to m vectors."""

    def __init__(self, n: int, d: int, m: int, style: Style, *, rank: int | None) -> None:
        super().__init__()
        self.shape = (m, d)
        self.cross = CrossLayer(n * d, rank=rank, bias=style.bias)
        self.project = nn.Linear(n * d, m * d, bias=style.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, m, d]."""
        flat = x.flatten(1)
        out: Tensor = self.project(self.cross(flat, flat))
        return out.view(-1, *self.shape)


class AttentionEnsemble(nn.Module):
    """Self-attention over the n vectors, mixed to m."""

    def __init__(self, n: int, d: int, m: int, style: Style, *, heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(d, heads, bias=style.bias)
        self.mix = FeatureMix(n, m)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, m, d]."""
        out: Tensor = self.mix(self.attention(x))
        return out


Interaction = Literal["dot", "cross", "linear", "attention"]
_KINDS: tuple[Interaction, ...] = ("dot", "cross", "linear", "attention")


@dataclass(frozen=True, kw_only=True)
class DHENConfig(CoreConfig):
    """interactions: what a layer ensembles, with m vectors from each; rank: of the cross interaction (None: full)."""

    layers: int = 2
    interactions: tuple[Interaction, ...] = ("dot", "linear", "cross")
    m: int = 8
    ensemble: Literal["concat", "sum"] = "concat"
    heads: int = 2
    rank: int | None = None
    top: tuple[int, ...] = (64, 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [kind for kind in self.interactions if kind not in _KINDS]
        if unknown or not self.interactions:
            raise ValueError(f"DHENConfig.interactions is {self.interactions}; choose from {', '.join(_KINDS)}")
        if self.ensemble not in ("concat", "sum"):
            raise ValueError(f"DHENConfig.ensemble is {self.ensemble!r}; expected 'concat' or 'sum'")

    @property
    def width(self) -> int:
        """Number of output vectors of a layer."""
        return self.m * (len(self.interactions) if self.ensemble == "concat" else 1)


def make_interaction(kind: Interaction, n: int, config: DHENConfig) -> nn.Module:
    """Return the module of one interaction: [B, n, d] -> [B, m, d]."""
    d, m, style = config.d, config.m, config.style
    if kind == "dot":
        return DotEnsemble(n, d, m, style)
    if kind == "cross":
        return CrossEnsemble(n, d, m, style, rank=config.rank)
    if kind == "linear":
        return FeatureMix(n, m)
    return AttentionEnsemble(n, d, m, style, heads=config.heads)


class DHENLayer(nn.Module):
    """Norm(Ensemble_i Interaction_i(X) + ShortCut(X)): [B, n, d] -> [B, width, d]."""

    def __init__(self, n: int, config: DHENConfig) -> None:
        super().__init__()
        self.concat = config.ensemble == "concat"
        self.interactions = nn.ModuleDict(
            {f"{i}_{kind}": make_interaction(kind, n, config) for i, kind in enumerate(config.interactions)}
        )
        self.shortcut = nn.Identity() if n == config.width else FeatureMix(n, config.width)
        self.norm = make_norm(config.style.norm, config.d, bias=config.style.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Run one layer."""
        parts = [interaction(x) for interaction in self.interactions.values()]
        # a running sum and not stack(...).sum(0), which would write the stack to memory and read it again
        ensemble = torch.cat(parts, 1) if self.concat else reduce(torch.add, parts)
        out: Tensor = self.norm(ensemble + self.shortcut(x))
        return out


class DHEN(Core):
    """x [B, n, d] -> logits [B, labels]."""

    config: DHENConfig

    def __init__(self, config: DHENConfig) -> None:
        super().__init__()
        self.config = config
        counts = [config.n] + [config.width] * (config.layers - 1)
        self.layers = nn.ModuleList(DHENLayer(n, config) for n in counts)
        self.head = make_head(config.width * config.d, config.top, config.labels, config.style)

    def represent(self, x: Tensor) -> Tensor:
        """flatten(X_l)."""
        for layer in self.layers:
            x = layer(x)
        return x.flatten(1)


SIZES = {
    "tiny": DHENConfig(rank=16),
    "tiny-attention": DHENConfig(interactions=("attention", "linear"), ensemble="sum"),
    "small": DHENConfig(d=32, layers=3, m=12, top=(256, 128)),
    "large": DHENConfig(n=128, d=128, layers=4, m=32, rank=1024, top=(4096, 2048)),
}
