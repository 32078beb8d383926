"""A few of the generated kernels: every family is refused, correct ones pass, and the generator counts nothing that is harmless. The full run is benchmarks/defects.py."""

import argparse
import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loka.formats import Spec
from loka.kernels.quantize.call import QuantizeCall
from loka.kernels.scaled_mm.call import MatmulCall
from loka.measure import judge_backend, judge_quantizer

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = ("defects", "defects_kernels", "defects_correct", "defects_quantizers")
LIMITS = (160, 96, 96)
ROW = Spec.parse("e4m3:row")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    sys.path.insert(0, str(FOLDER))
    yield {name: importlib.import_module(name) for name in NAMES}
    sys.path.remove(str(FOLDER))
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("number", range(21))
def test_every_family_is_refused(modules: dict[str, Any], number: int) -> None:
    families = modules["defects_kernels"].FAMILIES
    assert len(families) == 21
    rng = random.Random(number)
    for seed in range(40):
        call = modules["defects_kernels"].draw_call(rng, LIMITS)
        draw = families[number](rng, call)
        if modules["defects"].shows(draw, call, seed):
            break
    else:
        pytest.fail("forty draws and no defect")
    verdict = judge_backend("scaled_mm", draw.make(), call, "cpu")
    assert not verdict, f"{draw.family}: {draw.text} at {call}"


@pytest.mark.parametrize("index", range(12))
def test_defective_quantisers_are_refused(modules: dict[str, Any], index: int) -> None:
    rng = random.Random(index)
    for _ in range(40):
        draw = modules["defects_quantizers"].draw_quantizer(rng, 70, 50, ROW)
        if modules["defects_quantizers"].spoils(draw.make(), draw.inputs(index), ROW):
            break
    assert not judge_quantizer(draw.make(), QuantizeCall(70, 50, ROW, torch.float32), "cpu"), draw.text


@pytest.mark.parametrize("index", range(20))
def test_correct_kernels_pass(modules: dict[str, Any], index: int) -> None:
    row = modules["defects"].judge_correct(3, index, LIMITS)
    assert not row["refused"], row


def test_what_changes_nothing_is_not_counted(modules: dict[str, Any]) -> None:
    kernels = modules["defects_kernels"]
    call = MatmulCall(32, 64, 32, ROW, ROW, torch.bfloat16)
    harmless = kernels.Draw("none", "nothing", kernels.Kernel, kernels.show_plain)
    assert not modules["defects"].shows(harmless, call, 0)
    faint = kernels.Draw(
        "faint",
        "off by 1e-4",
        lambda: kernels.Struck((slice(None), slice(None)), lambda p, w: p * 1.0001),
        kernels.show_plain,
    )
    assert not modules["defects"].shows(faint, call, 0)
    strong = kernels.Draw(
        "strong",
        "off by 0.1",
        lambda: kernels.Struck((slice(31, None), slice(None)), lambda p, w: p * 1.1),
        kernels.show_plain,
    )
    assert modules["defects"].shows(strong, call, 0)


def test_cases_are_functions_of_their_seed_and_runs_carry_on(modules: dict[str, Any], tmp_path: Path) -> None:
    defects = modules["defects"]
    options = argparse.Namespace(seed=5, count=2, limits=(40, 32, 32), device="cpu", workers=1)
    rows = {
        "defects": [defects.judge_defect(5, 0, (40, 32, 32))],
        "correct": [defects.judge_correct(5, 0, (40, 32, 32))],
    }
    again = defects.judge_defect(5, 0, (40, 32, 32))
    assert {k: v for k, v in again.items() if k != "seconds"} == {
        k: v for k, v in rows["defects"][0].items() if k != "seconds"
    }
    defects.save(tmp_path / "out.json", rows, options)
    assert defects.load(tmp_path / "out.json", options) == rows
    options.seed = 6
    with pytest.raises(SystemExit, match="seed 5"):
        defects.load(tmp_path / "out.json", options)
    found = defects.summarise(rows)
    assert (found["defects"], found["defects_refused"], found["correct"], found["correct_refused"]) == (1, 1, 1, 0)
