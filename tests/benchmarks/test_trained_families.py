"""What the families of benchmarks/trained.py are trained on: every batch has the same shapes, targets are the next items, and padding counts for nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.benchmarks.scripts import script
from torch import Tensor

families, sequences, ranking = (script(name) for name in ("trained_families", "quality_sequences", "quality_ranking"))


def sequences_of(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> Any:
    items = torch.arange(1, sum(lengths) + 1)
    last = torch.tensor(lengths).cumsum(0)
    events = sequences.Events(items, items * 60, last - torch.tensor(lengths), last, sum(lengths), torch.zeros(1, 3))
    monkeypatch.setattr(families, "read_events", lambda *_: events)
    return families.Sequences(Path(), "d", "hstu", "tiny", "cpu", 4)


def test_targets_are_the_next_items_of_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sequences_of(monkeypatch, [5, 9, 70, 12, 40, 33, 8, 6] * 3)
    stream = data.stream(0)
    for inputs, (target, row) in (next(stream), next(stream)):
        assert inputs[0].shape == target.shape == row.shape == (data.capacity,)
        counted = target > 0
        assert torch.equal(target[counted], inputs[0][counted] + 1)  # items are numbered in order
        assert not counted[inputs[2][1:5] - 1].any()  # nothing follows a window's last event
        assert (row[inputs[0] == 0] == 4).all()
        assert int(inputs[1].max()) < data.length
        held = data.events.last[data.held] - 1
        assert not torch.isin(target, data.events.items[held]).any()  # test targets are not trained on


def test_losses_of_users_have_the_mean_of_their_events(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sequences_of(monkeypatch, [5, 9, 70, 12, 40, 33, 8, 6] * 3)
    _, labels = next(data.stream(1))
    scores = torch.randn(data.capacity, data.events.n_items + 1, generator=torch.Generator().manual_seed(0))
    wanted = F.cross_entropy(scores, labels[0], ignore_index=0)
    each = data.losses(scores, labels)
    assert each.shape == (4,)
    torch.testing.assert_close(each.mean(), wanted)


def test_a_perfect_model_of_the_next_item_scores_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data = sequences_of(monkeypatch, [5, 9, 70, 12, 40, 33, 8, 6] * 3)

    def run(items: Tensor, *_: Tensor) -> Tensor:
        return 100.0 * F.one_hot((items + 1).clamp(max=data.events.n_items), data.events.n_items + 1).float()

    found = data.score(run)
    assert found["hr10"] == 1.0
    assert found["log_loss"] < 1e-6


def test_histories_are_padded_with_a_row_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = ranking.Schema(
        ("age",),
        (ranking.Field("user", 7), ranking.Field("movie", 11)),
        (ranking.SequenceField("seen", 11, 5, shares="movie"), ranking.SequenceField("genres", 3, 2, shares=None)),
        ("liked",),
    )
    rows = 40_000
    g = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(c, (rows,), generator=g) for c in (7, 11)], 1)
    length = torch.randint(0, 6, (rows,), generator=g)
    windows = {
        "seen": (torch.randint(11, (50,), generator=g), torch.randint(45, (rows,), generator=g), length),
        "genres": (torch.randint(3, (9,), generator=g), torch.full((rows,), 8), torch.ones(rows, dtype=torch.int64)),
    }
    table = ranking.Table(torch.randn(rows, 1, generator=g), ids, torch.zeros(rows, 1), windows)
    monkeypatch.setattr(families, "read_tables", lambda *_: (schema, dict.fromkeys(("train", "valid", "test"), table)))
    data = families.Histories(Path(), "d", "interformer", "tiny", "cpu", 64)
    (dense, fields, history, lengths), (labels,) = data.take("train", torch.arange(64))
    assert history.shape == (64, 5, 2)
    assert torch.equal(fields - torch.tensor([1, 8]), ids[:64])
    for example in range(64):
        n = int(length[example])
        start = int(windows["seen"][1][example])
        assert torch.equal(history[example, :n, 0], windows["seen"][0][start : start + n] + 8)  # the movies' rows
        assert (history[example, n:, 0] == 0).all()
        assert history[example, :, 1].tolist() == [int(windows["genres"][0][8]) + 19, 0, 0, 0, 0]
    assert torch.equal(lengths, length[:64].clamp(min=1))
    model = data.model(0)
    padded = history.clone()
    assert model(dense, fields, padded, lengths).shape == labels.shape
    assert not model.table.weight[0].any()
