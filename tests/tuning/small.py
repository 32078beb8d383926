"""A small ranker that has learned something, and what tune is called with."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of

WIDTH = 64
MARGIN = 0.05  # at this size FP8 moves the loss by some per mille, which 512 held-out examples resolve


class Ranker(nn.Module):
    """A tower with a norm, dropout and a batch norm: what running it may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 128), nn.LayerNorm(128)
        self.second, self.third = nn.Linear(128, 128), nn.Linear(128, 64)
        self.batch, self.drop, self.last = nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.silu(self.norm(self.first(x)))
        x = F.relu(self.third(F.relu(self.second(x))))
        return self.last(self.drop(self.batch(x))).squeeze(-1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="none")


def make_batches(count: int = 8, rows: int = 128, seed: int = 7) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)) / WIDTH**0.5
    batches = []
    for _ in range(count):
        x = torch.randn(rows, WIDTH, generator=generator)
        chance = torch.sigmoid(2 * (x @ weight))
        batches.append((x, (torch.rand(rows, generator=generator) < chance).float()))
    return batches


def train(model: nn.Module, steps: int = 40) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for x, target in make_batches(steps, seed=3):
        optimizer.zero_grad()
        loss(model(x), target).mean().backward()
        optimizer.step()
    return optimizer


def make_trained(steps: int = 40) -> tuple[Ranker, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Ranker()
    return model, train(model, steps)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Any]:
    """Everything that tune must leave as it was: values, gradients, needs, modes, classes, hooks, optimizer, random state."""
    modules = list(model.named_modules())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for _, m in modules]
    return [
        {name: value.clone() for name, value in model.state_dict().items()},
        [(p, p.requires_grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        [(name, m.training, type(m)) for name, m in modules],
        hooks,
        [] if optimizer is None else [{k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for s in optimizer.state.values()],
        torch.get_rng_state().clone(),
    ]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Bit for bit, whatever it holds."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


BATCHES = make_batches()


def tune(model: nn.Module, batches: Any = BATCHES, given: Any = loss, **options: Any) -> loka.tuning.Tuned:
    return loka.tune(model, batches, given, **{"margin": MARGIN, "progress": False, **options})


def placed(model: nn.Module) -> set[str]:
    """Linears that run in low precision."""
    chains = {link.linear for _, chain in chains_of(model) for link in chain.links}
    return chains | {name for name, _ in linears_of(model)}
