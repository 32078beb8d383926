"""What training loops do besides steps, on linears alone and in chains: empty batches, clipping, GradScaler, EMA, activation checkpointing.

Each is compared with the same converted model without it, or with the numbers that it must give, not with float32: FP8 noise would hide a real error."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.placing.loop import Net, batch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from loka import Guard
from loka.lowp import GuardConfig, chains_of
from loka.placing import LinearOptions, convert, plan_everything, revert, scale_state
from loka.probe import Probe


class Checkpointed(Net):
    """The same with its tower checkpointed."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(x) + checkpoint(self.tower, x, use_reentrant=self.reentrant))


def chained(make: type[Net] = Net) -> Net:
    model = make()
    convert(model, plan_everything(Net(), batch(0)[0], linears=64), backend="reference")
    return model


def alone(make: type[Net] = Net) -> Net:
    model = make()
    convert(model, recipe="tensorwise", backend="reference", options=LinearOptions(scales="delayed"))
    return model


UNITS = pytest.mark.parametrize("low", [chained, alone])
Low = Callable[..., Net]


def train(model: nn.Module, steps: int = 3, *, scaler: torch.amp.GradScaler | None = None, clip: float | None = None, between: Callable | None = None) -> list[Tensor]:  # fmt: skip
    inner = model
    optimizer = torch.optim.SGD(inner.parameters(), 1e-2)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(inner.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if between is not None:
            between()
    return [p.detach().clone() for p in inner.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@UNITS
def test_an_empty_batch_has_a_result_and_gradients_and_leaves_no_trace(low: Low) -> None:
    model, twin = low(), low()
    probe, guard = Probe(model, every=1), Guard(model, GuardConfig(every=1))
    train(model)
    train(twin)
    before = scale_state(model)
    for training in (True, False):
        model.train(training)
        guard.begin_step()
        x = torch.zeros(0, 64, requires_grad=True)
        y = model(x)
        assert y.shape == (0, 1)
        y.sum().backward()
        assert x.grad.shape == (0, 64)
        assert guard.check() == []
        probe.step()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in scale_state(model).items())
    assert all(probe.watch(site).off is None for site in probe.sites)
    assert same(train(model.train()), train(twin))


@UNITS
def test_clipping_sees_the_gradients_the_optimizer_uses(low: Low) -> None:
    model = low()
    train(model, 2)
    x, y = batch(2)
    model.zero_grad()
    nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, torch.stack([g.norm() for g in plain]).norm())
    for p, g in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, g * 1e-3 / (norm + 1e-6))
    assert same(train(low(), clip=1e9), train(low()))


@UNITS
def test_a_grad_scaler_scales_what_fp8_scales_too(low: Low) -> None:
    """Scales of gradients follow a power of two exactly; a step that overflows is skipped, and its magnitudes leave no trace."""
    scaled = train(low(), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000))
    assert same(scaled, train(low()))
    model = low()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1000)
    start = train(model, 2, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    x, y = batch(9)
    scaler.scale(nn.functional.binary_cross_entropy_with_logits(model(x), y) * torch.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    assert same([p.detach() for p in model.parameters()], start)
    assert all(bool(value.isfinite().all()) for value in scale_state(model).values())
    after = train(model, 2, scaler=scaler)
    assert all(bool(p.isfinite().all()) for p in after)
    assert not any(torch.equal(a, b) for a, b in zip(start, after, strict=True))


@UNITS
def test_a_moving_average_of_a_converted_model_is_one_of_its_own(low: Low) -> None:
    model, twin = low(), low()
    train(model, 2)
    train(twin, 2)
    probe = Probe(model, every=1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    after = train(model, between=lambda: (average.update_parameters(model), probe.step()))
    assert same(after, train(twin))
    calls = [probe.watch(site).calls for site in probe.sites]
    scales, weights = scale_state(model), [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        mean = average.eval()(batch(5)[0])
    assert [probe.watch(site).calls for site in probe.sites] == calls
    assert all(torch.equal(value, scales[key]) for key, value in scale_state(model).items())
    assert same([p.detach() for p in model.parameters()], weights)
    assert len(list(chains_of(average.module))) == len(list(chains_of(model)))
    assert not any(a is b for (_, a), (_, b) in zip(chains_of(average.module), chains_of(model), strict=True))
    plain = Net()
    plain.load_state_dict(average.module.state_dict())
    with torch.no_grad():  # the average of the weights, in FP8: not those of the model that trains
        exact, own = plain(batch(5)[0]), model.eval()(batch(5)[0])
    assert (mean - exact).norm() < 0.05 * exact.norm()
    assert not torch.equal(mean, own)


class Reentrant(Checkpointed):
    """With the older kind of checkpoint."""

    reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.requires_grad_())


@UNITS
@pytest.mark.parametrize("make", [Checkpointed, Reentrant])
def test_checkpointing_recomputes_the_same_numbers_and_counts_once(low: Low, make: type[Net]) -> None:
    model, twin = low(make), low()
    guards = [Guard(m, GuardConfig(every=1)) for m in (model, twin)]
    for guard in guards:
        guard.begin_step()
    assert same(train(model), train(twin))
    assert all(torch.equal(value, scale_state(twin)[key]) for key, value in scale_state(model).items())
    assert guards[0].check() == []


@UNITS
def test_a_copy_trains_on_by_itself(low: Low) -> None:
    model = low()
    train(model, 2)
    twin = copy.deepcopy(model)
    train(twin, 2)
    assert same(train(model, 2), [p.detach() for p in twin.parameters()])


class Functional(nn.Module):
    """Its forward calls an activation as a function, so it is a caller of its chain."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.b(nn.functional.relu(self.a(x))))


def _wrap(model: nn.Module) -> None:
    model.forward = partial(model.forward)


def _compile(model: nn.Module) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


@pytest.mark.parametrize("replace", [_wrap, _compile])
@pytest.mark.parametrize("when", ["before", "after", "both"])
@pytest.mark.parametrize("chains", [True, False])
def test_a_forward_set_on_the_instance_runs_the_conversion_and_after_it_the_original(
    replace: Callable[[nn.Module], None], when: str, chains: bool
) -> None:
    """As `model.forward = torch.compile(model.forward)` and Accelerate's `prepare` set it."""
    model, x = Functional(), batch(0)[0]
    twin, low = copy.deepcopy(model), copy.deepcopy(model)
    if when != "after":
        replace(model)
    kept = vars(model).get("forward")
    for one in (model, low):
        if chains:
            convert(one, plan_everything(twin, x, linears=64), example=x)
        else:
            convert(one, recipe="rowwise")
    if when != "before":
        replace(model)
    assert torch.equal(model(x), low(x))
    assert torch.equal(torch.compile(model, backend="eager")(x), low(x))
    revert(model)
    assert torch.equal(model(x), twin(x))
    assert when != "before" or model.forward is kept


@pytest.mark.parametrize("chains", [True, False])
def test_a_linear_whose_forward_was_kept_runs_after_revert(chains: bool) -> None:
    model, x = Functional(), batch(0)[0]
    twin = copy.deepcopy(model)
    convert(model, plan_everything(twin, x, linears=64)) if chains else convert(model, recipe="rowwise")
    for linear in (model.a, model.b):
        _wrap(linear)
    model(x)
    revert(model)
    assert torch.equal(model(x), twin(x))


class _Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@pytest.mark.parametrize("kind", ["own forward", "weight_norm", "float64"])
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_what_conversion_refuses_no_probe_plans(kind: str) -> None:
    """Such a plan was refused, or ended the first step in float64."""
    torch.manual_seed(0)
    first = _Scaled(64, 64) if kind == "own forward" else nn.Linear(64, 64)
    model, x = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 64)), torch.randn(8, 64)
    if kind == "weight_norm":
        nn.utils.weight_norm(first)
    elif kind == "float64":
        model, x = model.double(), x.double()
    probe = Probe(model, every=1)
    for _ in range(2):
        model(x).square().mean().backward()
        probe.step()
    plan = probe.evaluate(samples=4).plan(min_speedup=None, max_error=1.0, max_gradient_error=1.0)
    probe.detach()
    done = convert(model, plan)
    assert "0" in done.kept
    assert ("2" in done.converted) == (kind != "float64")
    model(x).square().mean().backward()
