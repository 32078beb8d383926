"""Models as users write them from their papers (benchmarks/zoo_more.py), scaled down: how much of each runs in low precision and in which chains, and back again bit for bit."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import loka

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import zoo_more

# of the model's GEMM FLOPs, in training; and the longest chains, in training and in serving
EXPECTED: dict[str, tuple[float, list[str], list[str]]] = {
    "xdeepfm": (0.63, ["deep.0", "deep.1", "deep.2"], ["deep.0", "deep.1", "deep.2"]),
    "mmoe": (0.98, ["experts.0.0", "experts.0.2"], ["experts.2.0", "experts.2.2"]),
    "dcnlow": (0.99, ["v.1", "u.1"], ["deep.0", "deep.2"]),
    "gdcn": (0.99, ["mlp1", "mlp2"], ["g.0"]),
    "masknet": (0.99, ["blocks.1.mask.0", "blocks.1.mask.2"], ["top.0", "top.2"]),
    "twotower": (0.93, ["user_tower.0"], ["user_tower.0", "user_tower.3", "user_tower.6"]),
    "resmlp": (0.99, ["blocks.0.mlp.0", "blocks.0.mlp.2"], ["gate"]),
    "llama": (0.95, ["blocks.0.ffn.w1"], ["blocks.1.ffn.w3"]),
}


def result(model: nn.Module, inputs: tuple[Tensor, ...], *, training: bool) -> Tensor:
    """On a copy, because a batch norm keeps statistics."""
    with torch.no_grad():
        return copy.deepcopy(model).train(training)(*inputs)


@pytest.mark.parametrize("serving", [False, True], ids=["train", "serve"])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_further_model(name: str, serving: bool) -> None:
    torch.manual_seed(0)
    model, inputs = zoo_more.make(name, "cpu", torch.Generator().manual_seed(1), tiny=True)
    model.train(not serving)
    before = [result(model, inputs, training=training) for training in (False, True)]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    plan = loka.placing.plan_everything(model, inputs, mods=list(loka.mods.FREE), serving=serving, linears=64)
    share, *chains = EXPECTED[name]
    assert chains[serving] in [unit.linears for unit in plan.units]
    done = loka.convert(model, plan, example=inputs, freeze=serving)
    assert done.low_precision_share is not None
    assert done.low_precision_share >= share
    with torch.set_grad_enabled(not serving):
        found = model(*inputs)
    if serving:
        assert float((found - before[0]).norm() / before[0].norm()) < 0.2
    else:
        found.square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())
    loka.revert(model)
    model.load_state_dict(state)  # statistics of batch norms
    for training, expected in zip((False, True), before, strict=True):
        assert torch.equal(result(model, inputs, training=training), expected)
