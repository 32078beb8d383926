import pytest
import torch

from loka import models
from loka.data.batch import Batch, Jagged
from loka.data.schema import Field, Schema, SequenceField
from loka.models import Ranker

from .checks import assert_compiles, tower

SCHEMA = Schema(
    dense=("age", "price"),
    categorical=(Field("user", 11), Field("item", 7)),
    sequences=(SequenceField("history", 7, 4, shares="item"), SequenceField("tags", 5, 3)),
    labels=("click", "buy"),
)
CORES = [name for name in models.names() if issubclass(models.registry.FAMILIES[name].model, models.Core)]


def make_batch(size, seed=0):
    g = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 0, 1, 2] * size)[:size]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(lengths.sum())
    return Batch(
        dense=torch.randn(size, 2, generator=g),
        categorical=torch.stack([torch.randint(11, (size,), generator=g), torch.randint(7, (size,), generator=g)], 1),
        sequences={
            "history": Jagged(torch.randint(7, (total,), generator=g), offsets),
            "tags": Jagged(torch.randint(5, (total,), generator=g), offsets),
        },
        labels=torch.zeros(size, 2),
        group=torch.zeros(size, dtype=torch.int64),
    )


def test_vectors_are_dense_then_fields_then_pooled_histories():
    torch.manual_seed(0)
    ranker = models.build_ranker(SCHEMA, "dlrm", "tiny")
    batch = make_batch(3)
    x = ranker.embed(batch)
    weight = ranker.embedding.table.weight
    user, item, tags = weight[:11], weight[11:18], weight[18:23]
    assert x.shape == (3, 5, 16)
    torch.testing.assert_close(x[:, 0], tower(batch.dense, ranker.dense))
    torch.testing.assert_close(x[:, 1], user[batch.categorical[:, 0]])
    torch.testing.assert_close(x[:, 2], item[batch.categorical[:, 1]])
    torch.testing.assert_close(x[0, 3], item[batch.sequences["history"].row(0)].mean(0))
    torch.testing.assert_close(x[0, 4], tags[batch.sequences["tags"].row(0)].mean(0))
    assert x[1, 3:].eq(0).all(), "an empty history is a zero vector"


@pytest.mark.parametrize("family", CORES)
def test_every_core_ranks_a_batch(family):
    torch.manual_seed(0)
    ranker = models.build_ranker(SCHEMA, family, "tiny", sparse=True)
    for size in (1, 6):
        logits = ranker(make_batch(size))
        assert logits.shape == (size, 2)
        assert logits.dtype == torch.float32
    logits.square().sum().backward()
    assert ranker.embedding.table.weight.grad.is_sparse
    alone = torch.cat([ranker(_row(make_batch(6), i)) for i in range(6)])
    torch.testing.assert_close(alone, logits, rtol=1e-4, atol=1e-5, msg="an example must not see its batch")


def _row(batch, i):
    one = torch.tensor([0, 0])
    rows = {}
    for name, jagged in batch.sequences.items():
        values = jagged.row(i)
        rows[name] = Jagged(values, one + torch.tensor([0, len(values)]))
    return Batch(
        batch.dense[i : i + 1], batch.categorical[i : i + 1], rows, batch.labels[i : i + 1], batch.group[i : i + 1]
    )


@pytest.mark.parametrize("family", CORES)
def test_every_core_ranks_in_bf16_under_autocast(family):
    torch.manual_seed(0)
    ranker = models.build_ranker(SCHEMA, family, "tiny").eval()
    exact = ranker(make_batch(6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = ranker(make_batch(6))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("family", CORES)
def test_all_histories_empty(family):
    batch = make_batch(2)
    nothing = Jagged(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    batch = Batch(batch.dense, batch.categorical, {"history": nothing, "tags": nothing}, batch.labels, batch.group)
    logits = models.build_ranker(SCHEMA, family, "tiny")(batch)
    assert logits.isfinite().all()
    logits.sum().backward()


def test_whole_ranker_compiles_to_one_graph():
    torch.manual_seed(0)
    assert_compiles(models.build_ranker(SCHEMA, "wukong", "tiny"), make_batch(3))


def test_core_compiles_below_sparse_tables():
    torch.manual_seed(0)
    ranker = models.build_ranker(SCHEMA, "wukong", "tiny", sparse=True)
    expected = ranker(make_batch(3))
    ranker.core.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    out = ranker(make_batch(3))
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert ranker.embedding.table.weight.grad.is_sparse


def test_data_without_dense_features_or_histories():
    schema = Schema((), (Field("a", 3), Field("b", 4)), (), ("y",))
    batch = Batch(torch.zeros(2, 0), torch.tensor([[0, 3], [2, 1]]), {}, torch.zeros(2, 1), torch.zeros(2))
    ranker = models.build_ranker(schema, "dlrm", "tiny")
    assert ranker.dense is None
    assert ranker(batch).shape == (2, 1)


def test_id_out_of_range_is_named():
    batch = make_batch(2)
    batch.categorical[1, 1] = 7
    with pytest.raises(ValueError, match="'item' got id 7"):
        models.build_ranker(SCHEMA, "wukong", "tiny")(batch)


def test_core_must_fit_the_schema():
    with pytest.raises(ValueError, match=r"5 feature vectors.*n=16"):
        Ranker(SCHEMA, models.build("wukong", "tiny", labels=2))
    with pytest.raises(ValueError, match=r"2 labels.*predicts 1"):
        Ranker(SCHEMA, models.build("wukong", "tiny", n=5))


def test_cost_counts_tables_as_parameters_but_not_as_active():
    ranker = models.build_ranker(SCHEMA, "wukong", "tiny")
    cost, inner = models.count(ranker), models.count(ranker.core)
    assert cost.parameters == inner.parameters + 23 * 16 + 2 * 16 + 16
    assert cost.active_parameters == cost.parameters - 23 * 16
    assert cost.flops_forward == inner.flops_forward + 2 * 2 * 16
