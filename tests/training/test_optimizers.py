import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loka.training import Optimizers, RowwiseAdagrad, TrainConfig, split_parameters
from loka.training import optimizers as module

from .toy import make_data, make_model


def dense_reference(weight, gradients, *, lr, eps, initial=0.0):
    """Rowwise Adagrad on dense gradients in float64; rows without a gradient are left alone."""
    weight, history = weight.double().clone(), torch.full((weight.shape[0],), initial, dtype=torch.float64)
    for gradient in gradients:
        gradient = gradient.double()
        history += gradient.square().mean(dim=1)
        touched = gradient.abs().sum(dim=1) > 0
        step = lr * gradient / (history.sqrt() + eps).unsqueeze(1)
        weight[touched] -= step[touched]
    return weight, history


def run_steps(table, batches, **settings):
    optimizer = RowwiseAdagrad(table.parameters(), **settings)
    dense_gradients = []
    for ids, weights in batches:
        optimizer.zero_grad()
        (table(ids) * weights).sum().backward()
        assert table.weight.grad.is_sparse
        dense_gradients.append(table.weight.grad.to_dense())
        optimizer.step()
    return optimizer, dense_gradients


def make_batches(count=4, rows=30, width=5, size=40, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(0, rows // 2, (size,), generator=generator) * 2, torch.randn(size, width, generator=generator))
        for _ in range(count)
    ]


@pytest.fixture(params=["cpu", "padded"])
def sums(request, monkeypatch):
    """Both ways to sum duplicates; the padded one is what a GPU runs."""
    if request.param == "padded":
        monkeypatch.setattr(module, "sum_segments", module.sum_segments_padded)


@pytest.mark.usefixtures("sums")
def test_touched_rows_match_the_dense_reference_and_the_rest_keep_their_bits():
    torch.manual_seed(0)
    table = nn.Embedding(30, 5, sparse=True)
    with torch.no_grad():
        table.weight[1] = -0.0  # an added +0.0 would flip this sign
        table.weight[0, 0] = -0.0
    before = table.weight.detach().clone()
    optimizer, gradients = run_steps(table, make_batches(), lr=0.1, eps=1e-6)
    expected, history = dense_reference(before, gradients, lr=0.1, eps=1e-6)
    torch.testing.assert_close(table.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state[table.weight]["sum"].double(), history, rtol=1e-5, atol=1e-6)
    untouched = torch.stack(gradients).abs().sum(dim=(0, 2)) == 0
    assert 15 <= int(untouched.sum()) < 30
    after = table.weight.detach()
    assert torch.equal(after[untouched].view(torch.int32), before[untouched].view(torch.int32))
    assert not torch.equal(after[~untouched], before[~untouched])


def test_one_number_per_row_is_all_the_state():
    table = nn.Embedding(30, 5, sparse=True)
    optimizer, _ = run_steps(table, make_batches(1), lr=0.1)
    assert {name: tuple(value.shape) for name, value in optimizer.state[table.weight].items()} == {"sum": (30,)}


class Sizes(TorchDispatchMode):
    """Notes the number of elements of every tensor that an operation allocates."""

    def __init__(self, *known):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            strided = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
            if strided and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.usefixtures("sums")
def test_no_buffer_of_the_size_of_the_table_is_ever_made():
    rows, width = 20_000, 8
    table = nn.Embedding(rows, width, sparse=True)
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
    ids = torch.randint(0, rows, (300,), generator=torch.Generator().manual_seed(0))
    with Sizes(table.weight) as sizes:
        for _ in range(2):
            optimizer.zero_grad()
            table(ids).sum().backward()
            optimizer.step()
    assert sizes.largest == rows  # the accumulator: one number per row, made once


@pytest.mark.usefixtures("sums")
def test_duplicates_are_summed_before_they_are_squared():
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer, _ = run_steps(table, [(torch.tensor([1, 1, 1]), torch.ones(3, 2))], lr=0.5, eps=1e-8)
    assert optimizer.state[table.weight]["sum"].tolist() == [0.0, 9.0, 0.0, 0.0]  # (1 + 1 + 1)^2, not 3
    torch.testing.assert_close(table.weight.detach()[1], before[1] - 0.5)


@pytest.mark.usefixtures("sums")
def test_bags_and_accumulated_gradients_work():
    table = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
    before = table.weight.detach().clone()
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
    for ids in ([[1, 2], [2, 3]], [[3, 4], [4, 5]]):
        table(torch.tensor(ids)).sum().backward()
    gradient = table.weight.grad.to_dense()
    optimizer.step()
    expected, _ = dense_reference(before, [gradient], lr=0.1, eps=1e-8)
    torch.testing.assert_close(table.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("sums")
def test_an_empty_lookup_changes_nothing():
    table = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
    before = table.weight.detach().clone()
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
    table(torch.empty(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    assert torch.equal(table.weight, before)


def test_a_dense_gradient_is_refused():
    table = nn.Embedding(10, 3)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=True"):
        RowwiseAdagrad(table.parameters(), lr=0.1).step()


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"eps": 0.0}, {"initial": -1.0}])
def test_bad_hyperparameters_are_refused(settings):
    with pytest.raises(ValueError, match="expected lr > 0"):
        RowwiseAdagrad(nn.Embedding(3, 2, sparse=True).parameters(), **settings)


def test_parameters_are_split_by_module_type():
    model = make_model()
    model.frozen = nn.Linear(2, 2).requires_grad_(False)
    model.position = nn.Embedding(5, 2)  # dense gradients: not a table
    dense, tables = split_parameters(model)
    assert [name for name, _ in tables] == ["table.weight"]
    assert {name for name, _ in dense} == {
        name for name, _ in model.named_parameters() if not name.startswith(("table", "frozen"))
    }


def test_decay_spares_vectors_and_tables():
    model = make_model(dropout=0.0)
    optimizers = Optimizers(model, TrainConfig(weight_decay=0.5, learning_rate=0.1))
    batch = make_data().train.whole
    (model(batch).sum() * 0).backward()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizers.step()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"core.0.weight", "core.4.weight"}


def test_adam_is_fused_and_the_factor_reaches_both_optimisers():
    optimizers = Optimizers(make_model(), TrainConfig(learning_rate=0.1, embedding_learning_rate=0.4))
    (adam, _), (adagrad, _) = optimizers._parts
    assert adam.defaults["fused"] is True
    optimizers.set_factor(0.5)
    assert {group["lr"] for group in adam.param_groups} == {0.05}
    assert {group["lr"] for group in adagrad.param_groups} == {0.2}


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameter"):
        Optimizers(make_model().requires_grad_(False), TrainConfig())


def test_state_of_an_unknown_parameter_is_refused():
    optimizers = Optimizers(make_model(), TrainConfig())
    with pytest.raises(ValueError, match="elsewhere"):
        optimizers.load_state_tensors({"elsewhere:exp_avg": torch.zeros(2)})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_update_equals_the_cpu_update_and_never_waits_for_the_device():
    tables = [nn.Embedding(30, 5, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    tables[1].cuda()
    run_steps(tables[0], make_batches(), lr=0.1)
    batches = [(ids.cuda(), weights.cuda()) for ids, weights in make_batches()]
    optimizer = RowwiseAdagrad(tables[1].parameters(), lr=0.1)
    for ids, weights in batches:
        optimizer.zero_grad()
        (tables[1](ids) * weights).sum().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(tables[1].weight.detach().cpu(), tables[0].weight.detach(), rtol=1e-5, atol=1e-6)
