"""Models in plain PyTorch as users write them, scaled down: nothing in them knows of this package."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DLRM(nn.Module):
    """Dense arch, pairwise dots, over arch; ReLU, biases, no norms."""

    def __init__(self, f: int = 6, d: int = 64, top: tuple[int, ...] = (128, 128, 64)) -> None:
        super().__init__()
        self.dense = nn.Sequential(
            nn.Linear(13, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, d), nn.ReLU()
        )
        n = f + 1
        i, j = torch.triu_indices(n, n, 1)
        self.register_buffer("i", i)
        self.register_buffer("j", j)
        widths = [d + n * (n - 1) // 2, *top]
        layers: list[nn.Module] = []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.over = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        d = self.dense(dense)
        x = torch.cat([d[:, None], sparse], 1)
        dots = torch.bmm(x, x.transpose(1, 2))[:, self.i, self.j]
        return self.over(torch.cat([d, dots.to(d.dtype)], 1))


class Tower(nn.Module):
    """LayerNorm + SiLU behind every linear."""

    def __init__(self, w: int = 128, n: int = 3, inp: int = 80) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        a = inp
        for _ in range(n):
            layers += [nn.Linear(a, w), nn.LayerNorm(w), nn.SiLU()]
            a = w
        self.net = nn.Sequential(*layers)
        self.head = nn.Linear(w, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))


class CrossNet(nn.Module):
    """DCNv2's cross layers beside a deep tower, written with attributes and functions."""

    def __init__(self, width: int = 96, layers: int = 2) -> None:
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.deep1, self.act, self.deep2 = nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64)
        self.last = nn.Linear(width + 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        at = x
        for layer in self.cross:
            at = x * layer(at) + at
        deep = F.relu(self.deep2(self.act(self.deep1(x))))
        return self.last(torch.cat([at, deep], 1))


def encoder(d: int = 64, layers: int = 2, activation: str = "gelu") -> nn.Module:
    """torch's own encoder; its activation is a function in an attribute."""
    layer = nn.TransformerEncoderLayer(d, 4, 128, dropout=0.0, activation=activation, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Ranker(nn.Module):
    """An encoder with a prediction layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.last = encoder(), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.encoder(x).mean(1))


class Auxiliary(nn.Module):
    """In training a second head reads what lies between two linears of the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second, self.act2, self.last = (
            nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1),
        )  # fmt: skip
        self.side = nn.Linear(96, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        y = self.last(self.act2(self.second(h)))
        return y + 0.1 * self.side(h) if self.training else y


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "dlrm": (DLRM, lambda b: (torch.randn(b, 13), torch.randn(b, 6, 64))),
    "tower": (Tower, lambda b: (torch.randn(b, 80),)),
    "cross": (CrossNet, lambda b: (torch.randn(b, 96),)),
    "encoder": (Ranker, lambda b: (torch.randn(b, 5, 64),)),
    "auxiliary": (Auxiliary, lambda b: (torch.randn(b, 64),)),
}
