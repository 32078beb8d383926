"""Models and data by name: built in and a user's own, opened the same way."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka import data
from loka.cli.jobs import per_example
from loka.cli.own_code import call_with, find_loss, find_object
from loka.cli.subject import load_subject
from loka.units import capture_example

HERE = __name__


class Own(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        out: Tensor = self.linear(x) + shift
        return out


class Reader(nn.Module):
    """Takes a whole Batch."""

    def __init__(self, fields: int) -> None:
        super().__init__()
        self.linear = nn.Linear(fields, 1)

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.linear(batch.dense)
        return out


def factory() -> nn.Module:
    return Own()


def schema_factory(schema: data.Schema) -> nn.Module:
    return Reader(len(schema.dense))


def not_a_model() -> int:
    return 3


def batches(split: str, batch_size: int, seed: int) -> Iterator[tuple[Any, Tensor]]:
    generator = torch.Generator().manual_seed(seed + {"train": 0, "valid": 100, "test": 200}[split])
    for _ in range(2):
        x = torch.randn(batch_size, 6, generator=generator)
        yield x, (x[:, :1] > 0).float()


def kinds() -> Iterator[tuple[Any, Tensor]]:
    x, y = torch.ones(3, 6), torch.ones(3, 1)
    yield x, y
    yield (x, 1.0), y
    yield {"x": x, "shift": 1.0}, y


def squared(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square()


def mean_squared(output: Tensor, targets: Tensor) -> Tensor:
    return squared(output, targets).mean()


def test_a_built_in_model_on_built_in_data() -> None:
    subject = load_subject(
        "wukong",
        "synthetic",
        batch_size=32,
        data_options={"rows": 200, "dense": 3, "categorical": 3, "cardinality": 10},
    )
    assert subject.held_out
    assert subject.metrics == ("log loss",)
    batch = next(subject.batches("train"))
    loss = subject.loss(batch)
    loss.backward()
    assert all(p.grad is not None for p in subject.model.parameters())
    values = subject.values(batch)
    assert values.shape == (32,)
    assert float(values.detach().mean()) == pytest.approx(float(loss.detach()), rel=1e-6)
    group = subject.group(batch)
    assert group is not None
    assert group.shape == (32,)


def test_the_stream_goes_on_and_reshuffles_and_skips() -> None:
    options = {"rows": 64, "dense": 2, "categorical": 2, "cardinality": 10}
    subject = load_subject("dlrm:tiny", "synthetic", batch_size=32, data_options=options)
    first = [batch.dense for batch in islice(subject.stream(), 5)]
    assert not torch.equal(first[0], first[2])  # another pass, another order
    (later,) = [batch.dense for batch in islice(subject.stream(skip=4), 1)]
    assert torch.equal(later, first[4])


def test_the_same_seed_gives_the_same_model() -> None:
    options = {"rows": 64, "dense": 2, "categorical": 2, "cardinality": 10}
    first, second, third = (
        load_subject("dlrm", "synthetic", batch_size=8, seed=seed, data_options=options).model for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True))


def test_a_model_of_ones_own_on_batches_of_ones_own() -> None:
    subject = load_subject(f"{HERE}:factory", f"{HERE}:batches", batch_size=5)
    train, valid = next(subject.batches("train")), next(subject.batches("valid"))
    assert train[0].shape == (5, 6)
    assert not torch.equal(train[0], valid[0])
    assert subject.held_out
    logits = subject.model(train[0])
    expected = nn.functional.binary_cross_entropy_with_logits(logits, train[1])
    assert float(subject.loss(train)) == pytest.approx(float(expected), rel=1e-6)


def test_inputs_may_be_a_tensor_a_tuple_or_a_dict() -> None:
    subject = load_subject(f"{HERE}:factory", f"{HERE}:kinds", loss=f"{HERE}:squared")
    plain, positional, named = (float(subject.loss(batch)) for batch in subject.batches("train"))
    assert positional == named != plain
    assert not subject.held_out


def test_a_loss_may_be_a_mean_already() -> None:
    each = load_subject(f"{HERE}:factory", f"{HERE}:batches", loss=f"{HERE}:squared", batch_size=4)
    mean = load_subject(f"{HERE}:factory", f"{HERE}:batches", loss=f"{HERE}:mean_squared", batch_size=4)
    batch = next(each.batches("valid"))
    assert each.values(batch).shape == (4,)
    assert mean.values(batch).shape == (1,)
    assert float(mean.loss(batch)) == pytest.approx(float(each.loss(batch)))


def test_a_model_of_ones_own_on_built_in_data_may_ask_for_the_schema() -> None:
    options = {"rows": 64, "dense": 2, "categorical": 2, "cardinality": 10}
    subject = load_subject(f"{HERE}:schema_factory", "synthetic", batch_size=8, data_options=options)
    assert subject.loss(next(subject.batches("valid"))).isfinite()


def test_a_sequence_model_trains_on_positions_and_is_scored_on_what_was_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [2, 2, 3, 3, 6]]
    items = data.Jagged.from_rows(rows)
    sequences = data.SequenceData("made up", items, n_items=20, times=torch.arange(15))
    monkeypatch.setattr(data, "load_sequences", lambda name, **_: sequences)
    subject = load_subject("hstu", "ml-1m", batch_size=2)
    assert subject.model.config.items == 21
    subject.loss(next(subject.batches("train"))).backward()
    batch = next(subject.batches("test"))
    losses, recall = subject.values(batch), subject.values(batch, "recall@10")
    scores = subject.model(batch.history, batch.times.values, last=True)[:, 1:]
    expected = nn.functional.cross_entropy(scores, torch.tensor([5, 1]) - 1, reduction="none")
    assert torch.allclose(losses, expected)
    ranks = (scores > scores.gather(1, (torch.tensor([5, 1]) - 1)[:, None])).sum(1)
    assert recall.tolist() == (ranks < 10).float().tolist()
    with pytest.raises(ValueError, match="have no held-out items"):
        subject.values(next(subject.batches("train")))
    with pytest.raises(ValueError, match="no metric 'auc'"):
        subject.values(batch, "auc")


@pytest.mark.parametrize(
    ("model", "source", "message"),
    [
        ("nothing", None, "no model 'nothing'"),
        ("no_such_module:f", f"{HERE}:batches", "cannot import 'no_such_module'"),
        (f"{HERE}:nowhere", f"{HERE}:batches", "has no 'nowhere'"),
        (f"{HERE}:factry", f"{HERE}:batches", "did you mean factory?"),
        (f"{HERE}:not_a_model", f"{HERE}:batches", "expected an nn.Module, got int"),
        ("wukong", f"{HERE}:batches", "needs the schema"),
        (f"{HERE}:schema_factory", f"{HERE}:batches", "needs schema"),
        ("onerec", "synthetic", "semantic ids"),
    ],
)
def test_what_cannot_be_opened_says_why(model: str, source: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_subject(model, source)


def test_an_exhausted_iterator_is_an_error_not_an_endless_wait() -> None:
    subject = load_subject(f"{HERE}:factory", f"{HERE}:empty")
    with pytest.raises(ValueError, match="no batch"):
        next(subject.stream())
    with pytest.raises(ValueError, match="no split 'dev'"):
        next(subject.batches("dev"))


def empty() -> Iterator[Any]:
    return iter(())


def test_small_parts() -> None:
    assert find_object("torch.nn:functional.relu") is nn.functional.relu
    with pytest.raises(ValueError, match=r"expected pkg\.module:name"):
        find_object("torch")
    assert call_with(lambda **offers: offers, "f", a=1) == {"a": 1}
    assert call_with(lambda a, b=2: (a, b), "f", a=1, c=3) == (1, 2)
    assert per_example(torch.ones(4, 2), 4).tolist() == [1, 1, 1, 1]
    assert per_example(torch.tensor(2.0), 4).tolist() == [2]


def test_an_example_needs_no_loss_that_fits_the_output() -> None:
    """`convert` and `export` take no --loss, and a model may return a dict."""

    class Both(Own):
        def forward(self, x: Tensor, shift: float = 0.0) -> Any:
            return {"score": super().forward(x, shift)}

    model, x = Both(), torch.ones(3, 6)
    example = capture_example(model, lambda: find_loss(None)(model(x, shift=2.0), torch.zeros(3)), stop=True)
    assert torch.equal(example.args[0], x)
    assert example.kwargs == {"shift": 2.0}
    with pytest.raises(ValueError, match="got dict and Tensor; hint: --loss"):
        find_loss(None)(model(x), torch.zeros(3))
