from comms.ranks import on_ranks
from loka.training import find_checkpoints
from loka.training.ranks import Ranks


def test_a_single_process_is_rank_0_of_1():
    assert Ranks.find() == Ranks(0, 1)


def test_two_processes_train_one_model_and_only_rank_0_saves(tmp_path):
    """Gloo on the CPU: sparse and dense gradients are averaged, evaluation is shared, both end with equal weights."""
    weights = on_ranks(2, "training.child", "train_together", str(tmp_path))
    assert weights[0] == weights[1]
    assert find_checkpoints(tmp_path / "rank0" / "checkpoints")[-1].name == "step-00000060"
    assert (tmp_path / "rank0" / "log.jsonl").exists()
    assert not (tmp_path / "rank1").exists()
