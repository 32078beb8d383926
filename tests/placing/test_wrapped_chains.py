"""Chains under DistributedDataParallel and FSDP2, placed before and after wrapping: two gloo processes against plain copies."""

import pytest

from comms.ranks import on_ranks


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[dict]]:
    by_rank = on_ranks(2, "placing.chains_child", "compare_all")
    return {rows[0]["case"]: list(rows) for rows in zip(*by_rank, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("case", [f"{kind} {when}" for kind in ("ddp", "fsdp") for when in ("before", "after")])
def test_a_wrapped_model_trains_as_the_plain_one(case: str, outcomes: dict[str, list[dict]]) -> None:
    for row in outcomes[case]:
        # the same chain in the same steps, and the mean of two numbers is exact: one value that FP8 rounds apart would show as 1e-3
        assert row["worst"] < 1e-6, row
        assert row["chains"] == ["first.0", "second.0"]
        assert row["reverted"] == 4
        assert row["plain"]
        assert row["finite"]
        assert row["histories"] == 3 * (2 + 4) + 2  # of each chain also its steps


@pytest.mark.slow
def test_ranks_decide_alike(outcomes: dict[str, list[dict]]) -> None:
    one, other = outcomes["guard"]
    assert one == other
    assert "first.0" in one["sites"]
    assert "first.0" not in one["left"]


@pytest.mark.slow
def test_linears_sharded_apart_are_refused_and_nothing_is_changed(outcomes: dict[str, list[dict]]) -> None:
    for row in outcomes["apart"]:
        assert "first.0: has hooks" in row["refused"]
        assert row["same"]
        assert "first.3 is sharded separately from the rest of its chain" in row["said"]
