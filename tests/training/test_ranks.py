import os
import subprocess
import sys
from pathlib import Path

import pytest

from loka.training import find_checkpoints
from loka.training.ranks import Ranks

TESTS = Path(__file__).parents[1]


def test_a_single_process_is_rank_0_of_1():
    assert Ranks.find(None, None) == Ranks(0, 1, False)
    assert Ranks.find(1, 2) == Ranks(1, 2, False)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (None, 2), (0, None)])
def test_impossible_ranks_are_refused(rank, world):
    with pytest.raises(ValueError, match="rank"):
        Ranks.find(rank, world)


def test_two_processes_train_one_model_and_only_rank_0_saves(tmp_path):
    """Gloo on the CPU: sparse and dense gradients are averaged, evaluation is shared, both end with equal weights."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "training.child"]
    children = [
        subprocess.Popen(
            [
                *command,
                str(tmp_path / f"rank{rank}"),
                "--rank",
                str(rank),
                "--world",
                "2",
                "--rendezvous",
                str(tmp_path / "meet"),
            ],
            cwd=TESTS,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [child.communicate(timeout=250) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    weights = [line for out, _ in outputs for line in out.splitlines() if line.startswith("weights")]
    assert len(weights) == 2
    assert weights[0] == weights[1]
    assert find_checkpoints(tmp_path / "rank0" / "checkpoints")[-1].name == "step-00000060"
    assert (tmp_path / "rank0" / "log.jsonl").exists()
    assert not (tmp_path / "rank1").exists()
