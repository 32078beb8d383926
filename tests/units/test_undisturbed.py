"""A model that was looked at is what it was, whatever its forward writes to."""

from collections import Counter, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loka
from loka.placing import plan_everything
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


def follow_in_place(target: Tensor, online: Tensor) -> None:
    with torch.no_grad():
        target.mul_(0.9).add_(online, alpha=0.1)


def follow_by_data(target: Tensor, online: Tensor) -> None:
    target.data.lerp_(online.data, 0.1)


def follow_at_once(target: Tensor, online: Tensor) -> None:
    torch._foreach_lerp_([target.data], [online.data], 0.1)


def follow_elsewhere(target: Tensor, online: Tensor) -> None:
    target.data = target.data * 0.9 + online.data * 0.1


class Following(nn.Module):
    """A target network that follows the other one in every forward of training, as in MoCo and BYOL."""

    def __init__(self, follow: Any) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.target = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).requires_grad_(False)
        self.last, self.follow = nn.Linear(64, 1), follow

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
                self.follow(target, online)
        return self.last(self.online(x) * self.target(x)).squeeze(-1)


@pytest.mark.parametrize("follow", [follow_in_place, follow_by_data, follow_at_once, follow_elsewhere])
@pytest.mark.parametrize("how", ["plan", "convert", "tune"])
def test_weights_that_a_forward_writes_to_are_put_back(follow: Any, how: str) -> None:
    torch.manual_seed(0)
    model, x = Following(follow), torch.randn(32, 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = [p.data_ptr() for p in model.parameters()]
    if how == "plan":
        plan_everything(model, x)
    elif how == "convert":
        loka.convert(model, recipe="rowwise", example=x)
    else:
        batches = [(torch.randn(32, 64), torch.rand(32)) for _ in range(4)]
        loka.tune(model, batches, lambda y, t: (y - t).square(), margin=0.5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == places
    model(x)  # not under `undisturbed`: it follows
    assert not torch.equal(model.target[0].weight, before["target.0.weight"])


class HookedInForward(nn.Module):
    """Registers a hook on a parameter in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.hooked, self.called = False, 0

    def count(self, gradient: Tensor) -> None:
        self.called += 1

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.tower[0].weight.register_hook(self.count)
            self.hooked = True
        return self.tower(x).squeeze(-1)


@pytest.mark.parametrize("how", ["plan", "rewritten plan", "convert", "mods", "tune"])
def test_hooks_of_parameters_see_the_users_steps_alone(how: str) -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []
    model, x = HookedInForward(), torch.randn(32, 64)
    for p in model.parameters():
        p.register_hook(seen.append)
    model.tower[0].bias.register_post_accumulate_grad_hook(seen.append)
    if how.endswith("plan"):
        plan_everything(model, x, mods=["hard_swish"] if "rewritten" in how else [])
    elif how == "convert":
        loka.convert(model, plan_everything(model, x), example=x)
    elif how == "mods":
        loka.mods.apply(model, ["hard_swish"], example=x)
    else:
        batches = [(torch.randn(32, 64), torch.rand(32)) for _ in range(4)]
        loka.tune(model, batches, lambda y, t: (y - t).square(), margin=0.5)
    assert seen == []
    assert (model.hooked, model.called) == (False, 0)
    model(x).sum().backward()
    assert len(seen) == len(list(model.parameters())) + 1
    assert model.called == 1  # what an unseen forward registered is gone: not twice
