"""No broken kernel survives both gates; the right one passes them; and most broken ones would have passed the usual test."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def inspections() -> Any:
    sys.path.insert(0, str(FOLDER))
    kernels = importlib.import_module("planted_kernels")
    site = kernels.make_hard_site()
    yield {planted.name: kernels.inspect(planted, site, samples=5) for planted in kernels.PLANTED}
    sys.path.remove(str(FOLDER))
    sys.modules.pop("planted_kernels")


def test_a_broken_kernel_is_rejected(inspections: dict[str, Any]) -> None:
    assert len(inspections) >= 11
    assert [name for name, found in inspections.items() if not found.rejected_by] == ["none"]


def test_the_right_one_passes_everywhere(inspections: dict[str, Any]) -> None:
    right = inspections["none"]
    assert right.rejected_by == ()
    assert right.looks_fine


def test_conformance_finds_what_an_error_bound_cannot(inspections: dict[str, Any]) -> None:
    for name in ("stale scale", "bf16 partial sums", "flushed subnormals"):
        assert inspections[name].rejected_by == ("conformance",)


def test_learned_distributions_find_what_normal_inputs_hide(inspections: dict[str, Any]) -> None:
    hidden = [f for f in inspections.values() if f.looks_fine and "learned distributions" in f.rejected_by]
    assert {"overflow", "lost K tail", "wrapped rows"} <= {f.planted.name for f in hidden}


def test_most_of_them_look_fine_on_normal_inputs(inspections: dict[str, Any]) -> None:
    assert sum(found.looks_fine for name, found in inspections.items() if name != "none") >= 5
