"""Sequence models in the loop: they learn a rule that a first-order model could, from histories whose held-out ends obey it too."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from loka import records
from loka.cli import train_sequence
from loka.cli.train import train
from loka.data.batch import Jagged
from loka.data.sequences import SequenceData
from loka.models import build
from loka.semantic_ids import SemanticIndex, load_index
from loka.training import NextIdTask, NextItemTask, TrainConfig, Trainer, embed_items, read_checkpoint, seed_everything

from .toy import assert_same_bits

N = 24
CPU = torch.device("cpu")


def make_data(users=200, length=8, n=N):
    """Every item is followed by item + 1, wrapped around, nine times out of ten."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(n, (users,), generator=generator)]
    for _ in range(length - 1):
        jump = torch.rand(users, generator=generator) < 0.1
        rows.append(torch.where(jump, torch.randint(n, (users,), generator=generator), (rows[-1] + 1) % n))
    values = torch.stack(rows, 1).flatten() + 1
    return SequenceData("toy", Jagged(values, torch.arange(users + 1) * length), n)


def make_index(n=N):
    codes = torch.stack([torch.arange(n) % 5, torch.arange(n) // 5], 1)
    return SemanticIndex(codes, (5, 5), torch.arange(1, n + 1))


def fit(model, task, steps=100, **options):
    config = TrainConfig(steps=steps, batch_size=64, device="cpu", learning_rate=1e-2, log_every=50, **options)
    Trainer(model, task, config, loss_fn=task.loss).fit()
    return task.evaluate(model, "test", device=CPU)


def test_hstu_learns_the_rule():
    data = make_data()
    task = NextItemTask(data, length=8)
    seed_everything(0)
    model = build("hstu", "tiny", items=N + 1, max_length=8)
    before = task.evaluate(model, "test", device=CPU)
    after = fit(model, task)
    assert before["ndcg@10"] < 0.5 < 0.8 < after["ndcg@10"]
    assert model.training is True, "evaluation leaves the mode as it was"


@pytest.mark.parametrize("items", [0, N + 1])
def test_onerec_learns_the_rule(items):
    data = make_data()
    task = NextIdTask(data, make_index(), length=4, beams=12)
    seed_everything(0)
    model = build("onerec", "tiny", codebooks=(5, 5), context=4, short=2, items=items)
    after = fit(model, task)
    assert after["ndcg@10"] > 0.8
    some = task.evaluate(model, "valid", device=CPU, limit=10)
    assert set(some) == {"hr@10", "ndcg@10", "mrr"}


def test_onerec_can_learn_two_hundred_users_by_heart():
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(1, N + 1, (200 * 4,), generator=generator)
    task = NextIdTask(SequenceData("toy", Jagged(values, torch.arange(201) * 4), N), make_index(), length=4)
    assert len(task.train) == 200
    seed_everything(0)
    model = build("onerec", "tiny", codebooks=(5, 5), context=4, short=2, items=N + 1)
    config = TrainConfig(steps=250, batch_size=200, device="cpu", learning_rate=1e-2, log_every=250)
    batch = next(task.train.batches(200, shuffle=False, seed=0, drop_last=False, rank=0, world=1, epoch=0))
    pairs = torch.stack([batch.history.values, batch.target], 1)
    _, which, counts = torch.unique(pairs, dim=0, return_inverse=True, return_counts=True)
    _, first, total = torch.unique(pairs[:, 0], return_inverse=True, return_counts=True)
    floor = -(counts[which] / total[first]).log().mean() / 2  # what repeats with another outcome cannot be learned
    result = Trainer(model, task, config, loss_fn=task.loss).fit()
    assert task.loss(model, batch)[0].item() < floor.item() + 0.1
    assert result.loss > floor.item()


def test_vectors_of_items_come_from_training_parts_only():
    data = make_data()
    changed = data.items.values.clone().view(-1, 8)
    changed[:, -2:] = changed[:, -2:].flip(0)
    other = SequenceData("toy", Jagged(changed.flatten(), data.items.offsets), N)
    assert torch.equal(embed_items(data, dimensions=8), embed_items(other, dimensions=8))


def test_bad_requests():
    with pytest.raises(ValueError, match="beams=5"):
        NextIdTask(make_data(), make_index(), length=4, beams=5)
    with pytest.raises(ValueError, match="length=0"):
        NextItemTask(make_data(), length=0)


@pytest.fixture
def invoke(monkeypatch):
    import loka.data

    monkeypatch.setattr(loka.data, "load_sequences", lambda name, **_: make_data())
    app = typer.Typer()
    app.command()(train)
    threads = torch.get_num_threads()
    common = [
        "--data",
        "amazon-2018-scientific",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--batch-size",
        "32",
        "--seed",
        "2",
    ]
    yield lambda *options: CliRunner().invoke(app, [*common, *map(str, options)])
    torch.set_num_threads(threads)


ONEREC = [
    "--model",
    "onerec",
    "--set",
    "codebooks=[5,5]",
    "--set",
    "context=4",
    "--set",
    "short=2",
    "--set",
    "items=true",
]


def test_the_command_trains_tests_and_leaves_ids_to_build_it_again(invoke, tmp_path):
    done = invoke(*ONEREC, "--steps", 20, "--evaluate-every", 10, "--log-every", 10, "--out", tmp_path / "x", "--json")
    assert done.exit_code == 0, done.stderr
    run = records.from_json(done.stdout, records.Run)
    assert set(run.metrics) == {"hr@10", "ndcg@10", "mrr"}
    assert json.loads((tmp_path / "x" / "result.json").read_text())["best"]["metric"] == "ndcg@10"
    assert len((tmp_path / "x" / "log.jsonl").read_text().splitlines()) == 4
    index = load_index(tmp_path / "x" / "index.safetensors")
    assert len(index) == N
    again = invoke(*ONEREC, "--set", f"ids={tmp_path / 'x' / 'index.safetensors'}", "--steps", 1)
    assert again.exit_code == 0, again.stderr


def test_a_cut_run_of_hstu_resumes_to_the_same_bits(invoke, tmp_path):
    common = ["--model", "hstu", "--set", "max_length=8", "--evaluate-every", 0, "--checkpoint-every", 5]
    assert invoke(*common, "--steps", 10, "--out", tmp_path / "whole").exit_code == 0
    assert invoke(*common, "--steps", 5, "--out", tmp_path / "cut").exit_code == 0
    done = invoke(*common, "--steps", 10, "--out", tmp_path / "cut", "--resume")
    assert done.exit_code == 0, done.stderr
    ends = [read_checkpoint(tmp_path / name / "checkpoints" / "step-00000010") for name in ("whole", "cut")]
    for group in ("model", "optimizer"):
        assert_same_bits(ends[0].tensors[group], ends[1].tensors[group])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--compile"], "ragged"),
        (["--mods", "no_bias"], "--mods"),
        (["--set", "ids=nowhere"], "neither a file nor among the indexes"),
        (["--set", "evaluate_users=0"], "evaluate_users=0"),
        (["--set", "colour=blue"], "no option 'colour'"),
        (["--monitor", "ne"], "monitor 'ne' has no finite value"),
    ],
)
def test_what_sequence_models_cannot_do_is_refused(invoke, options, message):
    done = invoke(*ONEREC, "--steps", 2, *options)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
    assert train_sequence.FAMILIES == ("hstu", "onerec")
