"""Formats beyond FP8: through Probe, plan and convert, with the errors their grids have."""

import pytest
import torch
from torch import nn

import loka
from loka.dispatch import RECIPES, USUAL
from loka.formats import dequantize, quantize

BEYOND = ("mxfp8", "nvfp4", "int8")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))


def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(256, 32, generator=generator)
    return x, (x[:, :1] + x[:, 1:2] * x[:, 2:3] > 0).float()


def train(model: nn.Module, steps: int, probe: loka.Probe | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        x, y = draw(step)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        optimizer.step()
        if probe is not None:
            probe.step(loss)


def test_they_are_scored_and_planned_only_where_named() -> None:
    assert not set(BEYOND) & set(USUAL)
    assert set(BEYOND) | set(USUAL) == set(RECIPES)


@pytest.mark.parametrize("recipe", BEYOND)
def test_a_converted_linear_computes_the_product_of_its_rounded_operands(recipe: str) -> None:
    layer, x = nn.Sequential(nn.Linear(32, 16)), torch.randn(8, 32)
    loka.convert(layer, recipe=recipe)
    operands = RECIPES[recipe].fprop
    rounded = dequantize(quantize(x, operands.a)) @ dequantize(quantize(layer[0].weight.detach(), operands.b)).T
    torch.testing.assert_close(layer(x), rounded + layer[0].bias, rtol=1e-5, atol=1e-5)
    assert str(operands.a) in str(layer[0])


def test_probe_to_plan_to_convert_tells_the_formats_apart() -> None:
    model = make_model()
    train(model, 60)
    probe = loka.Probe(model, every=2, stagger=1, recipes=BEYOND)
    train(model, 20, probe)
    report = probe.evaluate(BEYOND, samples=4)
    harms = {
        recipe: sum(c.harm.value for s in report.record.sites for c in s.candidates if c.recipe == recipe and c.gemm == "fprop")
        for recipe in BEYOND
    }  # fmt: skip
    assert harms["int8"] < harms["mxfp8"] < harms["nvfp4"]  # 7 bits of a row, 3 of a mantissa, 1
    plan = report.plan(min_speedup=None, margin=harms["mxfp8"], chains=False)
    used = {choice.a for site in plan.sites for choice in site.choices if choice.gemm == "fprop" and choice.a}
    assert "int8:row" in used
    assert not any(a.startswith("e2m1") for a in used)
    probe.detach()
    loka.convert(model, plan)
    train(model, 2)
