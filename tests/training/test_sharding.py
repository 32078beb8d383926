"""Sharded tables under DMP, dense parts under FSDP2 and DDP: the model of one process, one plan, checkpoints that fit another number of ranks. The whole matrix is `make test-scale`."""

from pathlib import Path
from typing import Any

import pytest
import torch

import loka
from comms.ranks import on_ranks
from loka.nn.tables import quantize_tables
from loka.records import Plan, from_json, to_json
from loka.training import Trainer
from loka.training.sharding import Distribution, spread_model

from .jobs_sharded import HALF, Probing, digest, judge, keep_half, make_data, make_model, settings

JOBS = "training.jobs_sharded"
CODECS = ("e4m3:1x32:e8m0", "e5m2:1x32:e8m0")


def alone() -> tuple[bytes, dict[str, torch.Tensor], dict[str, float], torch.nn.Module]:
    """Probe, plan, convert and train in one process."""
    data, probing = make_data(), Probing()
    model = make_model(data)
    Trainer(model, data, settings(3), callbacks=[probing]).fit()
    plan = judge(probing.probe)
    model = make_model(data)
    quantize_tables(model, rows="float32")  # the same rowwise Adagrad, on one table
    loka.convert(model, plan)
    trainer = Trainer(model, data, settings())
    trainer.fit()
    return to_json(plan), model.state_dict(), trainer.evaluate(data.test), model


def check(world: int, other: int, how: dict[str, Any], folder: Path, timeout: float = 180) -> dict[str, Any]:
    """One case of the matrix; what it found."""
    mine, weights, metrics, plain = alone()
    whole = str(folder / "whole")
    ranks = on_ranks(world, JOBS, "journey", whole, how, mine, timeout=timeout)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert len({digest(rank["weights"]) for rank in ranks}) == 1
    first = ranks[0]
    plan = from_json(first["plan"], Plan)
    loka.revert(plain)
    assert sorted(loka.convert(plain, plan).converted) == first["converted"] == first["foreign"] != []
    assert first["start"].keys() == weights.keys()
    torch.testing.assert_close(first["test"]["ne"], metrics["ne"], rtol=2e-2, atol=0)
    keep_half(whole, folder / "same")
    keep_half(whole, folder / "other")
    (same, *_) = on_ranks(world, JOBS, "resume", str(folder / "same"), how, first["plan"], timeout=timeout)
    (moved, *_) = on_ranks(other, JOBS, "resume", str(folder / "other"), how, first["plan"], timeout=timeout)
    assert same["resumed"] == moved["resumed"] == HALF
    assert digest(same["weights"]) == digest(first["weights"]), (
        "a resumed run ends with the bits of one that was not stopped"
    )
    assert digest(same["restored"]) == digest(moved["restored"]) != digest(first["start"])
    torch.testing.assert_close(moved["test"]["ne"], first["test"]["ne"], rtol=2e-2, atol=0)
    return {
        "plan": first["digest"], "checkpoint": digest(same["restored"]), "ne_one_process": metrics["ne"], "ne": first["test"]["ne"],
        "ne_other_ranks": moved["test"]["ne"], "wire": first["wire"], "embedding_bytes_per_element": first["embedding_wire"],
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["fsdp", "ddp"])
def test_the_whole_journey_without_torchrec(dense: str, tmp_path: Path) -> None:
    """Tables on every rank, in int8; the dense part encoded. Runs wherever torch does."""
    found = check(2, 1, {"rows": "int8:row", "dense": dense, "collectives": "e4m3:1x128:pow2"}, tmp_path)
    assert found["wire"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "dense"), [("row", "fsdp"), ("column", "ddp")])
def test_the_whole_journey_with_sharded_tables(sharding: str, dense: str, tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed: pip install 'loka[torchrec]'")
    found = check(2, 4, {"sharding": sharding, "dense": dense, "embeddings": CODECS}, tmp_path)
    assert found["embedding_bytes_per_element"] <= 1.04


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "dense"), [("table", "ddp"), ("row", "fsdp"), (None, "ddp")])
def test_ranks_train_the_model_of_one_process(sharding: str | None, dense: str) -> None:
    """Column-wise is left out: its rowwise Adagrad keeps a number for each stretch of a row."""
    if sharding is not None:
        pytest.importorskip("torchrec", reason="TorchRec is not installed: pip install 'loka[torchrec]'")
    data = make_data()
    model = make_model(data)
    trainer = Trainer(model, data, settings())
    trainer.fit()
    (first, second) = on_ranks(2, JOBS, "train", {"sharding": sharding, "dense": dense})
    assert digest(first["weights"]) == digest(second["weights"])
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(first["weights"][name], weight, rtol=1e-3, atol=1e-4)
    assert first["test"]["ne"] == pytest.approx(trainer.evaluate(data.test)["ne"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sharding": "diagonal"}, "table, row, column"),
        ({"dense": "zero3"}, "fsdp, ddp"),
        ({"sharding": "row", "rows": "int8:row"}, "float32 rows only"),
        ({"embeddings": CODECS}, "sharded"),
        ({"collectives": "e9m9:1x128"}, "e9m9"),
        ({"columns": 0}, "at least 1"),
        ({"rows": "int4:row"}, "cannot be trained"),
        ({"rows": "int8"}, "FORMAT:BLOCK"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Distribution(**options)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"diagonal.*zero3"):
        Distribution(sharding="diagonal", dense="zero3")


def test_sharding_needs_torchrec_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torchrec.distributed.model_parallel", None)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"pip install 'loka\[torchrec\]'"):
        spread_model(model, Distribution(sharding="row"), learning_rate=0.1, device=torch.device("cpu"), clock=None)
