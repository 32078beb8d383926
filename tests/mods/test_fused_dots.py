"""fused_dots: pairwise products in one kernel where all three operations are there, and the user's own results everywhere else."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka import mods
from loka.mods import fused_dots
from loka.nn.mixing import mix

from .zoo import assert_same_state, snapshot

N, D = 5, 8
Body = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """A DLRM in small: vectors, their products in a way that is given, a top."""

    def __init__(self, body: Body, width: int = N * (N - 1) // 2) -> None:
        super().__init__()
        self.body, self.bottom, self.top = body, nn.Linear(D, D), nn.Linear(width, 1)
        i, j = torch.triu_indices(N, N, 1)
        self.register_buffer("i", i.contiguous(), persistent=False)
        self.register_buffer("j", j.contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body(self, self.bottom(x)))


def by_bmm(m: Model, x: Tensor) -> Tensor:
    return torch.bmm(x, x.transpose(1, 2))[:, m.i, m.j]


def by_matmul(m: Model, x: Tensor) -> Tensor:
    return torch.matmul(x, x.mT)[:, m.i, m.j]


def by_sign(m: Model, x: Tensor) -> Tensor:
    return (x @ x.transpose(-1, -2))[:, m.i, m.j]


def made_inside(m: Model, x: Tensor) -> Tensor:
    i, j = torch.tril_indices(N, N, -1, device=x.device)
    return torch.bmm(x, torch.transpose(x, 1, 2))[:, i, j]


def two_products(m: Model, x: Tensor) -> Tensor:
    y = x.tanh()
    a, b = torch.bmm(x, x.transpose(1, 2)), torch.bmm(y, y.transpose(1, 2))
    return a[:, m.i, m.j] - 2 * b[:, m.i, m.j]


def joined_by_name(m: Model, x: Tensor) -> Tensor:
    x = torch.cat(tensors=[x[:, :1], x[:, 1:]], dim=1)
    return torch.bmm(x, x.transpose(1, 2))[:, m.i, m.j]


WHOLE = [by_bmm, by_matmul, by_sign, made_inside, two_products, joined_by_name]


def twice(m: Model, x: Tensor) -> Tensor:
    z = torch.bmm(x, x.transpose(1, 2))
    return z[:, m.i, m.j] + z.mean((1, 2))[:, None]


def of_another(m: Model, x: Tensor) -> Tensor:
    return torch.bmm(x, x.tanh().transpose(1, 2))[:, m.i, m.j]


def written_over(m: Model, x: Tensor) -> Tensor:
    z = torch.bmm(x, x.transpose(1, 2))
    z.mul_(0.5)
    return z[:, m.i, m.j]


def written_in_part(m: Model, x: Tensor) -> Tensor:
    z = torch.bmm(x, x.transpose(1, 2))
    z[:, 0] = 3.0
    return z[:, m.i, m.j]


def written_by_sign(m: Model, x: Tensor) -> Tensor:
    z = torch.bmm(x, x.transpose(1, 2))
    z *= 0.5
    return z[:, m.i, m.j]


def rectified_in_place(m: Model, x: Tensor) -> Tensor:
    return F.relu(torch.bmm(x, x.transpose(1, 2)), inplace=True)[:, m.i, m.j]


def repeated(m: Model, x: Tensor) -> Tensor:
    return torch.bmm(x, x.transpose(1, 2))[:, m.i.clone().fill_(1), m.j]


def backwards(m: Model, x: Tensor) -> Tensor:
    return torch.bmm(x, x.transpose(1, 2))[:, m.i - N, m.j - N]


def spread(m: Model, x: Tensor) -> Tensor:
    return torch.bmm(x, x.transpose(1, 2))[:, torch.tensor([2]), m.j]


def by_mask(m: Model, x: Tensor) -> Tensor:
    mask = torch.ones(N, N).triu(1).bool()
    return torch.bmm(x, x.transpose(1, 2))[:, mask]


def by_numbers(m: Model, x: Tensor) -> Tensor:
    return torch.bmm(x, x.transpose(1, 2))[:, [0, 1] * 5, [1, 2] * 5]


def some_examples(m: Model, x: Tensor) -> Tensor:
    return torch.bmm(x, x.transpose(1, 2))[1:, m.i, m.j]


def transposed_without_gradients(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        transposed = x.transpose(1, 2)
    return torch.bmm(x, transposed)[:, m.i, m.j]


def multiplied_without_gradients(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        products = torch.bmm(x, x.transpose(1, 2))
    return products[:, m.i, m.j] + x[:, :2].flatten(1)[:, :10]


HALF = [
    twice, of_another, written_over, written_in_part, written_by_sign, rectified_in_place, repeated, backwards, spread, by_mask,
    by_numbers, some_examples, transposed_without_gradients, multiplied_without_gradients,
]  # fmt: skip


def name_of(body: Body) -> str:
    return body.__name__


def make(body: Body) -> tuple[Model, Tensor]:
    torch.manual_seed(1)
    return Model(body), torch.randn(6, N, D)


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    y = model(x)
    return y.detach(), list(torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]))


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pairs each call of the kernel had."""
    calls: list[int] = []
    real = fused_dots.multiply_pairs
    monkeypatch.setattr(
        fused_dots, "multiply_pairs", lambda x, i, j, head=None: (calls.append(i.shape[0]), real(x, i, j, head))[1]
    )
    return calls


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("body", WHOLE, ids=name_of)
def test_the_same_up_to_rounding(body: Body, training: bool, used: list[int]) -> None:
    model, x = make(body)
    expected = step(model.train(training), x)
    done = mods.apply(model, "fused_dots", example=x)
    assert [change.site for change in done.summary.changed] == [""]
    used.clear()
    found = step(model.train(training), x)
    assert used == [10] * (2 if body is two_products else 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("body", HALF, ids=name_of)
def test_half_a_pattern_is_the_users_own(body: Body, used: list[int]) -> None:
    """Whether the mod sees it beforehand or only when it runs."""
    model, x = make(body)
    expected = step(model, x)
    mods.apply(model, "fused_dots", example=x)
    torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)
    mods.revert(model)
    model.__class__ = mix(Model, fused_dots.FusedDots)  # as if it had been taken for one
    used.clear()
    found = step(model, x)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert used == ([10] if body is twice else [])


def test_integers_are_multiplied_as_before() -> None:
    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            i, j = torch.triu_indices(N, N, 1)
            return torch.bmm(x, x.transpose(1, 2))[:, i, j]

    x = torch.randint(-9, 9, (4, N, D))
    model = Count()
    expected = model(x)
    model.__class__ = mix(Count, fused_dots.FusedDots)
    assert torch.equal(model(x), expected)


def test_under_autocast() -> None:
    model, x = make(by_bmm)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, x)
        mods.apply(model, "fused_dots", example=x)
        found = step(model, x)
    assert found[0].dtype == expected[0].dtype
    torch.testing.assert_close(found[0], expected[0], rtol=0.03, atol=0.05)
    for a, b in zip(found[1], expected[1], strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 0.03 * b.norm()


@pytest.mark.parametrize("body", [by_bmm, by_matmul, two_products, written_over, twice], ids=name_of)
def test_compiles_whole(body: Body) -> None:
    model, x = make(body)
    expected = step(model, x)
    model.__class__ = mix(Model, fused_dots.FusedDots)
    found = step(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("body", [by_bmm, by_sign, two_products], ids=name_of)
def test_compiled_the_kernel_stands_in_the_graph(body: Body) -> None:
    """It brings its own gradient, by which it is known there."""
    model, x = make(body)
    mods.apply(model, "fused_dots", example=x)
    names: list[str] = []

    def see(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        names.extend(str(node.target) for part in graph.modules() for node in part.graph.nodes)
        return graph

    torch.compile(model, fullgraph=True, backend=see)(x)
    assert any("autograd_function" in name for name in names), names


def test_pairs_that_occur_twice_stay_the_users_own() -> None:
    """Compiled code could not see them: the example is looked at before."""
    model, x = make(by_bmm)
    model.j[0], model.i[0] = model.j[1], model.i[1]
    summary = mods.apply(model, "fused_dots", example=x)
    assert "occurs 2 times" in str(summary)
    assert type(model) is Model


def test_only_the_module_whose_pairs_are_wrong_is_left() -> None:
    model, x = make(by_bmm)
    other, _ = make(by_bmm)
    other.j[0], other.i[0] = other.j[1], other.i[1]
    both = nn.ModuleList([model, other])
    both.forward = lambda x: model(x) + other(x)  # type: ignore[method-assign]
    summary = mods.apply(both, "fused_dots", example=x)
    assert "1: its products may be indexed otherwise" in str(summary)
    assert isinstance(model, fused_dots.FusedDots)
    assert type(other) is Model
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in both.modules())


def test_indices_of_another_type_stay_the_users_own() -> None:
    """Nothing is claimed that would never run."""
    model, x = make(by_bmm)
    model.i, model.j = model.i.int(), model.j.int()
    assert "of torch.int32" in str(mods.apply(model, "fused_dots", example=x))
    assert type(model) is Model


def test_without_an_example_nothing_is_known_about_the_pairs() -> None:
    class Described(Model):
        def example_inputs(self) -> tuple[Tensor, ...]:
            return (torch.empty(4, N, D, device="meta"),)

    model = Described(by_bmm)
    assert "not known without an example" in str(mods.apply(model, "fused_dots"))
    assert type(model) is Described


def test_inference_mode() -> None:
    model, x = make(by_bmm)
    with torch.inference_mode():
        expected = model(x)
    mods.apply(model, "fused_dots", example=x)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)


def test_reverts_and_keeps_parameters_and_keys() -> None:
    model, x = make(by_bmm)
    before, parameters = snapshot(model), list(model.parameters())
    mods.apply(model, "fused_dots", example=x)
    assert type(model) is not Model
    assert_same_state(model, before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    out = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), out)
    mods.revert(model)
    assert type(model) is Model
    assert_same_state(model, before)


def test_without_an_example_nothing_is_guessed() -> None:
    done = mods.apply(make(by_bmm)[0], "fused_dots")
    assert not done.summary.changed
    assert "not known" in done.summary.left[0].why


class Joining(nn.Module):
    """A DLRM's interaction: the dense vector in front of the sparse ones, which may be written to afterwards."""

    def __init__(self, write: str = "") -> None:
        super().__init__()
        self.dense, self.write = nn.Linear(5, D), write
        first, second = torch.triu_indices(N, N, 1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        sparse = sparse * 1 if self.write else sparse
        x = torch.cat([self.dense(dense)[:, None], sparse], 1)
        if self.write == "seen":
            sparse.mul_(3)
        elif self.write == "only by the compiler":
            torch._foreach_mul_([sparse], 3)
        products = torch.bmm(x, x.transpose(1, 2))[:, self.first, self.second]
        return torch.cat([products, sparse.flatten(1)], 1) if self.write else products


def joined_step(run: nn.Module, autocast: bool, rows: int = 6) -> tuple[Tensor, Tensor, bool]:
    """The output, the gradient of the sparse vectors, and whether it left the model contiguous."""
    generator = torch.Generator().manual_seed(2)
    dense, leaf = torch.randn(rows, 5, generator=generator), torch.randn(rows, N - 1, D, generator=generator)
    leaf.requires_grad_()
    sparse, seen = leaf * 1, []
    sparse.register_hook(seen.append)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = run(dense, sparse)
    y.float().square().sum().backward()
    return y.detach(), leaf.grad, seen[0].is_contiguous()


@pytest.mark.parametrize("write", ["", "seen", "only by the compiler"])
@pytest.mark.parametrize("autocast", [True, False])
def test_compiled_training_multiplies_the_parts_of_a_concatenation(autocast: bool, write: str) -> None:
    torch.manual_seed(0)
    model = Joining(write)
    expected, gradient, _ = joined_step(model, autocast)
    mods.apply(model, "fused_dots", example=(torch.randn(6, 5), torch.randn(6, N - 1, D)))
    for run in (model, torch.compile(model), torch.compile(model, backend="aot_eager")):
        torch._dynamo.reset()
        found, slope, contiguous = joined_step(run, autocast)
        tolerance = 2e-2 if autocast else 1e-5
        torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
        assert float((slope - gradient).norm() / gradient.norm()) < tolerance
    if autocast and not write:  # inductor removes the cast of this backend, which computes in float32
        assert contiguous, "a cast comes last, so that nobody has to copy the gradient"
