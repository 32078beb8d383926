"""Probe judges the kernels of the chains it finds, whole and in parts, and no plan places one that runs a wrong kernel."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.dispatch.test_chains import CHEAP, cheap, harmed, linears
from tests.planted import CHAINED, SINGLE, plant, raw
from tests.probe.test_chain_sites import LINKS, Tower, batches, train
from torch import Tensor, nn

from loka.formats import QTensor
from loka.kernels import registry
from loka.kernels.fused_linear import reference as fused_law
from loka.kernels.quantize import reference as quantize_law
from loka.kernels.scaled_mm import reference as product_law
from loka.measure.conformance import Conformance
from loka.measure.kernel_calls import KernelCall
from loka.placing import converted, judging
from loka.probe import Probe, Report, engine
from loka.probe import judging as probe_judging
from loka.records import Plan, UnitPlan

WRONG = "a kernel fails the conformance gate: "


def probe(model: nn.Module | None = None, **options: Any) -> Report:
    model = model or Tower()
    watching = Probe(model, every=1)
    train(model, batches(3), watching)
    report = watching.evaluate(**CHEAP, **options)
    watching.detach()
    return report


def told(plan: Plan, site: str) -> str:
    (found,) = (one for one in plan.sites if one.site == site)
    return "; ".join(text for choice in found.choices for text in choice.refusals)


@pytest.mark.parametrize("wrong", CHAINED)
def test_chains_with_a_wrong_kernel_are_in_no_plan(wrong: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    op, planting = CHAINED[wrong]
    planting(monkeypatch)
    probe().save(tmp_path / "probe.json")
    report = cheap(Report.load(tmp_path / "probe.json"))  # a plan may be made elsewhere, without the model
    plan = report.plan(min_speedup=None)
    assert linears(plan) == []
    assert all(f"in a chain: {WRONG}{op} on planted, " in told(plan, name) for name in LINKS)
    with pytest.raises(ValueError, match=rf"every linear of every chain is refused: tower.0: {WRONG}{op} on planted, "):
        report.plan(min_speedup=None, chains=True)
    assert any(WRONG in line for line in report.summary())


def test_a_wrong_product_of_a_chain_is_found_though_no_candidate_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain picks its products by itself; candidates run on the backends that were asked for."""
    SINGLE["late rows"][1](monkeypatch)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))
    assert f"{WRONG}scaled_mm on planted, " in probe(model).record.wrong_chains["0"]


def judge_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[KernelCall], bool]) -> list[KernelCall]:
    """Plant a quantizer and a product, note which calls of a step are judged, and find some of them wrong."""
    for op in ("quantize", "scaled_mm"):
        plant(monkeypatch, op, registry.backend(op, "reference"))
    for module in (probe_judging, engine):
        monkeypatch.setattr(module, "out_dtype", lambda device: torch.bfloat16)
    judged: list[KernelCall] = []

    def judge(one: KernelCall, device: Any) -> Conformance:
        judged.append(one)
        return Conformance.failed("planted") if wrong(one) else Conformance(True, 0.0, 0.0)

    monkeypatch.setattr(judging, "judge_call", judge)
    return judged


def stand_alone(*widths: int) -> nn.Module:
    """Linears that no chain can hold, since nobody fuses what is between them."""
    return nn.Sequential(*[part for k, n in pairwise(widths) for part in (nn.Linear(k, n), nn.Softplus(threshold=9))])


def is_gradient(one: KernelCall) -> bool:
    return one.op == "scaled_mm" and not one.call.fast_accum and str(one.call.a) == "e4m3:row"  # of a weight


def test_what_only_a_step_runs_is_judged_at_the_largest_linear_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sides that are multiples of 16, and of others, which kernels pad or mask. The verdict is that of all."""
    judged = judge_as_on_a_gpu(monkeypatch, lambda one: is_gradient(one) and (one.call.m, one.call.n) == (128, 96))
    report = probe(stand_alone(64, 96, 128, 40, 1), backends=["planted"])
    assert sorted((one.call.m, one.call.n) for one in judged if is_gradient(one)) == [(1, 40), (40, 128), (128, 96)]
    both = [one.call for one in judged if str(one.call).endswith("-> e4m3:row + T e4m3:row")]
    assert sorted(call.k for call in both) == [1, 40, 96, 128]
    found = {site.name: {WRONG in (c.refusal or "") for c in site.candidates if c.recipe == "rowwise"} for site in report.record.sites}  # fmt: skip
    assert found == {"0": {True}, "2": {True}, "4": {False}, "6": {False}}


def test_where_the_step_of_the_largest_fails_the_next_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = judge_as_on_a_gpu(monkeypatch, is_gradient)
    model = stand_alone(64, 96, 128, 64, 1)
    quantize = registry.backend("quantize", "planted").run

    def run(x: Tensor, *given: Any, **options: Any) -> Any:
        if x.shape[1] == 96 and "transpose" in options:  # the input of the largest
            raise RuntimeError("planted to fail")
        return quantize(x, *given, **options)

    monkeypatch.setattr(registry.backend("quantize", "planted"), "run", run)
    report = probe(model, backends=["planted"])
    assert (64, 128) in [(one.call.m, one.call.n) for one in judged if is_gradient(one)]
    told = {site.name: {c.refusal for c in site.candidates if c.recipe == "rowwise"} for site in report.record.sites}
    assert any("planted to fail" in (why or "") for why in told["2"])
    assert all(WRONG in (why or "") for why in told["4"])


def test_of_examples_that_differ_in_rows_the_largest_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = note_calls(monkeypatch)
    model = Tower()
    watching = Probe(model, every=1)
    for rows in (24, 40, 32):
        ((x, y),) = batches(1)
        train(model, [(x[:rows], y[:rows])], watching)
    calls.clear()
    watching.evaluate(**CHEAP)
    assert {call.m for call in calls} == {40}


def note_calls(monkeypatch: pytest.MonkeyPatch, spoiled: Callable[[Any], bool] = lambda call: False) -> list[Any]:
    """Plant a layer of chains that notes its calls, and returns zeros in some."""
    calls: list[Any] = []

    def run(a: QTensor, b: QTensor, call: Any, **options: Any) -> Any:
        calls.append(call)
        found = fused_law.run(a, b, call, **options)
        if spoiled(call):
            raw(found.y)[:] = 0
        return found

    plant(monkeypatch, "fused_linear", fused_law, run=run)
    return calls


def test_a_part_of_a_chain_that_would_run_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second linear writes 16 bits only where the third has left the chain; the whole chain is right."""
    torch.manual_seed(0)
    layers = [part for n in (128, 96, 64) for part in (nn.LazyLinear(n), nn.ReLU())]
    model = nn.Sequential(*layers, nn.LazyLinear(1))
    model(batches(1)[0][0])
    note_calls(monkeypatch, lambda call: call.n == 96 and call.out == torch.float32)
    (unit,) = probe(model).record.chains
    assert unit.linears == ["0", "2", "4"]
    assert not [call for call in unit_calls(model, unit) if call.n == 96 and call.out == torch.float32]
    assert WRONG in probe(model).record.wrong_chains["0"]


def unit_calls(model: nn.Module, unit: UnitPlan) -> list[Any]:
    with converted(model, judging.plan_unmeasured(model, units=[unit])):
        return [
            one.call
            for one in judging.find_step(model, batches(1)[0][0], training=True)
            if type(one.call).__name__ == "FusedCall"
        ]


@pytest.mark.parametrize("wrong", ["both ways", "float32"])
def test_what_only_a_step_of_a_linear_runs_is_judged(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that quantizes a tensor and its transpose, and a weight gradient in float32: no candidate is judged so."""

    def quantize(x: Tensor, spec: Any, **options: Any) -> Any:
        q, q_t = quantize_law.run(x, spec, **options)
        if q is not None and q_t is not None and wrong == "both ways":
            raw(q_t)[-1:] = 0
        return q, q_t

    def multiply(a: QTensor, b: QTensor, *, out_dtype: torch.dtype, fast_accum: bool = False) -> Tensor:
        found = product_law.run(a, b, out_dtype=out_dtype, fast_accum=fast_accum)
        found[16:] *= 1 - (out_dtype == torch.float32 and wrong == "float32")
        return found

    plant(monkeypatch, "quantize", quantize_law, run=quantize)
    plant(monkeypatch, "scaled_mm", product_law, run=multiply)
    monkeypatch.setattr(probe_judging, "out_dtype", lambda device: torch.bfloat16)  # as on a GPU
    monkeypatch.setattr(engine, "out_dtype", lambda device: torch.bfloat16)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 1))
    report = probe(model, backends=["planted", "reference"])
    refusals = {c.backend: c.refusal or "" for c in report.site("0").candidates if c.recipe == "rowwise"}
    assert WRONG in refusals["planted"]
    assert ("-> float32" if wrong == "float32" else "quantize on planted") in refusals["planted"]
    assert (WRONG in refusals["reference"]) is (wrong == "both ways")  # which quantizes with the same kernel
    plan = cheap_everywhere(report).plan(min_speedup=None, recipe="rowwise")
    (site,) = (one for one in plan.sites if one.site == "0")
    assert {choice.backend for choice in site.choices} == ({"high"} if wrong == "both ways" else {"reference"})


def cheap_everywhere(report: Report) -> Report:
    for site in report.record.sites:
        for recipe in ("rowwise", "tensorwise"):
            report = harmed(report, site.name, 1e-9, recipe=recipe)
    return report


def test_evaluating_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "fused_linear", fused_law)
    model, twin = Tower("dropping"), Tower("dropping")
    watching = Probe(model, every=1)
    train(model, batches(3), watching)
    random, classes = torch.get_rng_state(), [type(m) for m in model.modules()]
    gradients = [p.grad.clone() for p in model.parameters()]
    report = watching.evaluate(**CHEAP)
    assert report.record.chains
    assert not report.record.wrong_chains
    assert torch.equal(random, torch.get_rng_state())
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), gradients, strict=True))
    watching.detach()
    train(twin, batches(3))
    again, expected = train(model, batches(3)), train(twin, batches(3))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_nothing_is_judged_where_only_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    real = judging._find_in
    monkeypatch.setattr(judging, "_find_in", lambda *given, **options: (runs.append(True), real(*given, **options))[1])
    monkeypatch.setattr(judging, "judge_call", lambda *given: pytest.fail("judged"))
    assert probe().record.chains
    assert len(runs) == 1  # to see what chains run; their parts, and linears by recipes, run nothing else


def test_kernels_are_judged_as_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As training runs them: the layers that write 16 bits write bf16."""
    calls = note_calls(monkeypatch)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))
    watching = Probe(model, every=1)
    with torch.autocast("cpu", torch.bfloat16):
        model(batches(1)[0][0]).float().sum().backward()
    watching.step(0.5)
    watching.evaluate(**CHEAP)
    assert {call.out for call in calls if isinstance(call.out, torch.dtype)} == {torch.bfloat16}
