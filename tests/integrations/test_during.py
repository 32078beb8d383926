"""Tune inside other people's loops: the core under a loop of one's own and under fakes with the frameworks' protocols, and the frameworks themselves where they are installed."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka
from comms.ranks import on_ranks
from loka.integrations import TuneDuringTraining, hf_callback, lightning_callback
from loka.lowp import GuardConfig
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of
from loka.records import TablePlan, UnitEvidence
from loka.units import placed_tables
from tuning.small import MARGIN, Ranker, loss, make_batches, placed


def converted(model: nn.Module) -> bool:
    return bool(list(chains_of(model)) or list(linears_of(model)))


def make(out: Path, after: int = 30, **options: Any) -> TuneDuringTraining:
    given = {"margin": MARGIN, "progress": False, **options}
    return TuneDuringTraining(make_batches, after=after, step=lambda m, b: loss(m(b[0]), b[1]), out=out, **given)


def loop(model: nn.Module, tuning: TuneDuringTraining, steps: int, *, accumulate: int = 1, first: int = 0) -> list[float]:  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    batches = make_batches((first + steps) * accumulate, seed=3)[first * accumulate :]
    losses = []
    for step in range(steps):
        tuning.begin_step(model)
        optimizer.zero_grad()
        for x, y in batches[step * accumulate : (step + 1) * accumulate]:
            value = loss(model(x), y).mean() / accumulate
            value.backward()
        optimizer.step()
        losses.append(float(value.detach()) * accumulate)
        tuning.end_step(model)
    return losses


def test_a_loop_of_ones_own_is_tuned_once_and_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tuning = Ranker(), make(tmp_path)
    parameters = [id(p) for p in model.parameters()]
    loop(model, tuning, 29)
    assert not converted(model)
    torch.manual_seed(0)
    model, tuning = Ranker(), make(tmp_path)
    losses = loop(model, tuning, 45, accumulate=2)
    assert converted(model)
    assert model.training
    assert tuning.tuned.conversion is not None
    assert sum(losses[-10:]) < sum(losses[:10])
    assert len(parameters) == len(list(model.parameters()))
    assert {path.name for path in tmp_path.iterdir()} >= {"plan.json", "tuning.json", "report.html"}


def test_a_resumed_run_places_the_plan_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ranker()
    loop(model, make(tmp_path), 31)
    assert converted(model)
    again, other = Ranker(), make(tmp_path)
    again.load_state_dict(model.state_dict())
    assert not make(tmp_path).resume(Ranker(), 10), "not behind the step yet"
    assert other.resume(again, 31)
    assert [name for name, _ in chains_of(again)] == [name for name, _ in chains_of(model)]
    loop(again, other, 3, first=31)
    assert other.tuned is None, "it was tuned before"


def test_a_run_that_ended_before_it_was_tuned_is_tuned_late(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, tuning = Ranker(), make(tmp_path, after=4)
    loop(model, make(tmp_path / "other", after=99), 30)
    assert not tuning.resume(model, 30)
    assert "plan.json" in caplog.text
    loop(model, tuning, 2)
    assert tuning.tuned is not None
    assert converted(model)


def test_resuming_leaves_no_trace_of_the_batch_that_it_is_tried_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ranker()
    loop(model, make(tmp_path), 31)
    assert loka.Plan.load(tmp_path / "plan.json").mods
    again = Ranker()
    again.load_state_dict(model.state_dict())
    before = torch.get_rng_state()
    assert make(tmp_path).resume(again, 31)
    assert again.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(again.buffers(), model.buffers(), strict=True))


def test_what_guard_switched_stays_switched_in_a_resumed_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tuning = Ranker(), make(tmp_path)
    loop(model, tuning, 31)
    tuning._guard.config = GuardConfig(max_error=1e-6, every=1)
    loop(model, tuning, 1)
    switched = {event.site for event in tuning.events if event.action == "switched"}
    assert switched
    again, other = Ranker(), make(tmp_path)
    again.load_state_dict(model.state_dict())
    other.resume(again, 32)
    assert switched.isdisjoint(placed(again))
    loop(Ranker(), make(tmp_path), 31)
    assert not (tmp_path / "guard.json").exists(), "of an earlier run"


def test_tables_of_a_plan_are_placed_again(tmp_path: Path) -> None:
    model = nn.Sequential(nn.EmbeddingBag(50, 64), nn.Linear(64, 1))
    tables = [TablePlan(name="0", rows="int8:row", count=50, width=64, bytes=3400, float32_bytes=12800, evidence=UnitEvidence(), reason="")]  # fmt: skip
    plan = loka.placing.plan_everything(model, torch.zeros(2, 3, dtype=torch.int64), linears=1)
    msgspec.structs.replace(plan, units=[], sites=[], tables=tables, seal=None).save(tmp_path / "plan.json")
    assert make(tmp_path).resume(model, 31)
    assert placed_tables(model) == ["0"]


def test_a_model_that_is_converted_already_is_guarded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ranker()
    loop(model, make(tmp_path), 31)
    other = make(tmp_path)
    assert not other.resume(model, 31)
    assert other._guard is not None


def test_ranks_convert_by_one_plan(tmp_path: Path) -> None:
    found = on_ranks(2, "integrations.jobs_during", "tune_with_other_batches", str(tmp_path))
    assert found[0]["placed"]
    assert found[0]["placed"] == found[1]["placed"]
    assert [rank["tuned"] for rank in found] == [True, False]
    assert torch.equal(*(rank["weight"] for rank in found))
    again = on_ranks(2, "integrations.jobs_during", "resume", str(tmp_path))
    assert [rank["placed"] for rank in again] == [found[0]["placed"]] * 2


def test_a_choice_of_one_rank_is_called_that_and_what_takes_all_ranks_is_refused() -> None:
    for rank, found in enumerate(on_ranks(2, "integrations.jobs_during", "tune_alone_and_sharded")):
        assert any(f"chosen on rank {rank} of 2 alone" in note for note in found["notes"])
        assert "sharded over ranks" in found["refused"]
        assert "tune the model before fully_shard" in found["refused"]
        assert "1 is a SyncBatchNorm, so running the model is a call of all ranks" in found["synced"]


def test_guard_watches_from_then_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tuning = Ranker(), make(tmp_path, after=30)
    loop(model, tuning, 31)
    with torch.no_grad():
        model.second.weight[0, 0] = float("inf")
    for step in range(60):
        tuning.begin_step(model)
        loss(model(make_batches(1, seed=step)[0][0]), make_batches(1, seed=step)[0][1]).mean().backward()
        tuning.end_step(model)
    assert any("second" in str(event) for event in tuning.events)


@pytest.mark.parametrize(("options", "said"), [({"after": 0}, "at least 1 optimizer step"), ({"target": "serve"}, "continue training on this device")])  # fmt: skip
def test_nonsense_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        make(tmp_path, **options)


class FakeCallback:
    """What both frameworks' base classes are to a callback."""


def test_the_protocol_of_hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(TrainerCallback=FakeCallback))
    torch.manual_seed(0)
    model = Ranker()
    callback, state = hf_callback(make(tmp_path, after=4)), SimpleNamespace(global_step=0)
    callback.on_train_begin(None, state, None, model=model, optimizer=None)
    for _ in range(5):
        callback.on_step_begin(None, state, None, model=model)
        loop(model, SimpleNamespace(begin_step=id, end_step=id), 8)
        state.global_step += 1
        callback.on_step_end(None, state, None, model=model)
    assert converted(model)


def test_the_protocol_of_lightning_counts_optimizer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace(Callback=FakeCallback))
    torch.manual_seed(0)
    model, tuning = Ranker(), make(tmp_path, after=4)
    callback, trainer = lightning_callback(tuning), SimpleNamespace(global_step=0)
    callback.on_train_start(trainer, model)
    for batch in range(8):  # two batches a step
        assert not converted(model)
        callback.on_train_batch_start(trainer, model, None, batch)
        loop(model, SimpleNamespace(begin_step=id, end_step=id), 6)
        trainer.global_step = (batch + 1) // 2
        callback.on_train_batch_end(trainer, model, None, None, batch)
    assert converted(model)
    assert tuning._done == 4


def test_missing_libraries_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"pip install 'loka\[hf\]'"):
        hf_callback(make(tmp_path))
    with pytest.raises(ValueError, match=r"pip install 'loka\[lightning\]'"):
        lightning_callback(make(tmp_path))


class Examples(torch.utils.data.Dataset):
    def __init__(self) -> None:
        pairs = make_batches(40, seed=3)
        self.x, self.y = torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class WithLoss(Ranker):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(x)
        return {"loss": loss(logits, labels).mean(), "logits": logits}


def test_hf_trainer_itself(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = WithLoss()
    held = [{"x": x, "labels": y} for x, y in make_batches()]
    step = lambda m, b: F.binary_cross_entropy_with_logits(m(**b)["logits"], b["labels"], reduction="none")  # noqa: E731
    tuning = TuneDuringTraining(held, after=30, step=step, out=tmp_path / "tuned", margin=MARGIN, progress=False)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"), max_steps=36, per_device_train_batch_size=64, gradient_accumulation_steps=2, learning_rate=3e-3,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Examples(), callbacks=[hf_callback(tuning)])
    trainer.train()
    assert converted(model)
    assert tuning.tuned.conversion is not None
    assert trainer.state.global_step == 36


def test_lightning_itself(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.ranker = Ranker()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            value = loss(self.ranker(batch["x"]), batch["labels"]).mean()
            self.log("loss", value)
            return value

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 3e-3)

    torch.manual_seed(0)
    module = Module()
    with pytest.raises(ValueError, match="no such submodule; it has ranker"):
        make(tmp_path, part="tower").resume(module, 0)
    step = lambda m, b: loss(m(b[0]), b[1])  # noqa: E731
    tuning = TuneDuringTraining(
        make_batches, after=30, step=step, part="ranker", out=tmp_path / "tuned", margin=MARGIN, progress=False
    )
    trainer = lightning.Trainer(
        max_steps=36, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[lightning_callback(tuning)],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Examples(), batch_size=64, shuffle=True))
    assert converted(module)
    assert trainer.global_step == 36
