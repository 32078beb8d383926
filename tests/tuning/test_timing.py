"""What is timed is a step as it is trained: with fresh quantised weights, filed magnitudes, and no copy of the inputs."""

import pytest
import torch
from torch import nn

import loka
from loka.lowp import Linear
from loka.lowp.binding import LinearOptions
from loka.lowp.step import end_step
from loka.placing import plan_everything
from loka.tuning import Task, timing


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[..., 0] - target).square()


def make(device: torch.device, chains: bool) -> tuple[nn.Module, list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Softmax(-1), nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 1))  # fmt: skip
    batches = [((torch.randn(32, 64, device=device),), torch.randn(32, device=device)) for _ in range(2)]
    model.to(device)
    if chains:
        loka.convert(model, plan_everything(model, batches[0][0], linears=64))
    else:
        loka.convert(model, recipe="tensorwise", options=LinearOptions(scales="delayed"), module_filter_fn=lambda m, name: m.out_features > 1)  # fmt: skip
    return model, batches


@pytest.mark.parametrize("chains", [True, False], ids=["chains", "linears"])
def test_ending_a_step_is_what_an_optimizer_does(chains: bool) -> None:
    model, batches = make(torch.device("cpu"), chains)
    twin, _ = make(torch.device("cpu"), chains)
    assert timing._placed(model)
    assert any(isinstance(module, Linear) for module in model.modules()) != chains
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    for one, end in ((model, lambda: end_step(timing._placed(model))), (twin, optimizer.step)):
        for (inputs,), target in batches * 2:
            loss(one(inputs), target).mean().backward()
            end()
    for mine, theirs in zip(timing._placed(model), timing._placed(twin), strict=True):
        for a, b in zip(mine.remembered, theirs.remembered, strict=True):
            assert float(a.largest) > 0
            assert torch.equal(a.history, b.history)
    with torch.no_grad():  # a weight written by hand: the next forward sees it
        before = model(batches[0][0][0])
        for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
            linear.weight.data.mul_(0.5)
        end_step(timing._placed(model))
        assert not torch.equal(model(batches[0][0][0]), before)


def test_inputs_are_copied_unless_they_are_timed() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(x.mul_(2.0))

    x, y = torch.ones(3, 4), torch.zeros(3)
    task = Task(Writes(), [((x,), y), ((x.clone(),), y)], loss)
    task.mean_loss(task.model, task.kept[0])
    assert torch.equal(x, torch.ones(3, 4))
    task.mean_loss(task.model, task.kept[0], copied=False)
    assert torch.equal(x, torch.full((3, 4), 2.0))


@pytest.mark.gpu
@pytest.mark.parametrize("chains", [True, False], ids=["chains", "linears"])
def test_a_captured_step_quantises_its_weights(device: torch.device, chains: bool) -> None:
    """A weight that is changed between two replays changes what the second computes."""
    model, batches = make(device, chains)
    task = Task(model, batches, loss, autocast=torch.bfloat16)
    seen = torch.zeros((), device=device)
    inner = task.mean_loss

    def watched(*args: object, **kwargs: object) -> torch.Tensor:
        value = inner(*args, **kwargs)  # type: ignore[arg-type]
        seen.copy_(value.detach())
        return value

    task.mean_loss = watched  # type: ignore[method-assign]
    step = timing.whole_step(task, training=True, mode=None)
    step()
    first = float(seen)
    with torch.no_grad():
        for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
            linear.weight.mul_(0.25)
    step()
    assert abs(float(seen) - first) > 1e-4 * abs(first)
