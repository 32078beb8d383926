import pytest
import torch

from loka.nn import EmbeddingTables
from loka.nn.embedding import pad_recent

FIELDS = [("user", 5), ("item", 7), ("tag", 3)]


@pytest.fixture
def tables():
    torch.manual_seed(0)
    return EmbeddingTables(FIELDS, 4)


def rows_of(tables, name):
    start = sum(n for field, n in FIELDS[: [f for f, _ in FIELDS].index(name)])
    return tables.table.weight[start : start + dict(FIELDS)[name]]


def test_lookup_reads_every_field_from_its_own_rows(tables):
    ids = torch.tensor([[0, 6, 2], [4, 0, 0]])
    out = tables.lookup(ids)
    for f, (name, _) in enumerate(FIELDS):
        torch.testing.assert_close(out[:, f], rows_of(tables, name)[ids[:, f]])
    torch.testing.assert_close(tables.lookup(ids[:, :2]), out[:, :2])


def test_pool_is_the_mean_and_zero_for_an_empty_row(tables):
    values, offsets = torch.tensor([1, 6, 6, 2]), torch.tensor([0, 3, 3, 4])
    item = rows_of(tables, "item")
    expected = torch.stack([(item[1] + 2 * item[6]) / 3, torch.zeros(4), item[2]])
    torch.testing.assert_close(tables.pool("item", values, offsets), expected)


def test_pool_of_nothing_at_all(tables):
    out = tables.pool("item", torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert out.eq(0).all()
    assert out.shape == (2, 4)


def test_pad_keeps_the_most_recent_in_order(tables):
    values, offsets = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 4, 4, 5])
    vectors, lengths = tables.pad("item", values, offsets, 3)
    item = rows_of(tables, "item")
    assert lengths.tolist() == [3, 0, 1]
    torch.testing.assert_close(vectors[0], item[[2, 3, 4]])
    torch.testing.assert_close(vectors[2, 0], item[5])
    assert vectors[1].eq(0).all()
    assert vectors[2, 1:].eq(0).all()


def test_pad_recent_without_values():
    ids, lengths = pad_recent(torch.empty(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), 2)
    assert ids.tolist() == [[0, 0], [0, 0]]
    assert lengths.tolist() == [0, 0]


def test_pad_recent_can_skip_the_most_recent_and_keeps_what_a_value_is_made_of():
    values = torch.arange(12).view(6, 2)
    ids, lengths = pad_recent(values, torch.tensor([0, 4, 5, 6]), 2, skip=1)
    assert lengths.tolist() == [2, 0, 0]
    assert ids[0].tolist() == [[2, 3], [4, 5]]
    assert ids[1:].eq(0).all()


@pytest.mark.parametrize(("bad", "message"), [(7, "'item' got id 7 .row 1.*0 to 6"), (-1, "'item' got id -1")])
def test_id_out_of_range_names_field_id_and_range(tables, bad, message):
    ids = torch.tensor([[0, 0, 0], [1, bad, 1]])
    with pytest.raises(ValueError, match=message):
        tables.lookup(ids)
    with pytest.raises(ValueError, match="'item' got id"):
        tables.pool("item", torch.tensor([0, bad]), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="'item' got id"):
        tables.pad("item", torch.tensor([0, bad]), torch.tensor([0, 2]), 4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_id_out_of_range_raises_inside_a_compiled_graph(tables, backend):
    torch._dynamo.reset()
    compiled = torch.compile(tables.lookup, fullgraph=True, backend=backend)
    good = torch.tensor([[1, 2, 2]])
    torch.testing.assert_close(compiled(good), tables.lookup(good))
    with pytest.raises(RuntimeError, match="out of range in one of the fields user, item, tag"):
        compiled(torch.tensor([[1, 7, 2]]))


def test_sparse_gradients_touch_only_the_rows_that_were_read():
    tables = EmbeddingTables(FIELDS, 4, sparse=True)
    out = tables.lookup(torch.tensor([[1, 2, 0]])).sum()
    out = out + tables.pool("item", torch.tensor([2, 3]), torch.tensor([0, 2])).sum()
    out.backward()
    grad = tables.table.weight.grad
    assert grad.is_sparse
    dense = grad.to_dense()
    touched = dense.abs().sum(1).nonzero().flatten().tolist()
    assert touched == [1, 5 + 2, 5 + 3, 12]
    torch.testing.assert_close(dense[7], torch.full((4,), 1.5))


def test_state_dict_is_one_plain_weight(tables):
    assert {k: tuple(v.shape) for k, v in tables.state_dict().items()} == {"table.weight": (15, 4)}


def test_bad_tables_and_names(tables):
    with pytest.raises(ValueError, match="cardinality 0"):
        EmbeddingTables([("a", 0)], 4)
    with pytest.raises(ValueError, match="unique"):
        EmbeddingTables([("a", 1), ("a", 2)], 4)
    with pytest.raises(ValueError, match=r"'shop'.*user, item, tag"):
        tables.pool("shop", torch.tensor([0]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="4 fields"):
        tables.lookup(torch.zeros(1, 4, dtype=torch.int64))


def test_pad_recent_ignores_values_behind_the_last_row_and_its_gradient_adds_nothing_up():
    values = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 5])
    padded, lengths = pad_recent(values, offsets, 2)
    assert lengths.tolist() == [2, 0, 2]
    torch.testing.assert_close(padded[0], values[1:3])
    torch.testing.assert_close(padded[2], values[3:5])
    assert padded[1].eq(0).all()
    weights = torch.randn_like(padded)
    (padded * weights).sum().backward()
    expected = torch.zeros_like(values)
    expected[1:5] = torch.cat([weights[0], weights[2]])
    torch.testing.assert_close(values.grad, expected)
    assert torch.autograd.gradcheck(lambda v: pad_recent(v, offsets, 4, skip=1)[0], (values,))
    names = []
    node = pad_recent(values, offsets, 2)[0].grad_fn
    while node is not None:
        names.append(type(node).__name__)
        node = node.next_functions[0][0] if node.next_functions else None
    assert any("IndexCopy" in name for name in names), names
