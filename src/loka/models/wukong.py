"""Wukong: stacked factorization machines.

Zhang et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation", 2024.

    X_{i+1} = Norm(concat(FMB(X_i), LCB(X_i)) + residual(X_i))
    FMB(X)  = reshape(MLP(Norm(flatten(X (X^T Y)))))    n x k products of n vectors with k mixtures -> n_F new vectors
    LCB(X)  = W_L X                                     n_L linear mixtures
    residual is X itself, or W_R X if the numbers of vectors differ; the head reads flatten(X_l).

W_L, Y^T and W_R all mix the n vectors of the same X, so they are one FeatureMix: one batched product that reads X once
in place, and whose slices are views. Nothing of shape (B, n, d) is transposed in memory, and a compiler can fuse
concat, residual and norm. Tests compare with the equations above in float64.

The published sizes are named `layers x n_L x depth x hidden`, with d = 160. The number of input vectors is not
published; pass your own n.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.models.ranker import Core, CoreConfig
from loka.nn import MLP, FactorizationMachine, FeatureMix, make_head, make_norm


@dataclass(frozen=True, kw_only=True)
class WukongConfig(CoreConfig):
    """n_l, n_f: vectors from LCB and FMB; k: mixtures in X^T Y; depth, hidden: linears and width of the FMB tower."""

    layers: int = 2
    n_l: int = 8
    n_f: int = 8
    k: int = 8
    hidden: int = 64
    depth: int = 3
    top: tuple[int, ...] = (64, 32)


class FactorizationMachineBlock(nn.Module):
    """reshape(MLP(Norm(flatten(X (X^T Y))))): [B, n, d] and its k mixtures [B, k, d] -> [B, n_f, d]."""

    def __init__(self, n: int, config: WukongConfig) -> None:
        super().__init__()
        width = n * config.k
        self.shape = (config.n_f, config.d)
        self.product = FactorizationMachine()
        self.norm = make_norm(config.style.norm, width, bias=config.style.bias)
        self.mlp = MLP(width, [config.hidden] * (config.depth - 1), config.n_f * config.d, style=config.style)

    def forward(self, x: Tensor, mixtures: Tensor) -> Tensor:
        """Compute n_f vectors from the products of x with its mixtures."""
        out: Tensor = self.mlp(self.norm(self.product(x, mixtures).flatten(1)))
        return out.view(-1, *self.shape)


class WukongLayer(nn.Module):
    """Norm(concat(FMB(X), LCB(X)) + residual(X)): [B, n, d] -> [B, n_f + n_l, d]."""

    def __init__(self, n: int, config: WukongConfig) -> None:
        super().__init__()
        out = config.n_f + config.n_l
        self.mix = FeatureMix(n, (config.n_l, config.k) if n == out else (config.n_l, config.k, out))
        self.fmb = FactorizationMachineBlock(n, config)
        self.norm = make_norm(config.style.norm, config.d, bias=config.style.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Run one layer."""
        compressed, mixtures, *rest = self.mix.split(x)
        residual = rest[0] if rest else x
        out: Tensor = self.norm(torch.cat([self.fmb(x, mixtures), compressed], 1) + residual)
        return out


class Wukong(Core):
    """x [B, n, d] -> logits [B, labels]."""

    config: WukongConfig

    def __init__(self, config: WukongConfig) -> None:
        super().__init__()
        self.config = config
        out = config.n_f + config.n_l
        counts = [config.n] + [out] * (config.layers - 1)
        self.layers = nn.ModuleList(WukongLayer(n, config) for n in counts)
        self.head = make_head(out * config.d, config.top, config.labels, config.style)

    def represent(self, x: Tensor) -> Tensor:
        """flatten(X_l)."""
        for layer in self.layers:
            x = layer(x)
        return x.flatten(1)


def _row(layers: int, n: int, k: int, hidden: int) -> WukongConfig:
    return WukongConfig(
        n=128, d=160, layers=layers, n_l=n, n_f=n, k=k, hidden=hidden, depth=3, top=(hidden, hidden // 2)
    )


_ROWS = (
    (2, 8, 24, 2048),
    (4, 32, 24, 2048),
    (8, 32, 24, 2048),
    (8, 48, 48, 4096),
    (8, 96, 96, 8192),
    (8, 96, 96, 16384),
    (8, 192, 192, 16384),
)

SIZES = {
    "tiny": WukongConfig(),
    "small": WukongConfig(d=32, layers=3, n_l=16, n_f=16, k=16, hidden=256, top=(256, 128)),
    "wide": WukongConfig(d=64, layers=3, n_l=32, n_f=32, k=32, hidden=2048, top=(2048, 1024)),
    "plain": WukongConfig(n=128, d=128, layers=6, n_l=32, n_f=32, k=24, hidden=2048, depth=3, top=(2048, 1024)),
    **{f"{layers}x{n}x3x{hidden}": _row(layers, n, k, hidden) for layers, n, k, hidden in _ROWS},
}
