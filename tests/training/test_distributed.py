"""Training on several processes: the run of one process, checkpoints that resume bit for bit and with another number of ranks, faults survived."""

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.run

from comms.ranks import on_ranks
from forked import finish, start
from loka import cli
from loka.nn.tables import quantize_tables
from loka.training import TrainConfig, Trainer, distributed
from loka.training.distributed import joined, share_of

from .jobs_distributed import hstu_config, make_hstu, make_table_plan, ragged_task, uneven
from .toy import assert_same_bits, make_data, make_model

JOB = ("training.jobs_distributed", "train")


def alone(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    model = make_model(dropout=0.0)
    quantize_tables(model, rows="float32")
    config = TrainConfig(
        steps=steps, batch_size=48, device="cpu", log_every=5, clip_norm=1.0, learning_rate=1e-2, compile="off"
    )
    trainer = Trainer(model, make_data(), config)
    trainer.fit()
    return model.state_dict(), {**trainer.evaluate(), "uneven": trainer.evaluate(uneven())["ne"]}


def test_two_ranks_train_the_model_of_one_process() -> None:
    results = on_ranks(2, *JOB, None, 12, "float32", None, False)
    weights, metrics = alone(12)
    for name, weight in weights.items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-4, atol=1e-5)
        assert torch.equal(results[0]["weights"][name], results[1]["weights"][name])
    assert results[0]["examples"] == 12 * 48
    assert 0 < results[0]["seconds"] < 120  # of training, not since the machine was started
    assert results[0]["valid"]["ne"] == pytest.approx(metrics["ne"], rel=1e-4)
    assert results[0]["uneven"]["ne"] == pytest.approx(metrics["uneven"], rel=1e-4)
    assert results[0]["uneven"] == results[1]["uneven"]


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits_and_with_another_number_of_ranks(tmp_path: Path) -> None:
    """int8 rows and encoded collectives; rank 1 dies by SIGKILL in step 9, after the checkpoint of step 8."""
    rows, codec = "int8:row", "e4m3:1x128:pow2:stochastic"
    straight = on_ranks(2, *JOB, str(tmp_path / "straight"), 12, rows, codec, False)
    broken = str(tmp_path / "broken")
    with pytest.raises(AssertionError, match="rank 0 ended with"):
        on_ranks(2, *JOB, broken, 12, rows, codec, False, (9, 1), dead=(1,))
    resumed = on_ranks(2, *JOB, broken, 12, rows, codec, True)
    assert resumed[0]["resumed"] == 8
    assert_same_bits(straight[0]["weights"], resumed[0]["weights"])
    assert resumed[0]["examples"] == straight[0]["examples"]
    assert resumed[0]["wire"] > 0
    (more,) = on_ranks(1, *JOB, str(tmp_path / "straight"), 16, rows, codec, True)
    assert more["resumed"] == 12
    assert more["examples"] == 16 * 48
    assert more["loss"] < straight[0]["loss"] * 1.2


def test_a_share_is_a_stretch_of_the_batch() -> None:
    from loka.data.batch import Batch, Jagged

    sequences = {"h": Jagged.from_rows([[1, 2], [], [3], [4, 5, 6]])}
    batch = Batch(
        dense=torch.arange(4.0).view(4, 1),
        categorical=torch.arange(4).view(4, 1),
        sequences=sequences,
        labels=torch.ones(4, 1),
        group=torch.arange(4),
    )
    second = share_of(batch, 1, 2)
    assert second.dense.flatten().tolist() == [2.0, 3.0]
    assert second.sequences["h"].values.tolist() == [3, 4, 5, 6]
    assert second.sequences["h"].offsets.tolist() == [0, 1, 4]
    with pytest.raises(ValueError, match="cannot be shared equally"):
        share_of(batch, 0, 3)


def test_a_group_outlives_the_models_that_use_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a DDP model is the last to hold it, gloo's threads and Python's lock may wait for each other: left, it is still held."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    begin = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda kind, timeout: begin(kind, init_method=f"file://{tmp_path}/store", rank=0, world_size=1))  # fmt: skip
    with joined("gloo"):
        world = dist.group.WORLD
    assert not dist.is_initialized()
    assert any(group is world for group in distributed._JOINED)


def test_without_torchrun_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="torchrun"), joined():
        pass


@pytest.mark.slow
def test_the_command_trains_and_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    def words(steps: int) -> list[str]:
        return [
            "train", "--distributed", "--data", "synthetic", "--data-option", "rows=4000", "--model", "dlrm", "--steps", str(steps), "--batch-size", "64", "--evaluate-every", "0",
            "--checkpoint-every", "3", "--rows", "int8:row", "--collectives", "e4m3:1x128:pow2", "--out", str(tmp_path / "run"),
        ]  # fmt: skip

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    said = [tmp_path / f"said.{rank}" for rank in range(2)]
    ranks = []
    for rank in range(2):  # as torchrun starts them
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}  # fmt: skip
        ranks.append(start(cli.main, words(3), said=said[rank], environment=told))
    assert [finish(rank, 250) for rank in ranks] == [0, 0], said[0].read_text()[-3000:]
    assert "".join(file.read_text() for file in said).count("test  ") == 1, "only rank 0 speaks"
    torchrun = ["--standalone", "--nproc-per-node=1", "-m", "loka", *words(5), "--resume"]
    assert finish(start(torch.distributed.run.main, torchrun, said=said[0]), 250) == 0, said[0].read_text()[-3000:]
    assert '"resumed_from": 3' in (tmp_path / "run" / "result.json").read_text()


def test_two_ranks_train_the_hstu_of_one_process(tmp_path: Path) -> None:
    """Ragged shares: a rank counts by its predictions. Two ranks write a checkpoint, and go on from it with the same bits."""
    task, model = ragged_task(), make_hstu()
    Trainer(model, task, hstu_config(6), loss_fn=task.loss).fit()
    job = ("training.jobs_distributed", "train_hstu")
    first = on_ranks(2, *job, str(tmp_path / "run"), 6, "fsdp", False)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(first[0]["weights"][name], weight, rtol=1e-3, atol=1e-4)
    (last,) = (tmp_path / "run").rglob("step-00000006")
    last.rename(tmp_path / "gone")
    again = on_ranks(2, *job, str(tmp_path / "run"), 6, "fsdp", True)
    assert again[0]["resumed"] == 3
    assert_same_bits(again[0]["weights"], first[0]["weights"])


@pytest.mark.parametrize("dense", ["fsdp", "ddp"])
def test_a_plan_with_tables_and_collectives_is_placed_and_taken_back(dense: str) -> None:
    found = on_ranks(2, "training.jobs_distributed", "train_planned", dense, make_table_plan())[0]
    assert set(found["kinds"]) == {"int8:row"}
    assert any(("FSDP2 sends" if dense == "fsdp" else "sends no weights") in note for note in found["notes"])
    elements, sent = found["wire"]["reduce_scatter"]
    assert sent < 0.5 * 4 * elements
    assert not found["encoding"]
