"""What `quantize` would run is judged on the example: sites with a wrong kernel stay in 16 bits, a plan with one is refused."""

from typing import Any

import pytest
import torch
from tests.planted import CHAINED, SINGLE, plant
from torch import Tensor, nn

import loka
from loka.kernels.grouped_mm import reference as grouped_law
from loka.kernels.scaled_mm import reference as product_law
from loka.nn import GroupedLinear
from loka.placing import plan_everything
from loka.ptq import quantize, quantizing
from loka.ptq.modules import QuantizedExperts, QuantizedLinear
from mods.zoo import assert_same_state, snapshot

WRONG = "a kernel fails the conformance gate: "


def make() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(96, 64)  # fmt: skip


@pytest.mark.parametrize("scales", ["dynamic", "static"])
@pytest.mark.parametrize("wrong", SINGLE)
def test_linears_with_a_wrong_kernel_stay_in_16_bits(wrong: str, scales: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if wrong == "row scales" and scales == "static":
        pytest.skip("one scale per tensor")
    op, planting = SINGLE[wrong]
    planting(monkeypatch)
    model, x = make()
    expected = model(x)
    summary = quantize(model, "tensorwise" if scales == "static" else "rowwise", batches=[x], scales=scales)
    assert not summary.quantized
    assert all(f"{WRONG}{op} on planted, 96x" in why for why in summary.kept.values())
    assert torch.equal(model(x), expected)


def test_only_the_sites_that_run_it_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(a: Any, b: Any, **options: Any) -> Tensor:
        return product_law.run(a, b, **options) * (1 + (b.shape[0] == 128))

    plant(monkeypatch, "scaled_mm", product_law, run=run)
    model, x = make()
    assert quantize(model, "rowwise", batches=[x]).quantized == ["2", "4"]
    assert isinstance(model[2], QuantizedLinear)
    assert type(model[0]) is nn.Linear


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.last = GroupedLinear(4, 128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.last(self.experts(x, ends))


@pytest.mark.parametrize("wrong", [False, True])
def test_experts_with_a_wrong_kernel_stay_in_16_bits(wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Any, weight: Any, offsets: Tensor, **options: Any) -> Tensor:
        found = grouped_law.run(x, weight, offsets, **options)
        found[32:] *= 1 - wrong
        return found

    plant(monkeypatch, "grouped_mm", grouped_law, run=run)
    model, given = Experts(), (torch.randn(64, 128), torch.tensor([10, 30, 50, 64], dtype=torch.int32))
    summary = quantize(model, "blockwise", batches=[given])
    assert summary.quantized == (["last"] if wrong else ["experts", "last"])
    assert isinstance(model.experts, QuantizedExperts) is not wrong
    if wrong:
        assert f"{WRONG}grouped_mm on planted, " in summary.kept["experts"]


@pytest.mark.parametrize("wrong", ["equal rows", "late rows", "each fifth"])
def test_a_plan_with_a_wrong_kernel_is_refused_and_nothing_is_changed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    model, x = make()
    plan = plan_everything(model, x, serving=True)
    assert plan.units
    op, planting = CHAINED[wrong]
    planting(monkeypatch)
    before, modes = snapshot(model), [m.training for m in model.modules()]
    needs = [p.requires_grad for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"nothing was changed:\n  0: {WRONG}{op} on planted, "):
        quantize(model, plan, batches=[x])
    assert_same_state(model, before)
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == needs
    loka.convert(model, recipe="rowwise", backend="reference")  # nothing is left of the trial


def test_a_score_shows_the_rows_where_there_are_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    SINGLE["late rows"][1](monkeypatch)
    model, x = make()
    summary = quantize(model, "rowwise", score=lambda m: (m(x).squeeze(1).square(), None))
    assert not summary.quantized
    assert all(f"{WRONG}scaled_mm on planted, 96x" in why for why in summary.kept.values())


def test_without_either_a_note_says_on_a_gpu_that_nothing_was_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("judged" in note for note in quantize(make()[0], "rowwise").record.notes)  # references need no check
    monkeypatch.setattr(quantizing, "device_of", lambda model: torch.device("cuda"))
    assert any("kernels were not judged" in note for note in quantize(make()[0], "rowwise").record.notes)


def test_a_backend_that_cannot_run_what_was_asked_is_an_error_as_without_batches() -> None:
    model, x = make()
    for batches in ([], [x]):
        with pytest.raises(ValueError, match="deepgemm cannot run"):
            quantize(model, "rowwise", backend="deepgemm", batches=batches)
    assert type(model[0]) is nn.Linear
