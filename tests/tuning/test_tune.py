"""tune: one call converts, proves, and leaves everything else as it was."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import loka
from loka.lowp.chain import chains_of
from loka.lowp.linear import linears_of
from loka.records import load
from loka.records.tuning import Tuning

from .small import MARGIN, WIDTH, Ranker, loss, make_batches, make_trained, same, state_of, train

BATCHES = make_batches()


def tune(model: nn.Module, batches: Any = BATCHES, given: Any = loss, **options: Any) -> loka.tuning.Tuned:
    return loka.tune(model, batches, given, **{"margin": MARGIN, "progress": False, **options})


def placed(model: nn.Module) -> set[str]:
    """Linears that run in low precision."""
    chains = {link.linear for _, chain in chains_of(model) for link in chain.links}
    return chains | {name for name, _ in linears_of(model)}


def test_converts_and_the_record_says_what_runs() -> None:
    model, _ = make_trained()
    tuned = tune(model)
    record = tuned.record
    assert tuned.model is model
    assert placed(model) == {"first", "second", "third"} == set(tuned.conversion.converted)
    assert {name for unit in record.units if unit.way != "high" for name in unit.linears} == placed(model)
    assert {name for unit in record.units for name in unit.linears} == {"first", "second", "third", "last"}
    assert sum(unit.flops_share for unit in record.units) == pytest.approx(1.0)
    assert record.metric_change.low <= record.metric_change.value <= record.metric_change.high <= MARGIN
    assert record.used_margin == record.margin == MARGIN
    assert record.metric_unit == "examples"
    assert record.speedup is None
    assert "emulated" in record.speed_note
    assert "within 5.00%" in str(tuned)
    assert "prediction layer" in str(tuned)
    assert all(unit.harm is not None and unit.metric_change is not None for unit in record.units if unit.way != "high")


def test_the_change_is_that_of_the_model_it_returns() -> None:
    """On the held-out half, computed here without tune."""
    model, _ = make_trained()

    def mean() -> float:
        model.eval()
        with torch.enable_grad():
            values = torch.cat([loss(model(x), y).detach().double() for x, y in BATCHES[4:]])
        model.train()
        return float(values.mean())

    before = mean()
    tuned = tune(model)
    assert tuned.record.metric == pytest.approx(before, rel=1e-6)
    assert mean() / before - 1 == pytest.approx(tuned.record.metric_change.value, abs=1e-5)


def test_nothing_is_trained() -> None:
    model, optimizer = make_trained()
    model.batch.eval()  # frozen by the user, in a model that trains
    model.second.weight.requires_grad_(False)
    loss(model(BATCHES[0][0]), BATCHES[0][1]).mean().backward()  # gradients that wait for a step
    before, parameters = state_of(model, optimizer), list(model.parameters())
    tuned = tune(model)
    after = state_of(model, optimizer)
    assert placed(model)
    for index, what in enumerate(["values", "gradients", None, None, "optimizer", "random state"]):
        assert what is None or same(after[index], before[index]), what
    assert [(name, mode) for name, mode, _ in after[2]] == [(name, mode) for name, mode, _ in before[2]]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert tuned.revert() == 3
    assert same(state_of(model, optimizer), before)


def test_what_was_converted_trains_on() -> None:
    """As far as the same model in high precision, on what both are trained on."""

    def mean(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            value = torch.cat([loss(model(x), y) for x, y in make_batches(40, seed=3)]).mean()
        model.train()
        return float(value)

    model, _ = make_trained()
    twin, before = copy.deepcopy(model), mean(model)
    tune(model)
    for each in (model, twin):
        torch.manual_seed(4)
        train(each)
    assert mean(model) < 0.95 * before
    assert mean(model) == pytest.approx(mean(twin), rel=0.05)


class Counted:
    """The loss, counting its calls, that stops at one of them."""

    def __init__(self, stop: int = -1, error: BaseException | None = None) -> None:
        self.count, self.stop, self.error = 0, stop, error

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        if self.count == self.stop and self.error is not None:
            raise self.error
        return loss(output, target)


@pytest.mark.parametrize("options", [{}, {"architecture": True}, {"target": "serve"}], ids=str)
def test_a_stop_anywhere_leaves_the_model_as_it_was(options: dict[str, Any]) -> None:
    whole = Counted()
    tune(make_trained()[0], given=whole, **options)
    model, optimizer = make_trained()
    before = state_of(model, optimizer)
    for share, error in [(0.0, KeyboardInterrupt()), (0.3, RuntimeError("no memory")), (0.6, KeyboardInterrupt()), (1.0, OSError("gone"))]:  # fmt: skip
        stop = max(1, round(share * whole.count))
        with pytest.raises(type(error)):
            tune(model, given=Counted(stop, error), **options)
        assert same(state_of(model, optimizer), before), f"stopped at call {stop} of {whole.count}"
        assert not placed(model)
        assert not loka.mods.applied_to(model)


def test_goes_on_where_it_was_cut_short(tmp_path: Path) -> None:
    whole = Counted()
    expected = tune(make_trained()[0], given=whole)
    model, _ = make_trained()
    cut = Counted(whole.count - 4, KeyboardInterrupt())  # in the last batches: what was measured before is known
    with pytest.raises(KeyboardInterrupt):
        tune(model, given=cut, out=tmp_path)
    assert (tmp_path / "evidence.json").exists()
    again = Counted()
    tuned = tune(model, given=again, out=tmp_path)
    assert again.count < whole.count
    assert "went on from evidence of an earlier call" in tuned.record.notes
    assert tuned.record.units == expected.record.units
    assert tuned.record.metric_change == expected.record.metric_change
    assert load(tmp_path / "tuning.json", Tuning) == tuned.record
    assert loka.Plan.load(tmp_path / "plan.json").units == tuned.plan.units
    assert (tmp_path / "conversion.json").exists()


def test_evidence_of_other_weights_is_not_used(tmp_path: Path) -> None:
    """The same architecture, trained further: speeds would hold, losses do not."""
    tune(make_trained()[0], out=tmp_path)
    expected = tune(make_trained(60)[0])
    tuned = tune(make_trained(60)[0], out=tmp_path)
    assert tuned.record.units == expected.record.units


def test_evidence_of_another_model_is_set_aside(tmp_path: Path) -> None:
    tune(make_trained()[0], out=tmp_path)
    old = (tmp_path / "evidence.json").read_text()
    model = nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, 1), nn.Flatten(0))
    tuned = tune(model, out=tmp_path)
    assert (tmp_path / "evidence-of-another-model.json").read_text() == old
    assert not any("earlier call" in note for note in tuned.record.notes)


@pytest.mark.parametrize("text", ['{"fingerprint": "', "[]", "{}", '{"fingerprint": "x", "known": 3}', ""])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "evidence.json").write_text(text)
    model, optimizer = make_trained(2)
    before = state_of(model, optimizer)
    with pytest.raises(ValueError, match=r"evidence.json is damaged: .*hint: another out="):
        tune(model, out=tmp_path)
    assert (tmp_path / "evidence.json").read_text() == text
    assert same(state_of(model, optimizer), before)


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
        (([x for x, _ in BATCHES], loss), {}, "batch 0 is Tensor, expected .inputs, target.; hint: step="),
        (([(x, y, y) for x, y in BATCHES], loss), {}, "batch 0 is tuple of 3"),
        (([*BATCHES, BATCHES[0][:1]], loss), {}, "batch 8 is tuple of 1"),
        ((BATCHES, lambda output, target: loss(output.detach(), target)), {}, "no gradient leads from the loss"),
        ((BATCHES, loss), {"out": __file__}, "is a file, expected a folder"),
        ((BATCHES, no_tensor), {}, "the loss returned float, expected a floating tensor"),
        ((BATCHES, lambda output, target: target.long()), {}, "returned Tensor, expected a floating tensor"),
        ((BATCHES, loss), {"metric": lambda model, batch: 0.5}, "the metric returned float"),
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


def test_rewrites_without_low_precision_are_said() -> None:
    """The layout is free and stays; the headline does not pretend that nothing happened."""
    model, _ = make_trained()
    tuned = tune(model, architecture=True, metric=lambda m, b: torch.full((4,), 2.0 if placed(m) else 1.0))
    assert not placed(model)
    assert tuned.record.verdict.startswith("nothing was converted to low precision; rewritten by no_bias")
    assert loka.mods.applied_to(model) == tuple(tuned.plan.mods)
    tuned.revert()
    assert not loka.mods.applied_to(model)


def test_a_loss_that_is_not_finite_in_low_precision_is_never_within() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        return torch.full((len(batch[1]),), float("nan") if "second" in placed(model) else 1.0)

    model, _ = make_trained()
    tune(model, metric=broken)
    assert "second" not in placed(model)
    assert "third" in placed(model)


def test_serving_freezes_and_answers() -> None:
    model, _ = make_trained()
    high = copy.deepcopy(model).eval()
    tuned = tune(model, target="serve")
    assert tuned.conversion.frozen
    assert not model.training
    assert tuned.record.gradients == "none: serving"
    x = BATCHES[-1][0]
    with torch.no_grad():
        found, expected = model(x), high(x)
    assert (found - expected).norm() < 0.1 * expected.norm()
    assert not torch.equal(found, expected)
    # calibrated: an answer does not depend on its neighbours, but for the rounding of the float32 head, whose BLAS kernel may differ with the number of rows
    torch.testing.assert_close(model(x[:5]).detach(), found[:5], rtol=1e-5, atol=1e-5)


def test_a_frozen_model_that_is_reverted_trains_again() -> None:
    model, optimizer = make_trained()
    model.batch.eval()
    model.first.weight.requires_grad_(False)
    before = state_of(model, optimizer)
    tuned = tune(model, target="serve")
    assert not any(p.requires_grad for p in model.parameters())
    assert tuned.revert() == 3
    assert same(state_of(model, optimizer), before)


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


def test_architecture_mods_are_part_of_the_plan() -> None:
    model, _ = make_trained()
    tuned = tune(model, architecture=True)
    assert {"no_bias", "block_norm"} <= set(tuned.plan.mods)
    assert tuple(tuned.plan.mods) == loka.mods.applied_to(model)
    tuned.revert()
    assert not loka.mods.applied_to(model)
    assert not placed(model)


def test_mods_of_the_user_stay() -> None:
    """A model that was trained with mods is tuned with them, and reverting the conversion does not take them."""
    torch.manual_seed(0)
    model = Ranker()
    loka.mods.apply(model, ["no_bias", "block_norm"], example=BATCHES[0][0])
    train(model)
    before = state_of(model)
    tuned = tune(model)
    assert placed(model)
    assert loka.mods.applied_to(model) == ("no_bias", "block_norm") == tuple(tuned.plan.mods)
    tuned.revert()
    assert loka.mods.applied_to(model) == ("no_bias", "block_norm")
    assert same(state_of(model), before)
    with pytest.raises(ValueError, match="hint: leave architecture out"):
        tune(model, architecture=True)


@pytest.mark.parametrize("options", [{}, {"target": "serve"}, {"architecture": True}], ids=str)
def test_a_saved_plan_gives_the_same_bits_elsewhere(tmp_path: Path, options: dict[str, Any]) -> None:
    model, _ = make_trained()
    twin = copy.deepcopy(model)
    tuned = tune(model, **options)
    tuned.plan.save(tmp_path / "plan.json")
    loka.convert(
        twin, loka.Plan.load(tmp_path / "plan.json"), freeze=options.get("target") == "serve", example=BATCHES[0][0]
    )
    x, y = BATCHES[-1]
    with torch.no_grad():
        assert torch.equal(model.eval()(x), twin.eval()(x))
    if "target" not in options:
        grads = []
        for each in (model.train(), twin.train()):
            torch.manual_seed(5)
            grads.append(torch.autograd.grad(loss(each(x), y).mean(), list(each.parameters())))
        assert same(list(grads[0]), list(grads[1]))


def test_compiled_models() -> None:
    model, _ = make_trained()
    wrapped = torch.compile(model, backend="eager")
    tuned = tune(wrapped)
    assert tuned.model is wrapped
    assert placed(model) == {"first", "second", "third"}
    assert set(tuned.plan.sites[0].site.split(".")) & {"first", "second", "third", "last"}
    assert not any("_orig_mod" in site.site for site in tuned.plan.sites)
    x = BATCHES[0][0]
    with torch.no_grad():
        torch.testing.assert_close(wrapped.eval()(x), model.eval()(x))
    tuned.revert()
    assert not placed(model)


def test_ddp_models(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, _ = make_trained()
        wrapped = DistributedDataParallel(model)
        tuned = tune(wrapped)
        assert placed(model) == {"first", "second", "third"}
        assert not any(site.site.startswith("module.") for site in tuned.plan.sites)
        x, y = BATCHES[0]
        loss(wrapped(x), y).mean().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def with_an_offset() -> tuple[nn.Module, Callable[[Any], Any]]:
    """A trained ranker whose first column is raw: 1975 +- 14, with the normalisation folded into the first linear. The function is the same."""
    model, _ = make_trained(60)
    with torch.no_grad():
        model.first.weight[:, 0] /= 14.4
        model.first.bias -= 1975 * model.first.weight[:, 0]

    def raw(batch: Any) -> Any:
        x = batch[0].clone()
        x[:, 0] = 1975 + 14.4 * x[:, 0]
        return x, batch[1]

    return model, raw


def test_a_column_with_a_large_offset_is_kept_with_an_alarm() -> None:
    model, raw = with_an_offset()
    tuned = tune(model, [raw(batch) for batch in BATCHES], margin=0.01)
    assert "first" not in placed(model)
    assert placed(model), "the others are none the worse for it"
    (unit,) = [unit for unit in tuned.record.units if "first" in unit.linears]
    assert unit.way == "high"
    assert unit.alarms
    assert "alarm" in str(tuned)
    assert tuned.record.metric_change.high <= tuned.record.used_margin


def test_too_early_is_said() -> None:
    torch.manual_seed(0)
    tuned = tune(Ranker())
    assert any(note.startswith("too early") for note in tuned.record.notes)
    assert not any(note.startswith("too early") for note in tune(make_trained()[0]).record.notes)


def test_a_margin_that_the_data_do_not_resolve_is_said() -> None:
    tuned = tune(make_trained()[0], margin=2e-4)
    assert any("more batches resolve more" in note for note in tuned.record.notes)
    assert tuned.record.margin == 2e-4
    change = tuned.record.metric_change
    assert change is None or change.high <= tuned.record.used_margin


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


def test_what_is_no_linear_is_named() -> None:
    """A share of FLOPs that leaves out half of a model without a word is a wrong share."""

    class Conv1D(nn.Module):  # as transformers has it
        def __init__(self) -> None:
            super().__init__()
            self.nf, self.weight, self.bias = (
                64,
                nn.Parameter(0.1 * torch.randn(WIDTH, 64)),
                nn.Parameter(torch.zeros(64)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gru, self.last = Conv1D(), nn.GRU(64, 32, batch_first=True), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.gru(self.conv(x).unsqueeze(1))[0][:, 0]).squeeze(-1)

    torch.manual_seed(0)
    notes = "\n".join(tune(Mixed()).record.notes)
    assert "gru: a recurrent layer" in notes
    assert "conv: a Conv1D is not converted here; hint: replace it by an nn.Linear" in notes
    assert not any("not looked at" in note for note in tune(make_trained()[0]).record.notes)


@pytest.mark.parametrize("kind", ["loss", "step", "metric", "regression"])
def test_too_early_whatever_the_loss(kind: str) -> None:
    """A model that has learned nothing is no better than its mean prediction, whatever is computed from it."""
    options: dict[str, Any] = {"margin": 0.5}
    if kind == "loss":
        options["given"] = loss
    elif kind == "regression":
        options["given"] = lambda output, target: F.mse_loss(output, target, reduction="none")
    else:
        options |= {"given": None, "step": lambda model, batch: loss(model(batch[0]), batch[1])}
        if kind == "metric":
            options["metric"] = lambda model, batch: loss(model(batch[0]), batch[1])
    torch.manual_seed(0)
    early = [note for note in tune(Ranker(), **options).record.notes if note.startswith("too early")]
    assert len(early) == 1
    assert "train until it is below" in early[0]
    if kind != "regression":  # logits that were trained are no regression of the labels
        assert not any("too early" in note for note in tune(make_trained(120)[0], **options).record.notes)


def test_a_loss_inside_the_model_is_not_called_too_early() -> None:
    class WithLoss(Ranker):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            logits = super().forward(x)
            return loss(logits, y).mean(), logits

    torch.manual_seed(0)
    notes = loka.tune(WithLoss(), BATCHES, step=lambda m, b: m(*b)[0], margin=MARGIN, progress=False).record.notes
    assert not any("too early" in note for note in notes)


def test_a_paired_run_of_training_where_it_is_allowed() -> None:
    model, optimizer = make_trained()
    before = state_of(model, optimizer)
    tuned = tune(model, train=6)
    record = tuned.record
    assert record.training_change is not None
    assert record.training_change.high <= record.used_margin
    assert "a paired run of 6 steps" in record.gradients
    tuned.revert()
    assert same(before[0], state_of(model)[0]), "copies are trained, not the model"
    strict = tune(model, train=6, margin=0.002, optimizer=lambda p: torch.optim.SGD(p, 2.0))
    assert strict.conversion is None or strict.record.training_change.high <= strict.record.used_margin


def test_a_paired_run_that_ends_apart_keeps_the_units() -> None:
    model, _ = make_trained()
    tuned = tune(model, train=25, margin=0.02, optimizer=lambda p: torch.optim.SGD(p, 5.0))  # chaos: runs end apart
    assert tuned.record.training_change is None or tuned.record.training_change.high <= tuned.record.used_margin
    assert tuned.record.training_change is not None or any("trained 25 steps" in u.reason for u in tuned.record.units)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"train": 5, "target": "serve"}, "with target='train'"),
        ({"optimizer": torch.optim.SGD}, "optimizer= belongs to it"),
        ({"train": -1}, "number of steps"),
    ],
)
def test_paired_runs_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tune(make_trained()[0], **options)


def test_a_step_that_trains_another_model_is_named() -> None:
    model, _ = make_trained()
    with pytest.raises(ValueError, match="does not train the model it is given"):
        loka.tune(model, BATCHES, step=lambda _, batch: loss(model(batch[0]), batch[1]), margin=MARGIN, progress=False, train=2)  # fmt: skip


def test_memory_is_returned(tmp_path: Path) -> None:
    """After tune the process holds what the same conversion from a saved plan holds: within 5 %."""
    import gc

    def live() -> int:
        gc.collect()
        seen = {}
        for thing in gc.get_objects():
            if type(thing) in (Tensor, nn.Parameter):
                storage = thing.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

    tune(make_trained()[0])  # what is cached once in a process is nobody's
    before = live()
    model = make_trained()[0]
    tuned = tune(model)
    tuned.plan.save(tmp_path / "plan.json")
    after_tune = live() - before
    del model, tuned
    between = live()
    twin = make_trained()[0]
    loka.convert(twin, loka.Plan.load(tmp_path / "plan.json"), example=BATCHES[0][0])
    after_convert = live() - between
    assert 0 < after_tune <= 1.05 * after_convert


FRESH = """
import sys, torch, loka
sys.path.insert(0, sys.argv[1])
from tuning.small import Ranker
model = Ranker()
model.load_state_dict(torch.load(sys.argv[2]))
done = loka.convert(model, loka.Plan.load(sys.argv[3]), example=torch.load(sys.argv[4]))
kinds = {name: type(module).__mro__[1].__name__ for name, module in model.named_modules()}
torch.save([done.converted, [str(unit.kernels) for unit in done.units], kinds, model.eval()(torch.load(sys.argv[4]))], sys.argv[5])
"""


def test_a_fresh_process_places_the_same_modules_and_kernels(tmp_path: Path) -> None:
    import subprocess
    import sys

    model, _ = make_trained()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save(BATCHES[0][0], tmp_path / "x.pt")
    tuned = tune(model)
    tuned.plan.save(tmp_path / "plan.json")
    files = [str(tmp_path / name) for name in ("weights.pt", "plan.json", "x.pt", "out.pt")]
    words = [sys.executable, "-c", FRESH, str(Path(__file__).parents[1]), *files]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    converted, kernels, kinds, y = torch.load(tmp_path / "out.pt", weights_only=False)
    assert converted == tuned.conversion.converted
    assert kernels == [str(unit.kernels) for unit in tuned.conversion.units]
    assert kinds == {name: type(module).__mro__[1].__name__ for name, module in model.named_modules()}
    assert torch.equal(y, model.eval()(BATCHES[0][0]))
