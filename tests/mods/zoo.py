"""Models to rewrite, each with an example: every family of loka.models, and small nets with the habits that make rewriting hard."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka import models
from loka.data.batch import Jagged

PLAIN = {"norm": "layer", "tower_norm": "layer", "activation": "silu", "bias": True}
MODDED = {"norm": "block", "tower_norm": "block", "activation": "hard_swish", "bias": False}


def build_family(family: str, **style: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """A tiny model in double precision and inputs for it."""
    torch.manual_seed(0)
    model = models.build(family, "tiny", **style).double()
    return model, family_inputs(family, model.config)


def family_inputs(family: str, config: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    if family == "hstu":
        values = torch.randint(1, config.items, (9,), generator=generator)
        return Jagged(values, torch.tensor([0, 4, 4, 9])), torch.arange(9) * 60
    if family == "onerec":
        codes = torch.randint(0, 32, (7, config.levels), generator=generator)
        return Jagged(codes, torch.tensor([0, 5, 7])), codes[:2], None
    x = torch.randn(3, config.n, config.d, generator=generator, dtype=torch.float64)
    if family == "interformer":
        history = torch.randn(3, config.length, config.d, generator=generator, dtype=torch.float64)
        return x, history, torch.tensor([0, 3, config.length])
    return (x,)


class Block(nn.Module):
    """Pre-norm: x + down(act(up(norm(x))))."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.activation = nn.GELU()
        self.down = nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class PostBlock(nn.Module):
    """Post-norm: norm(x + down(act(up(x))))."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up = nn.Linear(d, 2 * d)
        self.activation = nn.SiLU()
        self.down = nn.Linear(2 * d, d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(self.activation(self.up(x))))


class Residual(nn.Module):
    """A stack of blocks, a norm, a prediction layer."""

    def __init__(self, d: int = 12, post: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*((PostBlock if post else Block)(d) for _ in range(2)))
        self.norm = nn.LayerNorm(d)
        self.last = nn.Linear(d, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.blocks(x)))


class Shared(nn.Module):
    """One norm and one linear used twice, one weight tied to another, one linear under two names."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.twice = nn.Linear(d, d)
        self.alias = self.twice
        self.tied = nn.Linear(d, d)
        self.tied.weight = self.twice.weight
        self.activation = nn.SiLU()
        self.last = nn.Linear(d, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.twice(self.norm(x)))
        x = self.activation(self.tied(self.norm(x)))
        return self.last(self.alias(x))


class Gated(nn.Module):
    """A sigmoid gate, a functional silu, a probability at the end, a batch norm."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(d)
        self.make_gate = nn.Linear(d, d)
        self.gate = nn.Sigmoid()
        self.last = nn.Linear(d, 1)
        self.probability = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch(x)
        return self.probability(self.last(F.silu(x * self.gate(self.make_gate(x)))))


def plain_mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(10, 24), nn.LayerNorm(24), nn.SiLU(), nn.Linear(24, 17), nn.SiLU(), nn.LayerNorm(17), nn.Linear(17, 1)
    )


NETS = {
    "mlp": (plain_mlp, 10),
    "residual": (Residual, 12),
    "post-residual": (lambda: Residual(post=True), 12),
    "shared": (Shared, 8),
    "gated": (Gated, 8),
}
SUBJECTS = [*NETS, *models.names()]


def subject(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model by name with all parameters away from their initial values, and an example."""
    torch.manual_seed(0)
    if name in NETS:
        make, width = NETS[name]
        model: nn.Module = make().double()
        inputs: tuple[Any, ...] = (torch.randn(5, width, dtype=torch.float64),)
    else:
        style = PLAIN if name != "onerec" else {"activation": "silu"}
        model, inputs = build_family(name, **style)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=p.dtype))
    return model, inputs


def run(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    """The model's outputs as one flat tensor, in eval mode."""
    model.eval()
    with torch.no_grad():
        out = model(*inputs)
    return torch.cat([t.flatten() for t in (out if isinstance(out, tuple) else (out,))])


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_state(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
