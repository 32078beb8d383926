"""Every kind of plan refuses kernels that are wrong, and names kernel, call and fault."""

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from tests.planted import CHAINED, SINGLE, layer, plant, zero_late_rows
from torch import Tensor, nn

import loka
from loka.formats import QTensor
from loka.kernels.dropout import Dropout
from loka.kernels.fused_linear import reference as fused_law
from loka.kernels.quantize import QuantizeCall
from loka.kernels.quantize import reference as quantize_law
from loka.kernels.scaled_mm import reference as product_law
from loka.measure.gate import forget_answers
from loka.measure.kernel_calls import KernelCall
from loka.placing import judging, plan_everything
from loka.placing.judging import Judge, find_planned, find_step
from loka.records import Plan
from mods.zoo import assert_same_state, snapshot

Planting = Callable[[pytest.MonkeyPatch], None]
pytestmark = pytest.mark.usefixtures("place")


def make() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))  # fmt: skip
    return model, torch.randn(96, 64)


class Twice(nn.Module):
    """A linear that no chain can hold, since it is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(x)))


@pytest.fixture(params=[False, True], ids=["", "as on a GPU"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step is run only to find its calls, references run on a GPU: nothing is compiled before it is judged."""
    monkeypatch.setattr(judging, "_is_on_gpu", lambda model: request.param)


def reasons(plan: Plan, name: str) -> str:
    (site,) = (site for site in plan.sites if site.site == name)
    return "; ".join(choice.reason for choice in site.choices)


@pytest.mark.parametrize("serving", [False, True])
@pytest.mark.parametrize("wrong", CHAINED)
def test_a_plan_of_everything_leaves_chains_with_a_wrong_kernel_out(wrong: str, serving: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    op, planting = CHAINED[wrong]
    planting(monkeypatch)
    model, x = make()
    before = snapshot(model)
    plan = plan_everything(model, x, serving=serving)
    assert_same_state(model, before)
    if serving and wrong == "bias gradient":  # which serving does not run
        assert plan.units
        return
    assert not plan.units
    assert f"a kernel fails the conformance gate: {op} on planted, " in reasons(plan, "0")
    assert not loka.convert(model, plan).converted


@pytest.mark.parametrize("serving", [False, True])
@pytest.mark.parametrize("wrong", SINGLE)
def test_a_plan_of_everything_leaves_linears_with_a_wrong_kernel_out(wrong: str, serving: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    op, planting = SINGLE[wrong]
    model, x = Twice(), torch.randn(48, 64)
    assert any(site.quantized for site in plan_everything(model, x, linears=64, serving=serving).sites)
    planting(monkeypatch)
    plan = plan_everything(model, x, linears=64, serving=serving)
    assert not any(site.quantized for site in plan.sites)
    assert f"a kernel fails the conformance gate: {op} on planted, " in reasons(plan, "inner")


def test_kernels_are_judged_with_the_rows_they_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is wrong beyond row 32 is right for 32 rows."""
    layer(zero_late_rows)(monkeypatch)
    model, x = make()
    assert plan_everything(model, x[:32]).units
    assert not plan_everything(model, x[:33]).units


def test_a_fault_that_only_dropout_shows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving runs the same chain without dropout, where the layer is right."""

    def run(a: QTensor, b: QTensor, call: Any, *, dropout: Dropout | None = None, **options: Any) -> Any:
        again = None if dropout is None else dropout._replace(seed=torch.ones_like(dropout.seed))  # one mask for ever
        return fused_law.run(a, b, call, dropout=again, **options)

    plant(monkeypatch, "fused_linear", fused_law, run=run)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    plan = plan_everything(model, torch.randn(48, 64))
    assert not plan.units
    assert "+dropout: on " in reasons(plan, "0")
    assert plan_everything(model, torch.randn(48, 64), serving=True).units


def test_only_the_unit_that_runs_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(a: object, b: object, call: object, **options: object) -> object:
        found = fused_law.run(a, b, call, **options)
        if call.n == 96:
            found.y.data.view(torch.uint8)[:] = 0
        return found

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
            self.right = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())
            self.last = nn.Linear(224, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.cat([self.left(x), self.right(x)], 1))

    plant(monkeypatch, "fused_linear", fused_law, run=run)
    plan = plan_everything(Two(), torch.randn(48, 64))
    assert [unit.name for unit in plan.units] == ["left.0"]
    assert "fused_linear on planted" in reasons(plan, "right.0")


def test_a_kernel_that_raises_leaves_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*given: object, **options: object) -> object:
        raise RuntimeError("out of shared memory")

    plant(monkeypatch, "fused_linear", fused_law, run=run)
    plan = plan_everything(*make())
    assert not plan.units
    assert "RuntimeError: out of shared memory" in reasons(plan, "0")


@pytest.mark.parametrize("serving", [False, True])
def test_correct_kernels_stay_and_references_are_not_judged(serving: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make()
    judged: list[KernelCall] = []
    real = judging.judge_call
    monkeypatch.setattr(judging, "judge_call", lambda one, device: (judged.append(one), real(one, device))[1])
    assert len(plan_everything(model, x, serving=serving).units) == 1
    assert not judged
    for op, law in {"fused_linear": fused_law, "quantize": quantize_law, "scaled_mm": product_law}.items():
        plant(monkeypatch, op, law)
    assert len(plan_everything(model, x, serving=serving).units) == 1
    assert judged


def test_scales_of_later_steps_run_kernels_of_their_own() -> None:
    """The first step of a chain finds its scales from the tensors; only later ones run static ones."""
    model, x = make()
    loka.convert(model, plan_everything(model, x))
    calls = [str(one) for one in find_step(model, x, training=True)]
    assert any("-> e4m3:tensor:static" in one and one.startswith("fused_linear") for one in calls)
    assert any(one.startswith("fused_linear") and "-> e4m3:tensor:static" not in one for one in calls)


def test_under_autocast_correct_kernels_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would round what kernels compute, and what they are compared with."""
    plant(monkeypatch, "fused_linear", fused_law)
    model, x = make()
    with torch.autocast("cpu", torch.bfloat16):
        plan = plan_everything(model, x)
    assert plan.units
    assert len(plan.notes) == 1


@pytest.mark.parametrize("newer", [False, True])
def test_kernels_are_judged_without_tf32(newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever allows it gets it from torch's own kernels, which are correct all the same."""
    seen: set[str] = set()
    products = torch.backends.cuda.matmul

    def run(*given: Any, **options: Any) -> Any:
        seen.add(products.fp32_precision)
        return quantize_law.run(*given, **options)

    plant(monkeypatch, "quantize", quantize_law, run=run)
    try:
        if newer:
            products.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        assert not Judge("cpu").find_wrong([KernelCall("quantize", "planted", QuantizeCall(32, 64, loka.Spec.parse("e4m3:row")))])  # fmt: skip
        assert seen == {"ieee"}
        assert products.fp32_precision == "tf32"
        assert newer or torch.get_float32_matmul_precision() == "high"
    finally:
        products.fp32_precision = "ieee"
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_of_training_is_one_wherever_it_is_asked_for(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "fused_linear", fused_law)
    model, x = make()
    judges: list[Judge] = []
    real = Judge.refuse
    monkeypatch.setattr(Judge, "refuse", lambda judge, *given: (judges.append(judge), real(judge, *given))[1])
    with mode():
        plan = plan_everything(model, x)
    assert [name for unit in plan.units for name in unit.linears] == ["0", "2", "4"]
    assert {type(one.call).__name__ for one in judges[0].judged} == {"FusedCall", "GradientCall", "DgradCall"}


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_defaults_of_a_program_are_not_those_of_judging(default: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "fused_linear", fused_law)
    model, x = make()
    calls = [KernelCall("fused_linear", "planted", one.call) for one in find_planned(model, plan_everything(model, x), x, training=True) if one.op == "fused_linear"]  # fmt: skip
    forget_answers()
    judge = Judge("cpu")
    try:
        if default == "meta":
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        assert judge.find_wrong(calls) == {}
        assert judge.judged
        assert default in (torch.get_default_dtype(), torch.get_default_device().type)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_what_judging_allocated_is_released_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to other streams: an engine judges on the one on which it prepares a graph."""
    released: list[bool] = []
    monkeypatch.setattr(judging, "judge_call", lambda one, device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(True))
    judge = Judge("cuda")
    assert judge.find_wrong([KernelCall("quantize", "reference", None)]) == {}
    assert not released
    assert judge.find_wrong([KernelCall("quantize", "triton", None)]) == {}
    assert released


def test_a_model_that_fails_by_itself_is_not_judged_and_a_note_says_so() -> None:
    judge = Judge("cpu")

    def find(names: Collection[str]) -> list[KernelCall]:
        raise ValueError("no such embedding")

    assert judge.refuse(["tower.0"], find) == {}
    assert judge.notes == [
        "no kernel was judged, since the model fails on the example without low precision: ValueError: no such embedding"
    ]


def test_want_of_memory_refuses_nothing_and_a_note_says_so() -> None:
    def find(names: Collection[str]) -> list[KernelCall]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for failing in (True, False):
        judge = Judge("cpu")
        assert judge.refuse(["tower.0"], find, failing=failing) == {}
        assert judge.notes == ["not every kernel was judged, for want of memory for a step in low precision"]


@pytest.mark.gpu
@pytest.mark.parametrize("serving", [False, True])
def test_our_own_kernels_are_not_refused_on_a_gpu(serving: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 768), nn.GELU(), nn.Linear(768, 512), nn.LayerNorm(512),
        nn.SiLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1),
    ).cuda()  # fmt: skip
    with torch.autocast("cuda", torch.bfloat16):
        plan = plan_everything(model, torch.randn(2000, 512, device="cuda"), serving=serving)
    assert [name for unit in plan.units for name in unit.linears] == ["0", "3", "5", "9"]
    assert len(plan.notes) == 1


def test_calls_are_found_without_running_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[bool] = []
    law = fused_law.run

    def run(*given: Any, **options: Any) -> Any:
        ran.append(True)
        return law(*given, **options)

    plant(monkeypatch, "fused_linear", fused_law, run=run)
    model, x = make()
    plan = plan_everything(model, x)
    ran.clear()
    monkeypatch.setattr(judging, "_is_on_gpu", lambda model: False)
    plain = find_planned(model, plan, x, training=True)
    assert ran
    ran.clear()
    monkeypatch.setattr(judging, "_is_on_gpu", lambda model: True)
    assert find_planned(model, plan, x, training=True) == plain
    assert not ran

    def fail(*given: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fused_law, "run", fail)
    assert find_planned(model, plan, x, training=True) == plain  # references take more memory
    assert ran
