"""Kernels that are right on the batches at hand and wrong elsewhere: swapping and gradients find nothing, the gate does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.planted import plant, raw
from torch import Tensor, nn

from loka.formats import QTensor
from loka.kernels.dots import dots
from loka.kernels.dots import reference as dots_law
from loka.kernels.fused_linear import reference as fused_law
from loka.kernels.norm_quantize import reference as norm_law
from loka.kernels.quantize import reference as quantize_law
from loka.kernels.scaled_mm import reference as product_law
from loka.measure import kernel_calls
from loka.measure.conformance import Conformance
from loka.tuning import session

from .small import BATCHES, WIDTH, make_trained, placed, state_of, train, tune
from .small import same as same_state

LAWS = {"fused_linear": fused_law, "norm_quantize": norm_law, "quantize": quantize_law, "scaled_mm": product_law}


def plant_equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused layer that returns zeros where a row equals the one before it. No batch here has such rows."""

    def run(a: QTensor, b: QTensor, call: Any, **options: Any) -> Any:
        found = fused_law.run(a, b, call, **options)
        rows = raw(a)
        raw(found.y)[1:][(rows[1:] == rows[:-1]).all(1)] = 0
        return found

    plant(monkeypatch, "fused_linear", fused_law, run=run)


@pytest.mark.parametrize("target", ["train", "serve"])
def test_a_kernel_that_is_wrong_on_equal_rows_is_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_equal_rows(monkeypatch)
    model, optimizer = make_trained()
    before = state_of(model, optimizer)
    tuned = tune(model, target=target)
    assert not placed(model)
    reasons = [unit.reason for unit in tuned.record.units if "gate" in unit.reason]
    assert reasons
    assert all("fused_linear on planted" in reason and "alike_rows" in reason for reason in reasons)
    if tuned.conversion is None:
        assert same_state(before, state_of(model, optimizer))


def test_what_swapping_and_gradients_see_of_it_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_equal_rows(monkeypatch)
    monkeypatch.setattr(session, "verify_kernels", lambda *given: None)
    model, _ = make_trained()
    tune(model)
    assert placed(model)


@pytest.mark.parametrize("op", LAWS)
def test_a_kernel_that_is_wrong_in_one_call_of_five_is_refused(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def run(*operands: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        found = LAWS[op].run(*operands, **options)
        if calls % 5 == 0:
            first = found[0] if isinstance(found, tuple) else getattr(found, "y", None) if op == "fused_linear" else getattr(found, "q", found)  # fmt: skip
            if first is not None and raw(first).numel():
                raw(first)[-1:] = 1
        return found

    plant(monkeypatch, op, LAWS[op], run=run)
    model, _ = make_trained()
    tuned = tune(model, target="serve" if op != "quantize" else "train")
    assert any(f"{op} on planted" in unit.reason for unit in tuned.record.units)


def test_correct_kernels_are_counted_and_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for op, law in LAWS.items():
        plant(monkeypatch, op, law)
    model, _ = make_trained()
    tuned = tune(model)
    assert placed(model)
    assert tuned.record.kernels > 10
    assert not any("gate" in text for text in [*tuned.record.notes, *(unit.reason for unit in tuned.record.units)])
    tuned.report.to_html(tmp_path / "report.html")
    assert f"{tuned.record.kernels} kernel calls were tested" in (tmp_path / "report.html").read_text()


def test_a_reference_is_not_judged() -> None:
    model, _ = make_trained()
    assert tune(model).record.kernels == 0


class Two(nn.Module):
    """Two chains of which one has a width of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())
        self.last = nn.Linear(224, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.left(x), self.right(x)], 1)).squeeze(-1)


def test_only_the_unit_that_runs_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def dgrad(g: QTensor, w_t: QTensor, z: Any, call: Any, **options: Any) -> Any:
        found = fused_law.dgrad(g, w_t, z, call, **options)
        return replace(found, bias=None if found.bias is None else found.bias * (1 + (call.n == 96)))

    plant(monkeypatch, "fused_linear", fused_law, dgrad=dgrad)
    torch.manual_seed(0)
    model = Two()
    train(model)
    tuned = tune(model)
    assert placed(model) == {"left.0", "left.2"}
    (reason,) = (unit.reason for unit in tuned.record.units if unit.name == "right.0")
    assert "the bias gradient" in reason


def test_a_wrong_kernel_of_the_model_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is run in 16 bits, too, so leaving units out would not help."""

    def run(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        found = dots_law.run(x, first, second)
        found[3:][(x[3:] == x[:-3]).flatten(1).all(1)] = 0
        return found

    plant(monkeypatch, "dots", dots_law, run=run)

    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(WIDTH + 6, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
            self.last = nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            pairs = torch.triu_indices(4, 4, 1)
            products = dots(x.unflatten(1, (4, WIDTH // 4)), pairs[0], pairs[1])
            return self.last(self.tower(torch.cat([x, products], 1))).squeeze(-1)

    torch.manual_seed(0)
    model = Crossed()
    train(model)
    tuned = tune(model, BATCHES)
    assert placed(model)
    assert any("the model itself runs a kernel that fails" in note and "dots on planted" in note for note in tuned.record.notes)  # fmt: skip


class Products(nn.Module):
    """Pairwise products as users write them, which tune rewrites to an op of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.tower = nn.Sequential(nn.Linear(WIDTH + 28, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
        self.last = nn.Linear(64, 1)
        first, second = torch.triu_indices(8, 8, 1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, x: Tensor) -> Tensor:
        parts = (x * self.gain).unflatten(1, (8, WIDTH // 8))
        products = torch.bmm(parts, parts.transpose(1, 2))[:, self.first, self.second]
        return self.last(self.tower(torch.cat([x, products], 1))).squeeze(-1)


@pytest.mark.parametrize("wrong", ["", "forward", "gradient"])
def test_a_rewrite_that_brings_a_wrong_kernel_is_left_out(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(found: Tensor, x: Tensor, *, spoil: bool) -> Tensor:
        found[3:][(x[3:] == x[:-3]).flatten(1).all(1) & spoil] = 0  # which the mod's own check on a batch does not see
        return found

    def run(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return spoiled(dots_law.run(x, first, second), x, spoil=wrong == "forward")

    def gradient(dy: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return spoiled(dots_law.gradient(dy, x, first, second), x, spoil=wrong == "gradient")

    plant(monkeypatch, "dots", dots_law, run=run, gradient=gradient)
    torch.manual_seed(0)
    model = Products()
    train(model)
    tuned = tune(model)
    assert placed(model)
    assert ("fused_dots" in tuned.plan.mods) is not bool(wrong)
    (note,) = [note for note in tuned.record.notes if "fused_dots" in note and "left out" in note] or [""]
    assert ("dots on planted" in note) is bool(wrong)
    assert (", gradient: " in note) is (wrong == "gradient")


def test_calls_without_a_check_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "norm_quantize", norm_law)
    monkeypatch.setattr(kernel_calls.ADAPTERS["norm_quantize"], "adopt", lambda call: None)
    model, _ = make_trained()
    tuned = tune(model)
    assert placed(model)
    assert any("there is no conformance check for norm_quantize on planted" in note for note in tuned.record.notes)


def test_want_of_memory_is_told_and_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "fused_linear", fused_law)
    real = kernel_calls.judge_backend

    def judge(op: str, *given: Any, **options: Any) -> Conformance:
        if op == "fused_linear":
            return Conformance(False, float("inf"), 0.0, "OutOfMemoryError: CUDA out of memory", raised=True)
        return real(op, *given, **options)

    monkeypatch.setattr(kernel_calls, "judge_backend", judge)
    model, _ = make_trained()
    tuned = tune(model)
    assert placed(model)
    assert any("for want of memory" in note for note in tuned.record.notes)


def test_kernels_are_judged_again_when_the_step_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that were taken apart since run other kernels."""
    judged: list[list[str]] = []
    real = session.verify_kernels

    def verify(call: Any, selection: Any, known: Any, verified: Any) -> None:
        real(call, selection, known, verified)
        judged.append(sorted(verified))

    monkeypatch.setattr(session, "verify_kernels", verify)
    model, _ = make_trained()
    tune(model)
    assert len(judged) >= 2  # before anything is timed, and when the step is settled


@pytest.mark.gpu
@pytest.mark.parametrize("target", ["train", "serve"])
def test_our_own_kernels_are_not_refused_on_a_gpu(target: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 768), nn.GELU(), nn.Linear(768, 512, bias=False), nn.LayerNorm(512),
        nn.SiLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.LeakyReLU(0.2), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1),
    ).cuda()  # fmt: skip
    batches = [(torch.randn(2000, 512, device="cuda"), torch.rand(2000, 1, device="cuda").round()) for _ in range(4)]

    def given(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(output.float(), target, reduction="none").mean(1)

    tuned = tune(model, batches, given, target=target, margin=0.5, seconds=20)
    assert tuned.record.kernels > 5
    assert not [unit.reason for unit in tuned.record.units if "gate" in unit.reason]


def test_a_kernel_that_raises_where_it_is_served_leaves_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(a: QTensor, b: QTensor, call: Any, **options: Any) -> Any:
        if call.n == 64:
            raise RuntimeError("out of shared memory")
        return fused_law.run(a, b, call, **options)

    plant(monkeypatch, "fused_linear", fused_law, run=run)
    model, _ = make_trained()
    tuned = tune(model, target="serve")
    assert any("the model fails with it in low precision: RuntimeError: out of shared memory" in unit.reason for unit in tuned.record.units)  # fmt: skip
