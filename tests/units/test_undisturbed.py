"""A model that was looked at is what it was, whatever its forward writes to."""

from collections import Counter, deque

import torch
from torch import Tensor, nn

import loka
from loka.units.undisturbed import undisturbed


class Keeping(nn.Module):
    """Keeps what it has seen in everything that an attribute may be."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.losses: list[Tensor] = []  # an auxiliary loss, which the loop of training reads and clears
        self.masks: dict[int, Tensor] = {}
        self.sizes: set[int] = set()
        self.recent: deque[float] = deque([1.0, 2.0], maxlen=2)
        self.calls: Counter[str] = Counter()
        self.usage = torch.zeros(64)  # counts, and is no buffer
        self.names = ["user", "item"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.tower(x).squeeze(-1)
        self.losses.append(y.square().mean())
        self.masks[len(x)] = torch.ones(len(x))
        self.sizes.add(len(x))
        self.recent.append(3.0)
        self.calls["forward"] += 1
        self.usage += x.detach().abs().sum(0)
        return y


def kept_in(model: Keeping) -> list[object]:
    return [
        list(model.losses),
        dict(model.masks),
        set(model.sizes),
        list(model.recent),
        dict(model.calls),
        model.usage.tolist(),
    ]


def test_what_a_forward_adds_to_is_put_back_in_place() -> None:
    model = Keeping()
    holders, before = (model.losses, model.usage, model.names), kept_in(model)
    with undisturbed(model):
        model(torch.ones(4, 64))
        assert model.losses
        model.names = ["another"]
    assert kept_in(model) == before
    # the same objects: whoever holds one of them sees the same
    assert all(a is b for a, b in zip(holders, (model.losses, model.usage, model.names), strict=True))


def test_tune_leaves_an_auxiliary_loss_to_the_loop_of_training() -> None:
    torch.manual_seed(0)
    model = Keeping()
    model(torch.ones(4, 64))
    before = kept_in(model)
    batches = [(torch.randn(32, 64), torch.randn(32)) for _ in range(4)]
    tuned = loka.tune(model, batches, lambda out, y: (out - y).square(), margin=0.5, progress=False)
    assert tuned.plan.units
    assert kept_in(model) == before
