import pytest

from comms.ranks import on_ranks
from loka.training import find_checkpoints
from loka.training.ranks import Ranks


def test_a_single_process_is_rank_0_of_1():
    assert Ranks.find(None, None) == Ranks(0, 1, False)
    assert Ranks.find(1, 2) == Ranks(1, 2, False)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (None, 2), (0, None)])
def test_impossible_ranks_are_refused(rank, world):
    with pytest.raises(ValueError, match="rank"):
        Ranks.find(rank, world)


def test_two_processes_train_one_model_and_only_rank_0_saves(tmp_path):
    """Gloo on the CPU: sparse and dense gradients are averaged, evaluation is shared, both end with equal weights."""
    weights = on_ranks(2, "training.child", "train_together", str(tmp_path))
    assert weights[0] == weights[1]
    assert find_checkpoints(tmp_path / "rank0" / "checkpoints")[-1].name == "step-00000060"
    assert (tmp_path / "rank0" / "log.jsonl").exists()
    assert not (tmp_path / "rank1").exists()
