"""A small model whose linears differ: one is called twice, one never, one needs no input gradient."""

import torch
from torch import Tensor, nn


class Small(nn.Module):
    """x [B, 12] -> logits [B, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.twice = nn.Linear(32, 32)
        self.idle = nn.Linear(3, 3)
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.first(x))  # in place: the probe must have seen the value before
        h = h + torch.tanh(self.twice(torch.tanh(self.twice(h))))
        out: Tensor = self.last(h)
        return out


def batches(count: int, rows: int = 48) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(rows, 12, generator=generator) for _ in range(count)]
    return [(x, (x[:, :1] + 0.3 * x[:, 1:2] > 0).float()) for x in xs]


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]], probe: object | None = None) -> list[float]:
    """Losses of plain SGD with momentum; `probe.step()` after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in data:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if probe is not None:
            probe.step()  # type: ignore[attr-defined]
    return losses
