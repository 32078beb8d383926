"""Tables and collectives as units of a plan: found by the same call, placed whole or not at all, taken back with what was trained, explained and kept in the file."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import loka
from loka.kernels.embedding_update import Rule
from loka.nn.table_optimizer import TableOptimizer
from loka.nn.tables import Table
from loka.records import CollectivePlan, Plan, TablePlan, UnitEvidence, capture_environment
from loka.units import discover, find_tables
from loka.units.tables import row_bytes


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.users = nn.EmbeddingBag(60, 16, mode="sum"), nn.Embedding(40, 16)
        self.top = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, items: torch.Tensor, users: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.items(items), self.users(users)], 1))


def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 60, (12, 5)), torch.randint(0, 40, (12,))


def table(name: str, rows: str, count: int, **more: object) -> TablePlan:
    return TablePlan(name=name, rows=rows, count=count, width=16, bytes=row_bytes(rows, count, 16), float32_bytes=64 * count, **more)  # fmt: skip


def plan(tables: list[TablePlan], collectives: list[CollectivePlan] | None = None) -> Plan:
    return Plan(
        model="Small", recipe="auto", target=None, max_error=1.0, max_gradient_error=1.0, min_speedup=None, flops_of="sites", sites=[],
        environment=capture_environment(device="cpu", threads=1), tables=tables, collectives=collectives or [],
    )  # fmt: skip


def test_one_call_finds_tables_and_collectives() -> None:
    found = discover(Small(), example())
    assert [(t.name, t.rows, t.count, t.width, t.bytes) for t in found.tables] == [
        ("items", "float32", 60, 16, 3840), ("users", "float32", 40, 16, 2560),
    ]  # fmt: skip
    assert [(c.name, c.elements, c.bytes) for c in found.collectives] == [("weights", 264, 1056), ("gradients", 264, 1056)]  # fmt: skip
    assert "users: table of 40 x 16 in float32, 1.00 of float32's bytes" in str(found)


def test_placed_trained_and_taken_back() -> None:
    model, asked = Small(), plan([table("items", "int8:row", 60), table("users", "bfloat16", 40)])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameter = model.items.weight
    done = loka.convert(model, asked)
    assert [type(m).__mro__[1] for m in (model.items, model.users)] == [Table, Table]
    assert {t.name: t.rows for t in find_tables(model)} == {"items": "int8:row", "users": "bfloat16"}
    assert any("TableOptimizer" in note for note in done.notes)
    assert model.state_dict().keys() == before.keys()
    with pytest.raises(ValueError, match="already converted"):
        loka.convert(model, asked)
    optimizer = TableOptimizer(model, Rule("sgd", lr=1.0))
    model(*example()).sum().backward()
    optimizer.step()
    trained = model.state_dict()["items.weight"]
    loka.revert(model)
    assert model.items.weight is parameter
    assert type(model.users) is nn.Embedding
    assert torch.equal(model.items.weight.detach(), trained)
    assert not torch.equal(trained, before["items.weight"])


def test_all_or_nothing() -> None:
    model = Small()
    wrong = plan([table("items", "int8:row", 60), table("users", "int8:row", 41), table("top", "int8:row", 8)])
    with pytest.raises(ValueError, match=r"users: the plan is for 41 x 16.*\n.*top: expected an embedding table"):
        loka.convert(model, wrong)
    assert type(model.items) is nn.EmbeddingBag
    tied = Small()
    tied.users.weight = nn.Parameter(tied.items.weight[:40].detach().clone())
    tied.more = nn.Embedding(40, 16, _weight=None)
    tied.more.weight = tied.users.weight
    with pytest.raises(ValueError, match="shared"):
        loka.convert(tied, plan([table("users", "int8:row", 40)]))


class Scaled(nn.Embedding):
    """The usual embedding of a transformer: rows times the root of their width."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 4 * super().forward(input)


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def _replaced() -> nn.Embedding:
    made = nn.Embedding(40, 16)
    made.forward = lambda ids: 4 * nn.Embedding.forward(made, ids)
    return made


def _hooked() -> nn.Embedding:
    made = nn.Embedding(40, 16)
    made.register_forward_hook(lambda module, given, out: 4 * out)
    return made


OWN = {
    "a forward of its own": lambda: Scaled(40, 16),
    "a forward of its own ": _replaced,
    "hooks": _hooked,
    "parametrised": lambda: parametrize.register_parametrization(nn.Embedding(40, 16), "weight", Double()),
}


@pytest.mark.parametrize("why", OWN)
def test_a_table_that_does_more_than_look_rows_up_is_refused(why: str) -> None:
    """A replaced module does not do it: the result was another one, without a word."""
    model = Small()
    model.users = OWN[why]()
    batch = example()
    before = model(*batch)
    with pytest.raises(ValueError, match=f"users: .*{why.strip()}"):
        loka.convert(model, plan([table("users", "int8:row", 40)]))
    assert torch.equal(model(*batch), before)


HELD: dict[str, Callable[[nn.Module], Any]] = {
    "a list": lambda table: [table],
    "a list of weights": lambda table: {"of": [table.weight]},
    "its bound method": lambda table: table.forward,
    "a partial function": lambda table: partial(nn.functional.embedding, weight=table.weight),
    "a module that is not registered": lambda table: [nn.Sequential(table)],
}


@pytest.mark.parametrize("holder", HELD)
def test_a_table_that_is_also_held_where_it_is_not_replaced_is_refused(holder: str) -> None:
    """It would keep an empty weight: "'weight' must be 2-D" in the next forward."""
    model = Small()
    model.other = nn.Identity()
    model.other.kept = HELD[holder](model.users)
    model.note = {"ids": [1, 2], "itself": model}  # leads to no table but through the model
    with pytest.raises(ValueError, match=r"users: the attribute other\.kept holds it, too.*hint: .*nn.ModuleList"):
        loka.convert(model, plan([table("users", "int8:row", 40)]))
    assert type(model.users) is nn.Embedding
    model.other.kept = None
    loka.convert(model, plan([table("users", "int8:row", 40)]))
    loka.revert(model)


def test_collectives_wait_for_ranks_on_one_process() -> None:
    sent = CollectivePlan(name="gradients", codec="e4m3:1x128:pow2", elements=264, bytes=273, float32_bytes=1056)
    done = loka.convert(Small(), plan([], [sent]))
    assert any("nothing is sent here" in note for note in done.notes)


def test_explained_kept_and_compared(tmp_path) -> None:
    evidence = UnitEvidence(error=0.006, metric_change=loka.records.Interval(value=1e-5, low=-1e-5, high=3e-5))
    first = plan([table("items", "int8:row", 60, evidence=evidence, reason="smallest within the margin", refusals=["int4:row: +0.4 %"])])  # fmt: skip
    text = first.explain("items")
    for part in ("table of 60 x 16 in int8:row", "smallest within", "relative error 0.600%", "+0.0010%", "refused int4:row"):  # fmt: skip
        assert part in text
    again = Plan.load(first.save(tmp_path / "plan.json"))
    assert again.tables == first.tables
    other = msgspec.structs.replace(first, tables=[table("items", "bfloat16", 60)], seal=None)
    assert first.seal != other.seal
    assert "items" in first.diff(other)
    with pytest.raises(ValueError, match="decided twice"):
        plan([table("items", "int8:row", 60)] * 2)


def test_a_table_of_several_names_is_one_table() -> None:
    model = Small()
    model.towers = nn.ModuleDict({"again": model.users})
    keys, parameter = list(model.state_dict()), model.users.weight
    assert [found.name for found in find_tables(model)] == ["items", "users"]
    asked = plan([table("users", "bfloat16", 40), table("towers.again", "bfloat16", 40)])  # either name, or both
    loka.convert(model, asked)
    assert isinstance(model.users, Table)
    assert model.towers["again"] is model.users
    assert list(model.state_dict()) == keys
    loka.revert(model)
    assert model.towers["again"] is model.users
    assert model.users.weight is parameter
    assert list(model.state_dict()) == keys
