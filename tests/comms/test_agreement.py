"""Ranks agree on one plan; a rank that is missing, fails or disagrees is named, and nobody hangs."""

import pytest

from comms.ranks import on_ranks
from loka.comms import Agreement


def test_statistics_meet_in_a_tree_and_the_plan_is_the_same_everywhere() -> None:
    world = 4
    results = on_ranks(world, "comms.jobs_agreement", "agree", 100_000)
    assert results[0]["total"] == world * (world + 1) // 2
    assert sorted(results[0]["ranks"]) == list(range(world))
    assert [r["whole"] for r in results] == [rank == 0 for rank in range(world)]
    assert [r["absorbed"] for r in results] == [2, 0, 1, 0]  # one at a time: rank 0 never sees rank 3's own state
    assert {r["plan"] for r in results} == {b"plan of rank 0"}
    assert {r["empty"] for r in results} == {b""}
    assert len({r["digest"] for r in results}) == 1


FAULTS = {
    "judge": "ZeroDivisionError",
    "raises": "no statistics here",
    "disagrees": "differs between ranks",
    "absent": "did not come",
    "killed": "did not come",
}


def test_the_culprit_is_named_on_every_rank_and_nobody_hangs() -> None:
    results = on_ranks(3, "comms.jobs_agreement", "faults", list(FAULTS), 2, dead=(2,))
    for result in results[:2]:
        for told, (kind, says) in zip(result, FAULTS.items(), strict=True):
            assert told["ranks"] == ((0,) if kind == "judge" else (2,)), (kind, told)
            assert says in told["message"]
            assert told["seconds"] < 12  # the limit is 3


def test_without_a_group_there_is_nothing_to_agree_in() -> None:
    with pytest.raises(ValueError, match="no process group"):
        Agreement()
