"""Kernels drawn at random by benchmarks/defects_kernels.py, shown to Probe as engines: none gets an error, a verdict or a place in a plan, correct ones do."""

import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loka
from loka.dispatch import recipe_named
from loka.formats import quantize as quantize_by_law
from loka.kernels.scaled_mm import MatmulCall, reference
from loka.probe import Engine

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = ("defects", "defects_kernels", "defects_correct", "defects_quantizers")
ROWS, K, N = 600, 48, 40


@pytest.fixture(scope="module")
def generator() -> Iterator[dict[str, Any]]:
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in NAMES}
    sys.path.remove(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def probe() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU())
    found = loka.Probe(model, every=1)
    model(torch.randn(ROWS, K)).square().sum().backward()
    found.step()
    return found


def engine(kernel: Any, name: str = "drawn") -> Engine:
    return Engine(name, quantize_by_law, kernel)


def evaluate(probe: Any, engines: list[Engine], recipe: str = "rowwise") -> Any:
    return probe.evaluate([recipe], samples=2, backends=engines)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_no_drawn_defect_gets_through(generator: dict[str, Any], probe: Any, recipe: str) -> None:
    operands = recipe_named(recipe).fprop
    assert operands is not None
    call = MatmulCall(ROWS, K, N, operands.a, operands.b, torch.float32, operands.fast_accum)
    rng = random.Random(recipe)
    drawn: dict[str, Any] = {}
    for number in range(20):
        draw = rng.choice(generator["defects_kernels"].FAMILIES)(rng, call)
        if generator["defects"].shows(draw, call, number):
            drawn.setdefault(draw.text, draw)
    assert len(drawn) >= 12
    report = evaluate(probe, [engine(draw.make(), text) for text, draw in drawn.items()], recipe)
    fprop = [c for c in report.record.sites[0].candidates if c.gemm == "fprop"]
    assert len(fprop) == len(drawn)
    assert [c.backend for c in fprop if not (c.refusal and "conformance" in c.refusal)] == []
    assert all(c.mere is None and not c.errors and c.speed_note is None for c in fprop)


def test_correct_draws_are_evaluated(generator: dict[str, Any], probe: Any) -> None:
    operands = recipe_named("rowwise").fprop
    assert operands is not None
    rng = random.Random(0)
    call = MatmulCall(ROWS, K, N, operands.a, operands.b, torch.float32, operands.fast_accum)
    kernels = [generator["defects_correct"].draw_correct(rng, call)[2] for _ in range(4)]
    report = evaluate(probe, [engine(kernel, f"drawn {number}") for number, kernel in enumerate(kernels)])
    drawn = [c for c in report.record.sites[0].candidates if c.backend.startswith("drawn")]
    assert len(drawn) >= len(kernels)
    assert all(c.refusal is None and c.relative_l2 is not None for c in drawn)


@pytest.mark.parametrize("change", ["zeros beyond 512", "row scales that wrap at 512", "duplicate rows"])
def test_a_plan_for_accuracy_alone_cannot_take_them(probe: Any, change: str) -> None:
    """The three kernels that passed while the gate looked at 256 rows."""

    class Wrong:
        def supports(self, call: Any, device: Any) -> Any:
            return reference.supports(call, device)

        def run(self, a: Any, b: Any, **options: Any) -> torch.Tensor:
            out = reference.run(a, b, **options)
            if change == "zeros beyond 512":
                out[512:] = 0
            elif change == "duplicate rows":
                _, place, count = torch.unique(a.data.view(torch.uint8), dim=0, return_inverse=True, return_counts=True)
                out[count[place] > 1] = 0
            elif len(out) > 512:
                out[512:] *= (a.scale[: len(out) - 512] / a.scale[512:]).to(out.dtype)
            return out

    report = evaluate(probe, [engine(Wrong())])
    (fprop,) = [c for c in report.record.sites[0].candidates if c.gemm == "fprop"]
    assert fprop.refusal is not None
    assert "conformance" in fprop.refusal
    (choice,) = [c for c in report.plan(min_speedup=None).sites[0].choices if c.gemm == "fprop"]
    assert choice.backend == "high"
    assert "conformance" in choice.reason
