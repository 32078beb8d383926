"""The buffers of quantised weights: whose they are while a backward is still to come, when they stay where they are, and that nothing of them is left behind."""

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

import loka.lowp.weight_cache as weight_cache
from loka.lowp.linear import linears_of
from loka.placing import convert, refresh, revert

from .test_linear_weights import edit_in_place, load, make, plain_twin, run, same, sgd

Between = Callable[[nn.Module, nn.Module, Tensor], None]  # the model, the model as it is called, x


def evaluate(model: nn.Module, called: nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        called(x)
    model.train()


def evaluate_averaged_weights(model: nn.Module, called: nn.Module, x: Tensor) -> None:
    """Swapped in and out by `.data`, which autograd does not see: the backward of nn.Linear meets the weights of its forward, and so must ours."""
    kept = [p.detach().clone() for p in model.parameters()]
    model.eval()
    for p in model.parameters():
        p.data.mul_(-3)
    with torch.inference_mode():
        called(x)
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data.copy_(old)
    model.train()


def call_on_other_weights(model: nn.Module, called: nn.Module, x: Tensor) -> None:
    functional_call(called, {name: -3 * p.detach() for name, p in called.named_parameters()}, (x,))


def step_something_else(model: nn.Module, called: nn.Module, x: Tensor) -> None:
    """Two optimizers that take turns, as for a GAN."""
    other = nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other], 0.1).step()
    called(x)


def quantise_again(model: nn.Module, called: nn.Module, x: Tensor) -> None:
    refresh(model)


BETWEEN = [evaluate, evaluate_averaged_weights, call_on_other_weights, step_something_else, quantise_again]


def gradients(model: nn.Module, called: nn.Module, x: Tensor, between: Between | None, again: bool) -> list[Tensor]:
    for p in model.parameters():
        p.grad = None
    x = x.detach().requires_grad_()
    loss = called(x).square().sum()
    if between is not None:
        between(model, called, x.detach())
    if again:
        loss = loss + called(2 * x).square().sum()
    loss.backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_backward_meets_the_weights_of_its_forward(between: Between, again: bool) -> None:
    model, x = make("rowwise"), torch.randn(8, 32)
    expected = gradients(model, model, x, None, again)
    assert same(gradients(model, model, x, between, again), expected)


@pytest.mark.slow
@pytest.mark.parametrize("between", [evaluate_averaged_weights, step_something_else], ids=lambda f: f.__name__)
def test_so_it_does_in_compiled_code(between: Between) -> None:
    """With Inductor, which writes buffers in place and lets backward keep them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48, bias=False)), torch.randn(8, 32)
    convert(model, recipe="rowwise", backend="reference")
    compiled = torch.compile(model, fullgraph=True)
    found = gradients(model, compiled, x, between, again=True)
    for a, b in zip(found, gradients(model, model, x, None, again=True), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_weights_put_back_after_the_change_of_mode_are_seen() -> None:
    """Converted for inference: the first `train()` makes the transposes, and must not take the weight of that moment for the last word."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).eval(), torch.randn(8, 32)
    convert(model, recipe="tensorwise", backend="reference")
    model.train()
    model[0].weight.data.mul_(-2)
    assert same(run(model, x), run(plain_twin(model), x))


def test_buffers_of_a_captured_graph_keep_their_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make(), torch.randn(8, 32)
    with monkeypatch.context() as capturing:
        capturing.setattr(weight_cache, "_is_capturing", lambda weight: True)
        model(x)
    before = [b.data_ptr() for m in (model[0], model[2]) for b in m.state.weights._buffers() if b is not None]
    for change in (sgd, load, edit_in_place):
        change(model, x)
        run(model, x)
    model.eval().train()
    refresh(model)
    assert same(run(model, x), run(plain_twin(model), x))
    after = [b.data_ptr() for m in (model[0], model[2]) for b in m.state.weights._buffers() if b is not None]
    assert before == after


def test_nothing_is_left_behind() -> None:
    """Entries about weights go with the cache they are about."""
    model, x = make(), torch.randn(8, 32)
    gc.collect()
    before = len(weight_cache._MADE)
    for _ in range(3):
        run(copy.deepcopy(model), x)
        model.eval().train()
        revert(model)
        convert(model, recipe="tensorwise", backend="reference")
    gc.collect()
    assert len(weight_cache._MADE) <= before


@pytest.mark.parametrize("change", ["to", "load"])
def test_parameters_that_torch_swaps(change: str) -> None:
    """torch.__future__ has it swap tensors instead of writing to them, and it refuses those with weak references."""
    model, x = make(), torch.randn(8, 32)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if change == "to":
            model.to(torch.bfloat16).to(torch.float32)
        else:
            model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert same(run(model, x), run(plain_twin(model), x))


def test_the_step_of_the_tables_after_that_of_the_linears_moves_no_buffer() -> None:
    """Dense and sparse optimizers, as in every recommender: the second finds nothing that could still be wanted."""
    model, x = make(), torch.randn(8, 32)
    dense, table = torch.optim.SGD(model.parameters(), 0.1), nn.Parameter(torch.ones(3))
    sparse = torch.optim.SGD([table], 0.1)
    places = []
    for _ in range(3):
        (model(x).sum() + table.sum()).backward()
        dense.step()
        sparse.step()
        places.append([m.state.weights.data.data_ptr() for _, m in linears_of(model)])
    assert places[0] == places[1] == places[2]


def test_an_optimizer_in_another_thread_does_not_reach_into_a_forward() -> None:
    """Whatever moment it steps at: a forward reads the buffers it filled, not the empty ones that follow them."""
    model, x = make(), torch.randn(8, 32)
    expected, done = model(x).detach(), threading.Event()

    def step() -> None:
        other = nn.Parameter(torch.ones(1))
        other.grad = torch.ones(1)
        optimizer = torch.optim.SGD([other], 0.1)
        while not done.is_set():
            optimizer.step()

    thread, interval = threading.Thread(target=step), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        wrong = sum(not torch.equal(model(x), expected) for _ in range(300))
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert wrong == 0


def test_old_buffers_are_freed_only_after_all_new_ones_are_in_place() -> None:
    """Freeing a tensor may let another thread run, whose forward must not meet new buffers under the old stamp."""
    cache = make()[0].state.weights
    old, seen = cache.stamp, []
    weakref.finalize(cache.data, lambda: seen.append(cache.stamp is old))
    cache.renew()
    gc.collect()
    assert seen == [False]


def test_a_cache_may_end_inside_a_fake_tensor_mode() -> None:
    model = make()
    serials = [int(m.state.weights.stamp) for _, m in linears_of(model)]
    assert all(serial in weight_cache._MADE for serial in serials)
    with FakeTensorMode():
        del model
        gc.collect()
    assert not any(serial in weight_cache._MADE for serial in serials)
