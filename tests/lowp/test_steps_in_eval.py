"""A pretrained model is often trained in eval mode, without dropout: its scales must follow the data all the same."""

import copy

import pytest
import torch
from torch import nn

import loka
from loka.lowp.chain import chains_of
from loka.placing import plan_everything


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


@pytest.mark.parametrize("evaluating", [False, True], ids=["trained", "trained in eval mode"])
def test_scales_follow_the_data(evaluating: bool) -> None:
    model = make()
    high = copy.deepcopy(model).requires_grad_(False)
    loka.convert(model, plan_everything(model, torch.randn(128, 64)))
    model.train(not evaluating)
    optimizer, errors = torch.optim.SGD(model.parameters(), 0.0), []
    for step in range(6):  # the first batch is not the largest
        x = torch.randn(128, 64) * (0.1 if step < 3 else 1.0)
        optimizer.zero_grad()
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
        errors.append(float((y.detach() - high(x)).norm() / high(x).norm()))
    assert max(errors[-2:]) < 0.1


def test_an_evaluation_between_steps_leaves_no_trace() -> None:
    found = []
    for evaluate in (False, True):
        model = make()
        torch.manual_seed(1)
        loka.convert(model, plan_everything(model, torch.randn(128, 64)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        large = torch.randn(128, 64) * 100
        for step in range(4):
            if evaluate and step == 3:
                model.eval()
                model(large)
                model.train()
            optimizer.zero_grad()
            y = model(torch.randn(128, 64))
            y.square().mean().backward()
            optimizer.step()
        found.append(y.detach())
    assert torch.equal(*found)


def test_a_restart_between_steps_in_eval_mode_changes_nothing() -> None:
    def train(model: nn.Module, steps: range) -> torch.Tensor:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(128, 64, generator=generator) * (0.1 if step < 4 else 1.0)
            optimizer.zero_grad()
            y = model(x)
            y.square().mean().backward()
            optimizer.step()
        return y.detach()

    straight, restarted = make().eval(), make().eval()
    plan = plan_everything(straight, torch.randn(128, 64))
    loka.convert(straight, plan)
    train(straight, range(4))
    restarted.load_state_dict(straight.state_dict())
    loka.convert(restarted, plan)
    loka.load_scale_state(restarted, loka.scale_state(straight))
    restarted.eval()
    straight.eval()
    for begin in (4, 5, 6):  # the first of them is larger than all before
        assert torch.equal(train(straight, range(begin, begin + 1)), train(restarted, range(begin, begin + 1)))


def test_a_chain_that_loses_a_linear_keeps_following_steps_in_eval_mode() -> None:
    model = make()
    loka.convert(model, plan_everything(model, torch.randn(128, 64)))
    ((_, chain),) = chains_of(model)
    chain.load_steps(torch.tensor([1, 3, 2]))
    for half in chain.split(chain.links[0].linear):
        assert half.steps().tolist() == [1, 3, 2]
