"""What tune is given: losses, steps, metrics, batches of every kind, and what it refuses before anything changes."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka.tuning import rehearsal
from loka.tuning.task import Task

from .small import BATCHES, loss, make_trained, placed, same, state_of, tune


def no_tensor(output: Tensor, target: Tensor) -> float:
    return float(loss(output, target).mean())


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((BATCHES, lambda output: output), {}, "cannot be called with .output, target."),
        ((BATCHES, None), {"step": lambda model: model}, "cannot be called with .model, batch."),
        ((BATCHES, None), {}, "exactly one of them"),
        ((BATCHES, loss), {"step": lambda model, batch: model}, "exactly one of them"),
        (([], loss), {}, "batches is empty"),
        ((iter([]), loss), {}, "used up"),
        ((BATCHES[:1], loss), {}, "got one batch; expected at least 2"),
        (([x for x, _ in BATCHES], loss), {}, "batch 0 is Tensor, expected .inputs, target.; hint: .*step="),
        (([(x, y, y) for x, y in BATCHES], loss), {}, "batch 0 is tuple of 3"),
        (([*BATCHES, BATCHES[0][:1]], loss), {}, "batch 8 is tuple of 1"),
        ((BATCHES, lambda output, target: loss(output.detach(), target)), {}, "no gradient flows from the loss"),
        ((BATCHES, loss), {"out": __file__}, "is a file, expected a folder"),
        ((BATCHES, loss), {"out": f"{__file__}/below"}, "below' cannot be created: Not a directory"),
        ((BATCHES, no_tensor), {}, "the loss returned float, expected a floating tensor"),
        ((BATCHES, lambda output, target: target.long()), {}, "returned a tensor of torch.int64, expected a floating"),
        (([({"y": x}, y) for x, y in BATCHES], loss), {}, "are a dict, given as .*kwargs, and Ranker fails: .*hint: ..inputs"),
        ((None, loss), {}, "batches is NoneType, expected an iterable"),
        ((BATCHES, loss), {"metric": lambda model, batch: None}, "the metric returned NoneType, expected a number"),
        ((BATCHES, loss), {"metric": lambda model: model}, "metric.model. cannot be called with .model, batch."),
        ((BATCHES, loss), {"progress": lambda phase, done: None}, "progress.phase, done. cannot be called with .phase, done, total."),
        ((BATCHES, loss), {"seconds": None}, "seconds=None: expected a budget"),
        ((BATCHES, loss), {"margin": "2%"}, "margin='2%': expected a relative change"),
        ((BATCHES, loss), {"autocast": "bf16"}, "autocast='bf16': expected torch.bfloat16"),
        ((BATCHES, loss), {"autocast": torch.float32}, "autocast=torch.float32: expected torch.bfloat16"),
        ((BATCHES, loss), {"train": 2.5}, "train=2.5: expected a number of steps"),
        ((BATCHES, loss), {"train": 2, "optimizer": torch.optim.SGD([torch.zeros(1)], 0.1)}, "optimizer is SGD, expected a function that makes one; hint: optimizer=lambda parameters"),
        ((BATCHES, loss), {"target": "deploy"}, "expected 'train' or 'serve'"),
        ((BATCHES, loss), {"margin": 0.0}, "margin=0.0: expected a relative change"),
        ((BATCHES, loss), {"margin": -1e-4}, "expected a relative change"),
        ((BATCHES, loss), {"margin": 2}, "expected a relative change"),
        ((BATCHES, loss), {"margin": float("nan")}, "expected a relative change"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_said_before_anything_changes(arguments: Any, options: dict[str, Any], said: str) -> None:
    model, optimizer = make_trained(1)
    before = state_of(model, optimizer)
    with pytest.raises(ValueError, match=said):
        tune(model, *arguments, **options)
    assert same(state_of(model, optimizer), before)


def test_weights_without_values_are_named() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    model.spare = nn.Linear(64, 64, device="meta")
    with pytest.raises(ValueError, match=r"spare\.weight, spare\.bias: on the meta device"):
        tune(model, BATCHES, loss)


def test_a_metric_may_be_a_number_of_another_library() -> None:
    """And one of which more is better is asked about: nothing else would show that a loss was taken for a gain."""

    def hits(model: nn.Module, batch: Any) -> float:
        return float(((model(batch[0]) > 0) == (batch[1] > 0.5)).double().mean())

    tuned = tune(make_trained()[0], metric=hits)
    assert any(note.startswith("is a higher metric better?") for note in tuned.record.notes)
    tuned = tune(make_trained()[0], metric=lambda model, batch: 1 - hits(model, batch))
    assert tuned.record.metric_unit == "batches"
    assert not any(note.startswith("is a higher metric better?") for note in tuned.record.notes)


def test_a_step_instead_of_a_loss() -> None:
    expected = tune(make_trained()[0])
    batches = [{"features": x, "label": y} for x, y in BATCHES]
    tuned = tune(make_trained()[0], batches, None, step=lambda m, b: loss(m(b["features"]), b["label"]))
    assert tuned.record.metric_change == expected.record.metric_change
    assert tuned.plan.units == expected.plan.units


def test_a_mean_is_compared_batch_by_batch() -> None:
    tuned = tune(make_trained()[0], given=F.binary_cross_entropy_with_logits)
    assert tuned.record.metric_unit == "batches"
    expected = tune(make_trained()[0])
    assert tuned.record.metric == pytest.approx(expected.record.metric, rel=1e-5)
    assert tuned.record.metric_change.value == pytest.approx(expected.record.metric_change.value, abs=1e-5)


def test_a_metric_instead_of_the_loss() -> None:
    seen: list[bool] = []

    def wrong_rankings(model: nn.Module, batch: Any) -> Tensor:
        seen.append(model.training)
        return ((model(batch[0]) > 0) != (batch[1] > 0)).float()

    tuned = tune(make_trained()[0], metric=wrong_rankings)
    assert tuned.record.metric_name == "wrong_rankings"
    assert "loss" not in tuned.record.verdict
    assert seen
    assert not any(seen), "a metric is taken in eval mode"
    assert 0.1 < tuned.record.metric < 0.5


def test_a_metric_that_suffers_keeps_what_hurts() -> None:
    """The metric decides, whatever the loss says: here low precision anywhere is a catastrophe."""

    def touched(model: nn.Module, batch: Any) -> Tensor:
        return torch.full((len(batch[1]),), 2.0 if placed(model) else 1.0)

    model, optimizer = make_trained()
    before = state_of(model, optimizer)
    tuned = tune(model, metric=touched)
    assert not placed(model)
    assert not tuned.plan.units
    assert "nothing was converted" in str(tuned)
    assert all(unit.way == "high" for unit in tuned.record.units)
    assert any("+100.0000%" in unit.reason for unit in tuned.record.units)
    assert tuned.revert() == 0
    assert same(state_of(model, optimizer), before)


def test_a_loss_that_is_not_finite_in_low_precision_is_never_within() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        return loss(model(batch[0]), batch[1]) + (float("nan") if "second" in placed(model) else 1.0)

    model, _ = make_trained()
    tuned = tune(model, metric=broken)
    assert "second" not in placed(model)
    assert any("moved the metric to something that is not finite" in unit.reason for unit in tuned.record.units)
    assert "third" in placed(model)


def test_models_that_cannot_be_tuned_are_named() -> None:
    model, _ = make_trained()
    tune(model)
    with pytest.raises(ValueError, match=r"already converted: first.*call loka\.revert"):
        tune(model)
    lazy = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias have no shape yet"):
        tune(lazy)
    model, _ = make_trained()
    with torch.inference_mode(), pytest.raises(ValueError, match=r"under torch.inference_mode"):
        tune(model)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "generator", "bfloat16", "autocast"])
def test_every_kind_of_batch(kind: str) -> None:
    model, _ = make_trained()
    options: dict[str, Any] = {}
    batches: Any = {
        "tuple": [((x,), y) for x, y in BATCHES],
        "list": [[[x], y] for x, y in BATCHES],
        "dict": [({"x": x}, y) for x, y in BATCHES],
        "generator": (batch for batch in BATCHES),
    }.get(kind, BATCHES)
    if kind == "bfloat16":
        model, batches = model.bfloat16(), [(x.bfloat16(), y) for x, y in BATCHES]
    if kind == "autocast":
        options["autocast"] = torch.bfloat16
    tuned = tune(model, batches, lambda output, target: loss(output.float(), target), **options)
    assert placed(model) == {"first", "second", "third"}
    if kind in ("tuple", "list", "dict", "generator"):
        assert tuned.record.metric_change == tune(make_trained()[0]).record.metric_change


def test_models_without_linears_or_gradients() -> None:
    """Nothing to convert is a result, not an error."""
    model = nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.AdaptiveAvgPool1d(1), nn.Flatten(0))
    batches = [(x[:, None], y) for x, y in BATCHES[:4]]
    tuned = tune(model, batches)
    assert tuned.conversion is None
    assert "nothing was converted" in str(tuned)


def test_a_loss_that_is_not_finite_anyway_converts_nothing() -> None:
    model, _ = make_trained(2)
    tuned = tune(model, metric=lambda m, b: torch.full((4,), float("nan")))
    assert not placed(model)
    assert tuned.record.metric is None
    assert any("not finite in high precision" in note for note in tuned.record.notes)


def test_a_metric_that_does_not_see_the_model_shows_nothing() -> None:
    """No change of a metric of something else is no proof."""
    model, _ = make_trained()
    other = copy.deepcopy(model)
    tuned = tune(model, metric=lambda _, batch: loss(other(batch[0]), batch[1]))
    assert not placed(model)
    assert tuned.record.metric_change is None
    assert any("does not reach what is measured" in unit.reason for unit in tuned.record.units)


def errors(model: nn.Module, batch: Any) -> Tensor:
    """A metric that counts: small changes of the output leave it where it is."""
    return ((model(batch[0]) > 0).float() != batch[1]).float()


def test_a_metric_that_counts_claims_no_more_than_its_examples_show() -> None:
    """No example changes, and 512 of them do not say that none in a thousand would."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    with torch.no_grad():  # all outputs are far above 0, whatever is rounded; without the tower all are -1
        for linear in (model[0], model[2]):
            linear.weight.copy_(torch.eye(64))
            linear.bias.zero_()
        model[4].weight.fill_(1 / 16)
        model[4].bias.fill_(-1.0)
    batches = [(x.abs() + 1, y) for x, y in BATCHES]
    share = float(torch.cat([errors(model, batch) for batch in batches[4:]]).mean())
    narrow = tune(model, batches, metric=errors, margin=1e-3)
    assert not placed(model)
    assert any("moved the metric by +0.0000% [-" in unit.reason for unit in narrow.record.units)
    narrow.revert()
    wide = tune(model, batches, metric=errors, margin=0.05)
    assert placed(model)
    assert wide.record.metric_change is not None
    assert wide.record.metric_change.high == pytest.approx(3 / 512 / share)  # one in a third of them


def test_a_step_that_trains_or_is_another_one_each_time_is_named() -> None:
    model, optimizer = make_trained()
    before = state_of(model, optimizer)

    def trains(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model(batch[0]), batch[1]).mean()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return value

    with pytest.raises(
        ValueError, match=r"the step calls backward: expected step\(model, batch\) that returns the loss"
    ):
        tune(model, given=None, step=trains)
    assert same(state_of(model, optimizer), before)

    def halves(model: nn.Module, batch: Any) -> Tensor:
        return loss(model(batch[0].mul_(0.5)), batch[1])

    with pytest.raises(ValueError, match="the step changes its batch in place"):
        tune(model, [(x.clone(), y) for x, y in BATCHES], given=None, step=halves)
    calls: list[int] = []

    def drifts(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return loss(model(batch[0]), batch[1]) * 1.01 ** len(calls)

    with pytest.raises(ValueError, match=r"run twice in high precision.*may keep state"):
        tune(model, given=None, step=drifts)

    def decays(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            model.last.weight.mul_(1.0)
        return loss(model(batch[0]), batch[1])

    with pytest.raises(ValueError, match="the step changes the weights"):
        tune(model, given=None, step=decays)


def test_a_batch_without_a_finite_loss_is_named() -> None:
    batches = [(x, y.clone()) for x, y in BATCHES]
    batches[1][1][0] = float("nan")
    with pytest.raises(ValueError, match="the loss of batch 1 is nan"):
        tune(make_trained()[0], batches)


def test_a_coarser_margin_does_not_excuse_what_is_seen_to_be_more() -> None:
    """Data that resolve 0.03 %, a change of 0.05 %, 0.02 % asked for: more than that, whatever else the data leave open."""

    def dearer(model: nn.Module, batch: Any) -> Tensor:
        each = loss(model(batch[0]), batch[1]).detach()
        noise = torch.randn(len(each), generator=torch.Generator().manual_seed(int(1e6 * batch[0][0, 0].abs())))
        return 1.0 + (5e-4 + 3e-3 * noise if "second" in placed(model) else 1e-6 * each)

    model, _ = make_trained()
    tuned = tune(model, metric=dearer, margin=2e-4)
    assert "second" not in placed(model)
    assert tuned.record.used_margin in (2e-4, 1e-3)
    assert any("which is more than 0.020%" in unit.reason for unit in tuned.record.units)


class Regions(nn.Module):
    """A tower for each region; a batch is of one region."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(64, 96), nn.Linear(64, 1)
        self.towers = nn.ModuleDict({key: nn.Linear(96, 64) for key in ("eu", "us")})

    def forward(self, x: Tensor, region: str) -> Tensor:
        return self.last(F.relu(self.towers[region](F.relu(self.shared(x))))).squeeze(-1)


def _call_whole(model: Any, batch: Any) -> Tensor:
    return loss(model(*batch[0]), batch[1])


def _call_parts(model: Any, batch: Any) -> Tensor:
    (x, region), y = batch
    return loss(model.last(F.relu(model.towers[region](F.relu(model.shared(x))))).squeeze(-1), y)


@pytest.mark.parametrize("step", [_call_whole, _call_parts])
def test_batches_take_different_paths(step: Any) -> None:
    """The second batch calls a tower that the first does not; a step may call parts of a model alone."""
    torch.manual_seed(0)
    model, batches = Regions(), [((x, ("eu", "us")[n % 2]), y) for n, (x, y) in enumerate(BATCHES)]
    twin = copy.deepcopy(model)
    tuned = tune(model, batches, None, step=step)
    assert tuned.plan.low_precision_share > 0.9
    for batch in batches:
        change = step(model, batch) - step(twin, batch)
        assert 0 < float(change.detach().norm()) < 0.1 * len(change)
    assert any("never the model itself" in note for note in tuned.record.notes) == (step is _call_parts)


class Recomputing(nn.Module):
    """The second of three linears is computed again in backward; or the third, which ends their chain."""

    def __init__(self, reentrant: bool, ends: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.reentrant, self.ends = reentrant, ends

    def again(self, linear: nn.Linear, x: Tensor, *, cut: bool) -> Tensor:
        run = lambda h: F.relu(linear(h))  # noqa: E731
        return checkpoint(run, x, use_reentrant=self.reentrant) if cut else run(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.b, F.relu(self.a(x)), cut=not self.ends)
        return self.last(self.again(self.c, x, cut=self.ends)).squeeze(-1)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_may_cut_a_chain(reentrant: bool, ends: bool) -> None:
    """A chain ends where a reentrant checkpoint begins, whose backward calls what is inside it alone; otherwise it runs as it is."""
    torch.manual_seed(0)
    model = Recomputing(reentrant, ends)
    twin = copy.deepcopy(model)
    tuned = tune(model, BATCHES, loss)
    first = next(unit for unit in tuned.record.units if unit.name == "a")
    assert first.way == "chain"
    assert ("c" in first.linears) == (not reentrant)
    for one in (model, twin):
        loss(one(BATCHES[0][0]), BATCHES[0][1]).mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 0.5 * q.grad.norm()


class Regularized(nn.Module):
    """Reads a hidden state in addition, but only where gradients are enabled or, with `graph`, where a graph is made."""

    def __init__(self, graph: bool) -> None:
        super().__init__()
        self.a, self.b, self.last, self.graph = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 1), graph

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        y = self.last(F.relu(self.b(h))).squeeze(-1)
        return y + 0.01 * h.mean(1) if (y.requires_grad if self.graph else torch.is_grad_enabled()) else y


def test_a_chain_ends_where_only_training_reads_it() -> None:
    tuned = tune(Regularized(graph=False), BATCHES, loss)
    assert [unit.linears for unit in tuned.record.units if unit.way == "chain"] == [["a"], ["b"]]


def test_a_chain_that_only_a_training_step_reads_is_taken_apart() -> None:
    """Discovery makes no graph and cannot see it; the rehearsed step does."""
    torch.manual_seed(0)
    model = Regularized(graph=True)
    twin = copy.deepcopy(model)
    tuned = tune(model, BATCHES, loss)
    first = next(unit for unit in tuned.record.units if unit.name == "a")
    assert (first.way, "in another order" in first.reason) == ("rowwise", True)
    for one in (model, twin):
        loss(one(BATCHES[0][0]), BATCHES[0][1]).mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad - q.grad).norm() < 0.5 * q.grad.norm()


def test_an_optimizer_inside_of_backward_does_not_train_here() -> None:
    model, steps = make_trained()[0], []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: steps.append(p.data.mul_(0.9)))
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    tune(model, BATCHES, loss)
    assert not steps
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    loss(model(BATCHES[0][0]), BATCHES[0][1]).mean().backward()
    assert len(steps) == len(list(model.parameters()))


def test_a_linear_with_hooks_or_a_shared_weight_runs_by_itself() -> None:
    """No chain can hold it; alone it is called as it was, and its hooks see what they saw."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))  # fmt: skip
    model[4].weight = model[2].weight
    shapes: list[Any] = []
    model[0].register_forward_hook(lambda module, args, output: shapes.append(output.shape))
    tuned = tune(model, BATCHES, loss)
    ways = {unit.name: (unit.way, unit.reason.rpartition("; ")[2]) for unit in tuned.record.units}
    assert ways["0"] == ("rowwise", "not in a chain (it has hooks that would see other tensors)")
    assert ways["2"] == ways["4"] == ("rowwise", "not in a chain (it shares its weight)")
    shapes.clear()
    model(BATCHES[0][0])
    assert shapes == [(len(BATCHES[0][0]), 64)]


class Bags(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag, self.tower = nn.EmbeddingBag(50, 64, sparse=sparse), nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        return self.tower(self.bag(ids))


def test_tables_with_gradients() -> None:
    """A gradient that waits for its step is lost with the rows it was for, and nothing else is; sparse ones need their optimizer."""
    torch.manual_seed(0)
    batches = [((x[:, :4] * 7).long().abs() % 50, y) for x, y in BATCHES]
    model = Bags(sparse=False)
    loss(model(batches[0][0]), batches[0][1]).mean().backward()
    kept = model.tower[0].weight.grad
    tuned = tune(model, batches, loss, tables=True, margin=0.2)
    assert tuned.plan.tables
    assert model.tower[0].weight.grad is kept
    with pytest.raises(ValueError, match="bag has sparse gradients, which AdamW does not support; hint: optimizer="):
        tune(Bags(sparse=True), batches, loss, train=2)
    assert tune(Bags(sparse=True), batches, loss, train=2, optimizer=lambda p: torch.optim.SGD(p, 0.1)).record.training_change  # fmt: skip


def test_models_that_cannot_train() -> None:
    """All frozen, made in inference mode, run by TorchScript: tuned, refused by name, left alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    traced = torch.jit.trace(copy.deepcopy(model), BATCHES[0][0])
    assert tune(traced, BATCHES, loss).plan.low_precision_share == 0
    with pytest.raises(ValueError, match="run by TorchScript, so none of its linears can be replaced"):
        tune(torch.jit.script(copy.deepcopy(model)), BATCHES, loss)
    assert tune(model.requires_grad_(False), BATCHES, loss).plan.low_precision_share > 0.9
    with torch.inference_mode():
        model = nn.Linear(64, 1)
    with pytest.raises(ValueError, match="weight, bias: made under torch"):
        tune(model, BATCHES, loss)


@pytest.mark.parametrize("enabled", [True, False])
def test_what_a_step_differentiates_twice_stays(enabled: bool) -> None:
    """Whether or not the step enables the gradients that it takes: a training loop has them enabled."""
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1), nn.Flatten(0)) for _ in range(2))  # fmt: skip
    model = nn.ModuleDict({"smooth": first, "free": second})

    def penalised(model: Any, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        with torch.enable_grad() if enabled else nullcontext():
            y = model["smooth"](x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return loss(y + model["free"](batch[0]), batch[1]) + 0.1 * slope.square().sum(1)

    tuned = tune(model, BATCHES, None, step=penalised)
    units = {unit.name: unit for unit in tuned.record.units}
    assert units["smooth.0"].way == "high"
    assert "differentiates it twice" in units["smooth.0"].reason
    assert units["free.0"].way == "chain"
    penalised(model, BATCHES[0]).mean().backward()


def test_a_step_may_take_gradients_of_weights() -> None:
    """As where it fits a few examples first, or limits the size of gradients."""
    model, _ = make_trained()

    def fitted(model: Any, batch: Any) -> Tensor:
        value = loss(model(batch[0]), batch[1])
        slopes = torch.autograd.grad(value.mean(), list(model.parameters()), create_graph=True)
        return value + 1e-3 * sum(slope.square().sum() for slope in slopes)

    assert tune(model, BATCHES, None, step=fitted).record.units


def test_a_unit_that_fails_in_low_precision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said is the reason; a step that fails by itself raises."""
    train = rehearsal._run_once

    def fail(call: Any, selection: Any, offers: Any) -> None:
        if any(offer.name == "first" for offer in offers):
            raise RuntimeError("no kernel for this")
        train(call, selection, offers)

    monkeypatch.setattr(rehearsal, "_run_once", fail)
    units = {unit.name: unit for unit in tune(make_trained()[0]).record.units}
    assert units["first"].way == "high"
    assert units["first"].reason == "a training step fails with it in low precision: RuntimeError: no kernel for this"

    def fail_together(call: Any, selection: Any, offers: Any) -> None:
        if offers is selection.offers:
            raise RuntimeError("the step's own")

    monkeypatch.setattr(rehearsal, "_run_once", fail_together)
    with pytest.raises(RuntimeError, match="the step's own"):
        tune(make_trained()[0])


class _KernelError(Exception):
    """As Triton's, which are no RuntimeError."""


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (_KernelError("out of resource: shared memory"), False),
        (AssertionError("base must be 16-byte aligned"), False),
        (torch.OutOfMemoryError("full"), True),
        (torch.AcceleratorError("an illegal memory access was encountered"), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_says_something_about_a_unit_leaves_it_out(error: Exception, raised: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Whatever its type. A full memory, or a GPU that has failed, does not."""
    train, asked = rehearsal._run_once, []

    def fail(call: Any, selection: Any, offers: Any) -> None:
        asked.append(len(offers))
        if any(offer.name == "first" for offer in offers):
            raise error
        train(call, selection, offers)

    monkeypatch.setattr(rehearsal, "_run_once", fail)
    if raised:
        with pytest.raises(type(error), match=str(error)):
            tune(make_trained()[0])
        assert len(asked) == 1
        return
    units = {unit.name: unit for unit in tune(make_trained()[0]).record.units}
    assert units["first"].reason == f"a training step fails with it in low precision: {type(error).__name__}: {error}"


def test_a_step_that_fails_in_training_by_itself_is_not_blamed_on_its_units() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1), nn.Flatten(0)
    )
    single = [(x[:1], y[:1]) for x, y in BATCHES]
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        tune(model.eval(), single, loss)


def test_a_loss_that_fails_says_what_it_was_given() -> None:
    model, _ = make_trained()
    with pytest.raises(IndexError) as caught:
        tune(model, BATCHES, lambda target, output: loss(output[:, 0], target))
    said = ["loss(output, target) was called with output float32[128] and target float32[128]"]
    assert caught.value.__notes__ == said


def test_a_list_in_place_of_the_loss_is_named_without_its_numbers() -> None:
    with pytest.raises(ValueError, match=r"^loss is list, expected a function of \(output, target\)$"):
        tune(make_trained()[0], loss, BATCHES)


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_loss_of_all_pairs_is_noted(squeezed: bool) -> None:
    model = nn.Sequential(make_trained()[0], nn.Unflatten(0, (-1, 1)))  # as most models have it: [rows, 1]
    tuned = tune(model, BATCHES, lambda output, target: ((output[:, 0] if squeezed else output) - target).square())
    notes = [note for note in tuned.record.notes if "every output met every target" in note]
    if squeezed:
        assert not notes
    else:
        said = (
            "the loss returned float32[128, 128] for output float32[128, 1] and target float32[128]: torch broadcasts"
        )
        assert len(notes) == 1
        assert notes[0].startswith(said)


@pytest.mark.parametrize("fails", [False, True])
def test_a_loss_of_nested_tensors_is_called_as_it_is(fails: bool) -> None:
    """Torch does not tell the shape of a nested tensor of its older kind, so nothing may ask for it."""
    output, target = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.zeros(5)
    task = Task(nn.Linear(1, 1), 2 * [(torch.ones(1), target)], lambda output, target: output.mean() if fails else loss(torch.cat(output.unbind()), target))  # fmt: skip
    if fails:
        with pytest.raises(Exception) as caught:
            task._call_loss(output, target)
        assert caught.value.__notes__ == ["loss(output, target) was called with output nested float32 and target float32[5]"]  # fmt: skip
    else:
        assert task._call_loss(output, target).shape == (5,)
