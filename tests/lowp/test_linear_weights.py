"""Quantised weights are made once and never used stale: whatever changes a weight, the next forward sees it."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import loka.lowp.weight_cache as weight_cache
from loka.dispatch import USUAL
from loka.lowp.linear import Linear
from loka.lowp.weight_cache import StaleWeightError
from loka.placing import LinearOptions, convert, refresh

from .test_linear import binding_for


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights that were quantised, in order."""
    seen: list[tuple[int, ...]] = []
    real = weight_cache.quantize_pair

    def counting(weight: Tensor, *args: object) -> object:
        seen.append(tuple(weight.shape))
        return real(weight, *args)

    monkeypatch.setattr(weight_cache, "quantize_pair", counting)
    return seen


def make(recipe: str = "tensorwise", **options: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    convert(model, recipe=recipe, backend="reference", options=LinearOptions(**options))  # type: ignore[arg-type]
    return model


def plain_twin(model: nn.Sequential, recipe: str = "tensorwise") -> nn.Sequential:
    """A model with the same weights, converted just now: nothing in it can be stale."""
    twin = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    twin.load_state_dict(model.state_dict())
    convert(twin, recipe=recipe, backend="reference")
    return twin.train(model.training)


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    """y, dx and every parameter's gradient."""
    for p in model.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    run(model, x)
    optimizer.step()


class DataSGD(torch.optim.Optimizer):
    """An optimizer of the old kind, which writes through .data and moves no version counter."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.01)


def sgd(model: nn.Module, x: Tensor) -> None:
    step(model, torch.optim.SGD(model.parameters(), 0.1), x)


def adam_foreach(model: nn.Module, x: Tensor) -> None:
    step(model, torch.optim.Adam(model.parameters(), 0.1, foreach=True), x)


def adam_fused(model: nn.Module, x: Tensor) -> None:
    step(model, torch.optim.Adam(model.parameters(), 0.1, fused=True), x)


def through_data(model: nn.Module, x: Tensor) -> None:
    step(model, DataSGD(model.parameters()), x)


def load(model: nn.Module, x: Tensor) -> None:
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})


def load_assigned(model: nn.Module, x: Tensor) -> None:
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)


def edit_in_place(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model[0].weight.mul_(3)  # type: ignore[operator, index, union-attr]


def edit_a_row(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model[0].weight[1].fill_(7)  # type: ignore[index, union-attr]


def edit_a_detached_view(model: nn.Module, x: Tensor) -> None:
    model[0].weight.detach().t().add_(1)  # type: ignore[operator, index, union-attr]


def replace_the_parameter(model: nn.Module, x: Tensor) -> None:
    model[0].weight = nn.Parameter(torch.randn(48, 32))  # type: ignore[index, union-attr]


def replace_the_storage(model: nn.Module, x: Tensor) -> None:
    for _ in range(2):  # twice: the allocator may hand the first address out again
        model[0].weight.data = model[0].weight.data * 2  # type: ignore[index, union-attr]


def move_within_the_storage(model: nn.Module, x: Tensor) -> None:
    """Layers whose weights are rows of one tensor: the storage stays, the address does not."""
    weight = model[0].weight  # type: ignore[index, union-attr]
    stack = torch.stack([weight.detach(), torch.randn(48, 32)])
    weight.data = stack[0]
    run(model, x)
    weight.data = stack[1]


def transpose_within_the_storage(model: nn.Module, x: Tensor) -> None:
    """The same address, other strides."""
    weight = model[0].weight  # type: ignore[index, union-attr]
    square = torch.randn(48, 48)
    weight.data = square[:, :32]
    run(model, x)
    weight.data = square.T[:, :32]


def master_weights(model: nn.Module, x: Tensor) -> None:
    """The optimizer owns copies; after its step they are copied back, where no version counter shows it."""
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.1)
    run(model, x)
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad
    optimizer.step()
    for master, p in zip(masters, model.parameters(), strict=True):
        p.data.copy_(master.detach())


def round_trip_to_half(model: nn.Module, x: Tensor) -> None:
    model.half().float()


def swap_by_data_for_evaluation(model: nn.Module, x: Tensor) -> None:
    """What code with averaged weights does; the change of mode tells."""
    model.eval()
    model[0].weight.data.copy_(torch.randn(48, 32))  # type: ignore[index, union-attr]
    model.train()


CHANGES = [
    sgd,
    adam_foreach,
    adam_fused,
    through_data,
    load,
    load_assigned,
    edit_in_place,
    edit_a_row,
    edit_a_detached_view,
    replace_the_parameter,
    replace_the_storage,
    move_within_the_storage,
    transpose_within_the_storage,
    master_weights,
    round_trip_to_half,
    swap_by_data_for_evaluation,
]


@pytest.mark.parametrize("policy", ["step", "fresh"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_no_change_goes_unnoticed(change, policy: str) -> None:
    x = torch.randn(8, 32)
    model = make(weights=policy)
    before = run(model, x)
    assert same(before, run(model, x))
    change(model, x)
    after = run(model, x)
    assert same(after, run(plain_twin(model), x))
    assert not torch.equal(before[0], after[0])


def test_no_change_goes_unnoticed_in_compiled_code() -> None:
    torch._dynamo.reset()
    model = make()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, 32)
    run(compiled, x)
    changes = (sgd, adam_fused, through_data, load, edit_in_place, edit_a_row, edit_a_detached_view, move_within_the_storage, master_weights)  # fmt: skip
    for change in changes:
        change(model, x)
        assert same(run(compiled, x), run(plain_twin(model), x)), change.__name__


@pytest.mark.slow
def test_inductor_keeps_the_cache_and_notices_changes(counted: list[tuple[int, ...]]) -> None:
    """Inductor updates buffers in place where aot_eager copies them: both must be right, and only the former saves work."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    convert(model, recipe="tensorwise", backend="reference")
    compiled = torch.compile(model, fullgraph=True)
    twin = nn.Sequential(nn.Linear(32, 48, bias=False))
    convert(twin, recipe="tensorwise", backend="reference", options=LinearOptions(weights="fresh"))
    x = torch.randn(8, 32)
    run(compiled, x)
    for change in (sgd, through_data, edit_in_place):
        change(model, x)
        counted.clear()
        found = run(compiled, x)
        run(compiled, x)
        assert counted == [(48, 32)], change.__name__
        twin.load_state_dict(model.state_dict())
        close = [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, run(twin, x), strict=True)]
        assert all(close), change.__name__


@pytest.mark.parametrize("recipe", USUAL)
def test_micro_batches_quantise_a_weight_once(recipe: str, counted: list[tuple[int, ...]]) -> None:
    model = make(recipe)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counted.clear()
    for _ in range(2):
        for _ in range(4):
            model(torch.randn(8, 32, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    # the first step uses what the conversion made, the second quantises each weight once: W and W^T, forward and backward
    assert counted == [(48, 32), (16, 48)]


def test_fresh_weights_are_quantised_in_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    import loka.lowp.linear as linear

    model, seen = make(weights="fresh"), []
    real = linear.quantize_pair
    monkeypatch.setattr(linear, "quantize_pair", lambda *a: (seen.append(1), real(*a))[1])
    for _ in range(3):
        model(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert len(seen) == 6  # once per linear and forward, none in backward


class TestInference:
    def test_weights_are_quantised_once_and_kept(self, counted: list[tuple[int, ...]]) -> None:
        model = make().eval()
        with torch.no_grad():
            first = model(torch.ones(4, 32))
            counted.clear()
            for _ in range(5):
                assert torch.equal(model(torch.ones(4, 32)), first)
        assert counted == []

    def test_a_model_converted_for_inference_holds_no_transposes(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48)).eval()
        convert(model, recipe="tensorwise", backend="reference")
        cache = model[0].state.weights
        assert cache.data_t is None
        assert cache.nbytes == 32 * 48 + 4
        model.train()
        assert model[0].state.weights.data_t.shape == (32, 48)

    def test_gradients_of_inputs_in_eval_mode(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).eval()
        twin = copy.deepcopy(model).train()
        for m in (model, twin):
            convert(m, recipe="rowwise", backend="reference")
        x = torch.randn(8, 32)
        assert same(run(model, x), run(twin, x))

    def test_in_inference_mode(self) -> None:
        model, x = make().eval(), torch.randn(4, 32)
        with torch.no_grad():
            expected = model(x)
        with torch.inference_mode():
            assert torch.equal(model(x), expected)
            with torch.no_grad():
                model[0].weight.mul_(2)
            changed = model(x)
        assert not torch.equal(changed, expected)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        assert torch.equal(model(x), expected)

    def test_a_model_made_in_inference_mode_is_right_if_slow(self) -> None:
        with torch.inference_mode():
            model = make().eval()
            x = torch.randn(4, 32)
            first = model(x)
            model[0].weight.mul_(2)
            assert not torch.equal(model(x), first)


class TestManual:
    def test_the_optimizer_refreshes(self) -> None:
        model, x = make(weights="manual"), torch.randn(8, 32)
        sgd(model, x)
        assert same(run(model, x), run(plain_twin(model), x))

    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_stale_weight_raises(self, compiled: bool) -> None:
        torch._dynamo.reset()
        model, x = make(weights="manual"), torch.randn(8, 32)
        called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        called(x)
        edit_in_place(model, x)
        with pytest.raises(StaleWeightError, match=r"loka\.refresh"):
            called(x)
        assert refresh(model) == 2
        assert torch.equal(called(x), plain_twin(model)(x))

    def test_other_weights_raise_and_leave_its_own_alone(self) -> None:
        model, x = make(weights="manual"), torch.randn(8, 32)
        first = model(x)
        with pytest.raises(StaleWeightError):
            functional_call(model, {name: 2 * p.detach() for name, p in model.named_parameters()}, (x,))
        assert torch.equal(model(x), first)

    def test_loading_refreshes(self) -> None:
        model, x = make(weights="manual"), torch.randn(8, 32)
        load(model, x)
        assert same(run(model, x), run(plain_twin(model), x))


class TestSharing:
    def test_refresh_shows_what_data_hides(self) -> None:
        model, x = make(), torch.randn(8, 32)
        first = model(x)
        model[0].weight.data.mul_(2)
        refresh(model)
        assert same(run(model, x), run(plain_twin(model), x))
        assert not torch.equal(model(x), first)

    def test_one_weight_at_two_sites_with_two_recipes(self) -> None:
        """Compilers copy buffers; a copy of one site's must not pass for the other's."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
        model[1].weight = model[0].weight
        for linear, recipe in zip(model, ("rowwise", "tensorwise"), strict=True):
            Linear.adopt(linear, binding_for(recipe))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        x = torch.randn(8, 32) * torch.logspace(-3, 3, 8)[:, None]
        for _ in range(3):
            assert torch.equal(compiled(x), model(x))
            with torch.no_grad():
                model[0].weight.mul_(1.5)

    def test_other_weights_through_functional_call(self) -> None:
        model, x = make(), torch.randn(8, 32)
        for scale in (1.0, 2.0, 3.0):  # short-lived tensors, likely at one address, all with version 0
            weights = {name: p.detach() * scale for name, p in model.named_parameters()}
            expected = make()
            expected.load_state_dict(weights)
            assert torch.equal(functional_call(model, weights, (x,)), expected(x))

    def test_a_deep_copy_has_a_cache_of_its_own(self) -> None:
        model, x = make(), torch.randn(8, 32)
        twin = copy.deepcopy(model)
        assert twin[0].state.weights.data.data_ptr() != model[0].state.weights.data.data_ptr()
        first = model(x)
        edit_in_place(twin, x)
        assert torch.equal(model(x), first)
        assert torch.equal(twin(x), plain_twin(twin)(x))

    def test_a_step_between_forward_and_backward_is_an_error(self) -> None:
        """As in plain torch: the weight that backward needs is gone."""
        model, x = make(), torch.randn(8, 32, requires_grad=True)
        loss = model(x).sum()
        edit_in_place(model, x)
        model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    def test_frozen_weights_need_no_wgrad(self) -> None:
        model = make()
        model.requires_grad_(False)
        x = torch.randn(8, 32, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert model[0].weight.grad is None
        assert math.isfinite(float(x.grad.sum()))
