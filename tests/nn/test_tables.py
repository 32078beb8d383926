"""Low-precision tables: as nn.Embedding and nn.EmbeddingBag to the model, to autograd, to state_dict; and they train."""

import copy

import pytest
import torch
from torch import nn

from comms.ranks import on_ranks
from loka.kernels.embedding_update import TRAINABLE, Rule
from loka.nn import tables
from loka.nn.embedding import EmbeddingTables
from loka.nn.table_optimizer import TableOptimizer

SERVING = ("int8:row", "e4m3:row", "int4:row", "bfloat16")


@pytest.mark.parametrize("rows", SERVING)
def test_an_embedding_looks_its_rows_up(rows: str) -> None:
    plain = nn.Embedding(40, 16, padding_idx=3)
    model = nn.Sequential(copy.deepcopy(plain))
    assert tables.quantize_tables(model, rows=rows) == ["0"]
    ids = torch.randint(0, 40, (4, 5))
    weight = model.state_dict()["0.weight"]
    assert torch.equal(model(ids), nn.functional.embedding(ids, weight, padding_idx=3))
    plain.load_state_dict({"weight": weight})  # the key and the shape of the plain module, and nothing else
    bound = {"int4:row": 0.08}.get(rows, 0.04) * weight.abs().amax(1, keepdim=True)
    assert bool(((weight - plain.weight).abs() <= bound).all())
    again = tables.Embedding(40, 16, padding_idx=3, rows=rows)
    again.load_state_dict({"weight": weight})
    assert torch.equal(again.weight, weight)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean", "padding_idx": 2},
        {"mode": "sum", "include_last_offset": True, "padding_idx": -1},
    ],
)
def test_a_bag_is_torchs_bag(options: dict) -> None:
    plain = nn.EmbeddingBag(30, 8, **options)
    model = nn.ModuleDict({"bag": copy.deepcopy(plain)})
    tables.quantize_tables(model, rows="int8:row")
    plain.load_state_dict({"weight": model["bag"].weight})
    ids, offsets = (
        torch.randint(0, 30, (12,)),
        torch.tensor([0, 0, 4, 9, 12] if plain.include_last_offset else [0, 0, 4, 9]),
    )
    torch.testing.assert_close(model["bag"](ids, offsets), plain(ids, offsets))
    torch.testing.assert_close(model["bag"](ids.view(3, 4)), plain(ids.view(3, 4)))
    if options["mode"] == "sum":
        ours, theirs = (torch.rand(12, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
        model["bag"](ids, offsets, per_sample_weights=ours).square().sum().backward()
        plain(ids, offsets, per_sample_weights=theirs).square().sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def fit(model: nn.Module, optimizer, steps: int, start: int = 0) -> float:
    loss = torch.tensor(0.0)
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 50, (64,), generator=generator)
        optimizer.zero_grad()
        loss = (model(ids) - target(ids)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss)


def target(ids: torch.Tensor) -> torch.Tensor:
    return torch.sin(ids[:, None] * torch.arange(1, 17) * 0.1)


@pytest.mark.parametrize("rows", TRAINABLE)
@pytest.mark.parametrize("rule", [Rule("rowwise_adagrad", lr=0.3), Rule("sgd", lr=20.0), Rule("adam", lr=0.03)])
def test_rows_learn(rows: str, rule: Rule) -> None:
    table = tables.Embedding(50, 16, rows=rows)
    before = float((table.weight.detach() - target(torch.arange(50))).square().mean())
    after = fit(table, TableOptimizer(table, rule), 60)
    assert after < 0.05 * before


@pytest.mark.parametrize("rows", TRAINABLE)
def test_a_resumed_run_ends_with_the_same_bits(rows: str) -> None:
    def make() -> tuple[tables.Embedding, TableOptimizer]:
        torch.manual_seed(3)
        table = tables.Embedding(50, 16, rows=rows, hot=0.1, name="users")
        return table, TableOptimizer(table, Rule("rowwise_adagrad", lr=0.1), elect_every=7)

    straight, optimizer = make()
    fit(straight, optimizer, 30)
    first, optimizer = make()
    fit(first, optimizer, 13)
    stored = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    second, optimizer = make()
    second.load_state_dict(stored[0])
    optimizer.load_state_dict(stored[1])
    assert torch.equal(second.weight, first.weight)
    fit(second, optimizer, 17, start=13)
    assert torch.equal(second.weight, straight.weight)


@pytest.mark.parametrize("rows", ["int8:row", "e4m3:row:pow2"])
def test_a_row_that_is_lost_has_a_witness(rows: str) -> None:
    """NaN in a row, and a row beyond the range of scales: training must not save either."""
    for last in (float("nan"), 1e30):
        table = tables.Embedding(50, 16, rows=rows)
        assert all(bool(part.isfinite().all()) for part in table.witnesses())
        (table(torch.tensor([3])) * last).sum().backward()
        TableOptimizer(table, Rule("sgd", lr=1.0)).step()
        assert any(bool(part.isnan().any()) for part in table.witnesses())
        assert table.weight.isnan().any(1).nonzero().tolist() == [[3]]


def test_rows_beyond_the_range_of_scales_are_refused() -> None:
    plain = nn.Embedding(5, 4)
    plain.weight.data[2, 1] = 1e5
    model = nn.Sequential(plain)
    with pytest.raises(ValueError, match=r"row 2 has an element of 1e\+05.*up to 1,778"):
        tables.quantize_tables(model, rows="int8:row")
    assert model[0] is plain
    table = tables.Embedding(5, 4, rows="int8:row")
    with pytest.raises(ValueError, match="row 2 has"):
        table.load_state_dict(plain.state_dict())


def test_two_half_batches_are_one() -> None:
    def run(pieces: int, mode: str) -> torch.Tensor:
        torch.manual_seed(0)
        bag = tables.EmbeddingBag(50, 16, mode=mode, include_last_offset=True, rows="int8:row")
        optimizer = TableOptimizer(bag, Rule("sgd", lr=1.0))
        ids, weight = torch.randint(0, 50, (24,)), torch.randn(8, 16)
        for part, scale in zip(ids.chunk(pieces), weight.chunk(pieces), strict=True):
            offsets = torch.arange(0, len(part) + 1, 3)
            (bag(part, offsets) * scale).sum().backward()
        optimizer.step()
        return bag.weight

    for mode in ("sum", "mean"):
        torch.testing.assert_close(run(2, mode), run(1, mode), rtol=0, atol=0.01)
        assert float((run(2, mode) != run(1, mode)).double().mean()) < 0.01


@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_table_with_its_optimiser_state_takes_a_quarter(width: int) -> None:
    table = tables.Embedding(1000, width, rows="int8:row")
    optimizer = TableOptimizer(table, Rule("rowwise_adagrad"))
    state = optimizer.state[table.anchor]
    low = sum(t.numel() * t.element_size() for t in state.values())
    assert low >= table.rows.bytes + 4000
    assert low / (1000 * width * 4 + 1000 * 4) <= 0.28


def test_frozen_tables_and_serving_formats_do_not_train() -> None:
    table = tables.Embedding(10, 8, rows="int4:row")
    with pytest.raises(ValueError, match="rows of int4:row"):
        TableOptimizer(table)
    plain = nn.Embedding(10, 8)
    plain.weight.requires_grad_(False)
    model = nn.Sequential(plain)
    tables.quantize_tables(model)
    assert not model(torch.tensor([1])).requires_grad


def test_hot_rows_are_elected_by_frequency() -> None:
    table = tables.Embedding(20, 8, rows="e4m3:row:pow2", hot=0.1)
    optimizer = TableOptimizer(table, Rule("sgd", lr=0.1), elect_every=1)
    table(torch.tensor([4, 4, 4, 9, 9, 1])).sum().backward()
    optimizer.step()
    assert table.slot is not None
    assert (table.slot >= 0).nonzero().squeeze(1).tolist() == [4, 9]
    weight = table.weight
    table.keep_high(torch.tensor([9, 11]))
    torch.testing.assert_close(table.weight[[9, 11]], weight[[9, 11]])
    assert tables.hottest(torch.tensor([1, 5, 5, 2]), 0.5).tolist() == [1, 2]


def test_the_tables_of_a_ranker_pool_in_low_precision() -> None:
    model = EmbeddingTables([("a", 10), ("b", 20)], 8)
    plain = copy.deepcopy(model)
    assert tables.quantize_tables(model, rows="int8:row") == ["table"]
    plain.load_state_dict(model.state_dict())
    values, offsets = torch.tensor([1, 2, 19]), torch.tensor([0, 2, 2, 3])
    torch.testing.assert_close(model.pool("b", values, offsets), plain.pool("b", values, offsets))
    torch.testing.assert_close(model.lookup(torch.tensor([[1, 2]])), plain.lookup(torch.tensor([[1, 2]])))


def test_what_low_precision_rows_cannot_do_is_refused_before_anything_is_swapped() -> None:
    tied = nn.Embedding(5, 4)
    head = nn.Linear(4, 5, bias=False)
    head.weight = tied.weight
    model = nn.ModuleDict({"fine": nn.Embedding(5, 4), "norm": nn.Embedding(5, 4, max_norm=1.0), "tied": tied, "head": head,
                           "max": nn.EmbeddingBag(5, 4, mode="max")})  # fmt: skip
    with pytest.raises(ValueError, match=r"norm: max_norm.*tied: its weight is shared by 2.*max: mode='max'"):
        tables.quantize_tables(model)
    assert isinstance(model["fine"], nn.Embedding)


def replicas() -> dict:
    """A job of two ranks: each its own batch, one table."""
    import torch.distributed as dist

    torch.manual_seed(0)
    table = tables.Embedding(50, 16, rows="int8:row")
    optimizer = TableOptimizer(table, Rule("rowwise_adagrad", lr=0.1))
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.randint(0, 50, (20 + dist.get_rank(),), generator=generator)
        (table(ids) - target(ids)).square().sum().backward()
        optimizer.step()
    return {"weight": table.weight}


def test_replicas_make_the_same_update() -> None:
    results = on_ranks(2, "nn.test_tables", "replicas")
    assert torch.equal(results[0]["weight"], results[1]["weight"])
    torch.manual_seed(0)
    assert not torch.equal(results[0]["weight"], tables.Embedding(50, 16, rows="int8:row").weight)


def test_a_torchrec_collection_takes_low_precision_bags() -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed: pip install 'loka[torchrec]'")
    from comms.jobs_torchrec import collection, example

    ebc, plain = collection(), collection()
    assert len(tables.quantize_tables(ebc, rows="int8:row")) == 3
    plain.load_state_dict(ebc.state_dict())
    torch.testing.assert_close(ebc(example(0)).values(), plain(example(0)).values())


def test_a_table_that_cannot_be_trained_is_not_left_out_in_silence() -> None:
    model = nn.ModuleDict({n: tables.Embedding(8, 4, rows=r) for n, r in (("user", "int8:row"), ("item", "int4:row"))})
    with pytest.raises(ValueError, match=r"item has rows of int4:row.*requires_grad_"):
        TableOptimizer(model)
    model["item"].requires_grad_(False)
    assert list(TableOptimizer(model).tables) == ["user"]
    model["user"].requires_grad_(False)
    with pytest.raises(ValueError, match="every table is frozen"):
        TableOptimizer(model)


class Scaled(nn.Embedding):
    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return super().forward(index) * 8 + 1


def test_a_table_that_does_more_than_look_rows_up_is_not_replaced() -> None:
    """Its own forward, and hooks, would be lost without a word."""
    hooked = nn.Sequential(nn.Embedding(10, 4))
    hooked[0].register_forward_hook(lambda module, given, result: result * 2)
    for model, told in ((nn.Sequential(Scaled(10, 4)), "a forward of its own"), (hooked, "has hooks")):
        before = model[0]
        with pytest.raises(ValueError, match=told):
            tables.quantize_tables(model, rows="int8:row")
        assert model[0] is before


class Tied(nn.Module):
    """Scores every item: the table looks histories up, and its weight is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.mix = nn.Embedding(30, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.mix(self.items(ids).mean(1)) @ self.items.weight.T


def test_a_weight_that_is_multiplied_by_learns_too() -> None:
    torch.manual_seed(0)
    plain = Tied()
    low = copy.deepcopy(plain)
    tables.quantize_tables(low, rows="float32")
    ids, target = torch.randint(0, 30, (12, 3)), torch.randint(0, 30, (12,))
    for model in (plain, low):
        torch.nn.functional.cross_entropy(model(ids), target).backward()
    torch.optim.SGD([plain.items.weight], lr=1.0).step()
    TableOptimizer(low, Rule("sgd", lr=1.0)).step()
    torch.testing.assert_close(low.items.weight.detach(), plain.items.weight.detach())
    torch.testing.assert_close(low.mix.weight.grad, plain.mix.weight.grad)
    assert not any(value.requires_grad for value in low.state_dict().values())
