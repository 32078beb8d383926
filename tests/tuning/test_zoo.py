"""tune on models that know nothing of this package: it converts, its plan gives the same bits in a copy, and it takes everything back."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loka
from foreign_zoo import ZOO

from .small import MARGIN, same, state_of

CASES = [*((name, {}) for name in ZOO), ("dlrm", {"target": "serve"}), ("encoder", {"architecture": True})]
LAYOUT = {"dlrm": "fused_dots", "encoder": "attention_layout"}


def squares(output: Any, target: Tensor) -> Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return (output - target).square().reshape(len(target), -1).mean(1)


def trained(name: str) -> tuple[nn.Module, list[Any], torch.optim.Optimizer]:
    torch.manual_seed(0)
    make, inputs = ZOO[name]
    model, batches = make(), []
    for _ in range(6):
        given = tuple(inputs(48))
        with torch.no_grad():
            output = model(*given)
        batches.append((given, torch.randn_like(output[0] if isinstance(output, tuple) else output)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for given, target in batches:
        optimizer.zero_grad()
        squares(model(*given), target).mean().backward()
        optimizer.step()
    return model, batches, optimizer


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_models_of_others(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, batches, optimizer = trained(name)
    twin, before = copy.deepcopy(model), state_of(model, optimizer)
    tuned = loka.tune(model, batches, squares, margin=MARGIN, progress=False, out=tmp_path, **options)
    assert tuned.conversion is not None
    assert tuned.conversion.converted
    assert name not in LAYOUT or LAYOUT[name] in tuned.plan.mods
    loka.convert(
        twin, loka.Plan.load(tmp_path / "plan.json"), freeze=options.get("target") == "serve", example=batches[0][0]
    )
    with torch.no_grad():
        found, expected = (each.eval()(*batches[-1][0]) for each in (model, twin))
    assert same(found, expected)
    if "target" not in options:  # serving is taken back with its modes
        model.train()
    tuned.revert()
    assert same(state_of(model, optimizer), before)
