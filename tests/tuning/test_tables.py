"""tune with tables and collectives: the fewest bytes within the margin, measured, verified with everything else, and the model as it was where it is not converted."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import loka
from loka.nn.tables import Table
from loka.records import Interval
from loka.tuning.tables import Trial, choose_collectives, choose_tables
from loka.tuning.task import Task

WIDTH = 16


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(200, WIDTH)
        self.first, self.second, self.last = nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids)
        return self.last(F.relu(self.second(F.relu(self.first(x))))).squeeze(-1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target, reduction="none")


def batches(count: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    liked = torch.rand(200, generator=torch.Generator().manual_seed(1))
    ids = [torch.randint(0, 200, (256,), generator=generator) for _ in range(count)]
    return [(i, (torch.rand(256, generator=generator) < liked[i]).float()) for i in ids]


def trained() -> Small:
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for ids, target in batches(40):
        optimizer.zero_grad()
        loss(model(ids), target).mean().backward()
        optimizer.step()
    return model


def test_one_call_places_tables_and_says_what_ranks_would_send() -> None:
    model = trained()
    before = model.items.weight.detach().clone()
    tuned = loka.tune(model, batches(), loss, margin=0.02, tables=True, collectives=True, progress=False)
    (table,) = tuned.plan.tables
    assert (table.name, table.rows, table.bytes, table.float32_bytes) == ("items", "int8:row", 200 * 17, 200 * 64)
    assert table.evidence.metric_change.high <= 0.02
    assert 0 < table.evidence.error < 0.02
    assert table.evidence.microseconds.value > 0
    assert isinstance(model.items, Table)
    assert {part.name for part in tuned.plan.collectives} == {"weights", "gradients"}
    assert all(part.bytes < 0.6 * part.float32_bytes for part in tuned.plan.collectives)
    rows = {unit.name: unit for unit in tuned.record.units}
    assert rows["items"].way == "int8:row"
    assert "3,400 of 12,800 bytes" in rows["items"].reason
    assert "items" in tuned.plan.explain("items")
    assert tuned.record.metric_change.high <= 0.02
    loka.revert(model)
    assert float((model.items.weight.detach() - before).norm() / before.norm()) < 0.02
    plain = loka.tune(trained(), batches(), loss, margin=0.02, progress=False)
    assert not plain.plan.tables
    assert not plain.plan.collectives


def test_what_harms_is_refused_with_numbers_and_nothing_is_changed() -> None:
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []

    def measure() -> Interval:
        seen.append(1)
        harm = 0.01 if len(seen) % 2 else 1e-5  # the first of two is too much
        return Interval(value=harm, low=0.0, high=harm)

    task = Task(model, batches(), loss)
    (table,) = choose_tables(task, Trial(measure, 2e-4), training=True)
    assert table.rows != "int8:row"
    assert table.refusals[0].startswith("int8:row: +1.0000%")
    weights, gradients = choose_collectives(task, Trial(measure, 2e-4))
    assert weights.codec == "e4m3:1x128:pow2"
    assert weights.refusals[0].startswith("int8:1x128")
    assert gradients.codec in ("e4m3:1x128:pow2:stochastic", "int8:1x128:stochastic", "bf16")
    assert not any("stochastic" not in reason.partition(" ")[0] for reason in gradients.refusals)
    (none,) = choose_tables(task, Trial(lambda: Interval(value=1.0, low=1.0, high=1.0), 2e-4), training=False)
    assert none.rows == "float32"
    assert len(none.refusals) == 4
    assert none.evidence is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="no site"):
        loka.tune(trained(), batches(), loss, margin=0.02, progress=False).plan.explain("items")


def test_a_table_that_is_dropped_with_everything_together_is_not_called_converted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within the margin alone, and not together with the rest: row, note and plan say the same."""
    beyond = Interval(value=0.5, low=0.4, high=0.6)
    monkeypatch.setattr("loka.tuning.tables.swap_all", lambda *given: beyond)
    model = trained()
    tuned = loka.tune(model, batches(), loss, margin=0.02, tables=True, progress=False)
    assert tuned.plan.tables == []
    assert not isinstance(model.items, Table)
    (row,) = [unit for unit in tuned.record.units if unit.name == "items"]
    assert row.way == "high"
    assert "not converted: with everything together" in row.reason
    assert "12,800 of 12,800 bytes" in row.reason
