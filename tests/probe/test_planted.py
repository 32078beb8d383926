"""No broken kernel survives both gates; the right one passes them; and most broken ones would have passed the usual test."""

import pytest

from loka.probe.planted import PLANTED, Inspection, Planted, inspect, make_hard_site
from loka.probe.watch import Watch

BROKEN = [planted for planted in PLANTED if planted.name != "none"]


@pytest.fixture(scope="module")
def site() -> Watch:
    return make_hard_site()


@pytest.fixture(scope="module")
def inspections(site: Watch) -> dict[str, Inspection]:
    return {planted.name: inspect(planted, site, samples=5) for planted in PLANTED}


def test_there_are_enough_and_they_differ() -> None:
    assert len(BROKEN) >= 6
    assert len({planted.name for planted in PLANTED}) == len(PLANTED)


@pytest.mark.parametrize("planted", BROKEN, ids=lambda planted: planted.name.replace(" ", "-"))
def test_a_broken_kernel_is_rejected(planted: Planted, inspections: dict[str, Inspection]) -> None:
    assert inspections[planted.name].rejected_by


def test_the_right_one_passes_everywhere(inspections: dict[str, Inspection]) -> None:
    right = inspections["none"]
    assert right.rejected_by == ()
    assert right.looks_fine


def test_conformance_finds_what_an_error_bound_cannot(inspections: dict[str, Inspection]) -> None:
    for name in ("stale scale", "bf16 partial sums", "flushed subnormals"):
        assert inspections[name].rejected_by == ("conformance",)


def test_learned_distributions_find_what_normal_inputs_hide(inspections: dict[str, Inspection]) -> None:
    hidden = [f for f in inspections.values() if f.looks_fine and "learned distributions" in f.rejected_by]
    assert {"overflow", "lost K tail", "wrapped rows"} <= {f.planted.name for f in hidden}


def test_most_of_them_look_fine_on_normal_inputs(inspections: dict[str, Inspection]) -> None:
    assert sum(inspections[planted.name].looks_fine for planted in BROKEN) >= 5
