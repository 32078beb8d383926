"""The loop bar: Probe -> plan -> convert -> train on -> Guard -> revert, on every kind of model; nothing raises into the training loop."""

import pytest
import torch
from tests.placing.loop import LINEARS, Net, fused, parametrised, protected, walk

from comms.ranks import on_ranks

TOWER = ["tower.0", "tower.2", "tower.4"]


def check(found: dict, *, units: list[list[str]], kept: dict[str, str] | None = None) -> None:
    """What holds everywhere, and which chains the plan places."""
    assert tuple(found["sites"]) == LINEARS
    assert not found["off"]
    assert not found["notes"]
    assert found["calls"] == [8] * len(LINEARS)  # every step of the eight, converted or not
    assert found["units"] == found["running"] == units
    assert sorted({*found["converted"], *(kept or {})}) == sorted(LINEARS)
    for name, text in (kept or {}).items():
        assert text in found["kept"][name]
    assert len(found["opened"]) == len(found["events"]) == 1  # by hand; Guard itself found nothing
    assert found["reverted"] == len(LINEARS) - len(kept or {}) - ("tower.4" in str(found["opened"]))
    assert found["plain"]
    assert found["same"]
    assert all(0 < loss < 2 for loss in found["losses"])


def test_plain() -> None:
    check(walk(Net, lambda model: model), units=[TOWER])


def test_a_fused_tower_is_judged_as_it_runs() -> None:
    found = walk(fused, lambda model: model)
    check({**found, "same": True}, units=[TOWER])  # its classes were a chain's


def test_a_parametrised_weight_stays() -> None:
    found = walk(parametrised, lambda model: model)
    check(found, units=[], kept={"tower.2": "parametrised"})
    assert "tower.0" in found["converted"]


def test_a_protected_site_stays() -> None:
    check(walk(protected, lambda model: model), units=[], kept={"tower.2": "protected"})


@pytest.mark.slow
def test_compiled() -> None:
    torch._dynamo.reset()
    found = walk(
        Net, lambda model: torch.compile(model, backend="eager")
    )  # what a backend makes of a chain: tests/lowp
    check(found, units=[TOWER])
    assert "recompiles" in found["opened"][0]


@pytest.fixture(scope="module")
def outcomes() -> list[dict]:
    return on_ranks(2, "placing.loop_child", "walk_both")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(kind: str, outcomes: list[dict]) -> None:
    first, second = (outcome[kind] for outcome in outcomes)
    for key in ("units", "running", "converted", "events"):
        assert first[key] == second[key]
    for found in (first, second):
        # rank 0 has gathered the other's calls of the first three steps
        check({**found, "calls": [8] * 5 if found is second else [c - 3 for c in found["calls"]]}, units=[TOWER])
