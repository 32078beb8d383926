"""The engine judges the kernels of a bucket when it first runs: with a wrong one it answers nothing."""

import importlib
import math
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.planted import SINGLE, plant
from torch import Tensor

from loka.formats import Spec, dequantize
from loka.formats import quantize as quantize_by_law
from loka.inference import Engine, EngineConfig, tuning
from loka.inference.engine import JUDGED
from loka.kernels import registry
from loka.kernels.grouped_mm import reference as grouped_law
from loka.measure import Conformance
from loka.models.onerec import Experts
from loka.ptq import quantize

from .small import make_index, make_model, make_requests


def make(**options: Any) -> tuple[Any, Engine]:
    model = make_model("tiny-moe", layers=3)
    quantize(model, "onerec_rows", keep=("*.router", "heads.*", "context.*"))
    return model, Engine(model, EngineConfig(beams=40, requests=(1, 8), dtype="fp32", **options), valid=make_index(model).trie)  # fmt: skip


@pytest.mark.parametrize("wrong", SINGLE)
def test_a_wrong_kernel_of_a_packed_linear_raises(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, planting = SINGLE[wrong]
    model, engine = make()
    requests = make_requests(model, (3, 7))
    assert engine.generate(requests)
    planting(monkeypatch)
    model, engine = make()
    for _ in range(2):  # not only the first time
        with pytest.raises(
            ValueError, match=rf"(?s)fail the conformance gate:.*\n  {op} on planted, .*hint: name another"
        ):
            engine.generate(requests)
    model, engine = make(backends=((op, "reference"),))
    assert engine.generate(requests)


def test_a_wrong_kernel_of_experts_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Any, weight: Any, offsets: Tensor, **options: Any) -> Tensor:
        found = grouped_law.run(x, weight, offsets, **options)
        found[16:] = 0
        return found

    plant(monkeypatch, "grouped_mm", grouped_law, run=run)
    model, engine = make()
    with pytest.raises(ValueError, match="grouped_mm on planted, "):
        engine.generate(make_requests(model, (3, 7)))


def test_correct_kernels_are_judged_once_for_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in JUDGED:
        plant(monkeypatch, op, importlib.import_module(f"loka.kernels.{op}.reference"))
    model, engine = make()
    requests = make_requests(model, (3, 7))
    engine.generate(requests)
    judged = dict(engine.judge.judged)
    assert {one.op for one in judged} >= {"scaled_mm", "quantize", "grouped_mm"}
    assert not any(judged.values())
    engine.generate(requests)
    assert engine.judge.judged == judged


def test_references_are_not_judged() -> None:
    model, engine = make()
    engine.generate(make_requests(model, (3, 7)))
    assert not engine.judge.judged
    assert not engine.judge.notes


def test_a_wrong_kernel_that_the_engine_chose_by_the_number_of_rows_is_replaced_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU, few rows are multiplied by our own kernel: nobody has asked for it by name."""
    monkeypatch.setattr(registry, "_AVOIDED", {})
    law, usual = importlib.import_module("loka.kernels.scaled_mm.reference"), tuning._usual_backend

    def as_on_a_gpu(linear: Any, rows: int, *more: Any) -> str:
        weight = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=linear.weight.shape)
        return usual(SimpleNamespace(bound=linear.bound, weight=weight), rows, *more)

    model, engine = make()
    requests = make_requests(model, (3,))
    expected = engine.generate(requests)
    monkeypatch.setattr(tuning, "_usual_backend", as_on_a_gpu)
    plant(monkeypatch, "scaled_mm", law, run=lambda *given, **options: 1.5 * law.run(*given, **options))
    monkeypatch.setitem(registry._LOADED, "scaled_mm.triton", registry._LOADED["scaled_mm.planted"])
    monkeypatch.setitem(registry.BACKENDS, "scaled_mm", ("torch", "triton", "reference"))
    monkeypatch.setitem(registry._LOADED, "scaled_mm.torch", law)
    registry._CACHE.clear()
    model, engine = make(tune=False)
    with pytest.warns(UserWarning, match="scaled_mm runs on torch, since scaled_mm on triton, .* fails the"):
        found = engine.generate(requests)
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(found, expected, strict=True))
    assert engine.generate(requests)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["onerec", "onerec_rows", "onerec_mixed"])
def test_our_own_kernels_are_not_refused_on_a_gpu(recipe: str) -> None:
    experts = Experts(routed=4, top=2, hidden=256, dense_blocks=1)
    model = make_model("tiny-moe", d=256, heads=4, layers=3, d_ff=256, experts=experts).cuda()
    quantize(model, recipe)
    engine = Engine(model, EngineConfig(beams=64, requests=(1, 8), tune=False), valid=make_index(model).trie)
    engine.warm()
    assert {one.op for one in engine.judge.judged} >= {"scaled_mm", "grouped_mm"}
    assert not engine.judge.notes


def test_later_buckets_judge_what_differs_in_more_than_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "scaled_mm", importlib.import_module("loka.kernels.scaled_mm.reference"))
    model, engine = make()
    engine.generate(make_requests(model, (3, 7)))
    judged = dict(engine.judge.judged)
    engine.generate(make_requests(model, (3,)))  # the bucket of one request
    assert engine.judge.judged == judged
    assert engine.captures == 2


def test_auto_takes_another_backend_for_a_wrong_kernel_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_AVOIDED", {})
    law = importlib.import_module("loka.kernels.topk.reference")

    def beams(*given: Any, **options: Any) -> Any:
        values, *rest = law.beams(*given, **options)
        return values + 1.0, *rest

    model, engine = make()
    requests = make_requests(model, (3, 7))
    expected = engine.generate(requests)
    plant(monkeypatch, "topk", law, beams=beams)
    registry._CACHE.clear()
    model, engine = make()
    with pytest.warns(UserWarning, match="topk runs on torch, since topk on planted, .* fails the conformance gate"):
        found = engine.generate(requests)
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(found, expected, strict=True))
    assert any(note.startswith("topk runs on torch, since") for note in engine.judge.notes)
    call = next(one.call for one in engine.judge.judged if one.op == "topk")
    assert "conformance gate" in registry.first("topk", call, torch.device("cpu")).refusals["planted"]

    with warnings.catch_warnings(record=True) as told:  # as for a user, whom Python shows each warning once
        warnings.simplefilter("default")
        model, second = make()
        second.generate(requests)
        second.generate(requests)
    assert [str(one.message) for one in told] == second.judge.notes == engine.judge.notes
    assert len(told) == len(set(engine.judge.notes))  # a step of the search each, and nothing twice

    model, engine = make(backends=(("topk", "planted"),))  # what was asked for runs, or nothing
    with pytest.raises(ValueError, match=r"(?s)fail the conformance gate.*topk on planted"):
        engine.generate(requests)


def test_routing_falls_back_to_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_AVOIDED", {})
    law = importlib.import_module("loka.kernels.route.reference")

    def run_sorted(*given: Any, **options: Any) -> Any:
        *moved, gates = law.run_sorted(*given, **options)
        return *moved, gates * 1.1

    model, engine = make()
    requests = make_requests(model, (3, 7))
    expected = engine.generate(requests)
    plant(monkeypatch, "route", law, run_sorted=run_sorted)
    registry._CACHE.clear()
    model, engine = make()
    with pytest.warns(
        UserWarning, match="route runs on reference, since route on planted, .* fails the conformance gate"
    ):
        found = engine.generate(requests)
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("run", [1, 2], ids=["first engine", "second engine"])
def test_what_cannot_be_judged_is_told(run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "topk", importlib.import_module("loka.kernels.topk.reference"))
    monkeypatch.setattr("loka.placing.judging.judge_call", lambda *given: None)
    registry._CACHE.clear()
    for _ in range(run):
        model, engine = make()
        with pytest.warns(UserWarning, match="there is no conformance check for topk on planted"):
            engine.generate(make_requests(model, (3, 7)))
        assert any("no conformance check for topk on planted" in note for note in engine.judge.notes)


def plant_wrong_fused_experts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """In place of our kernels, of which the fused one is the faster. Returns requests and what they are answered."""
    monkeypatch.setattr(registry, "_AVOIDED", {})

    def run_swiglu(*given: Any, spec: Any, **options: Any) -> Any:
        made = grouped_law.run_swiglu(*given, spec=spec, **options)
        return replace(made, scale=made.scale * 1.02)

    def run(x: Any, weight: Any, offsets: Tensor, **options: Any) -> Tensor:
        time.sleep(0.003)
        return grouped_law.run(x, weight, offsets, **options)

    model, engine = make()
    requests = make_requests(model, (3, 7))
    expected = engine.generate(requests)
    plant(monkeypatch, "grouped_mm", grouped_law, run_swiglu=run_swiglu, run=run)
    monkeypatch.setitem(registry._LOADED, "grouped_mm.triton", registry._LOADED["grouped_mm.planted"])
    monkeypatch.setitem(registry.BACKENDS, "grouped_mm", ("triton", "reference"))
    registry._CACHE.clear()
    return requests, expected


def test_experts_run_two_kernels_where_the_fused_one_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, expected = plant_wrong_fused_experts(monkeypatch)
    _model, engine = make()
    assert engine.tuning.tuned(8).blocks[-1].ffn.fused
    with pytest.warns(UserWarning, match="grouped_mm runs on two kernels, since grouped_mm on triton, .*swiglu"):
        found = engine.generate(requests)
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(found, expected, strict=True))
    assert not engine.tuning.tuned(8).blocks[-1].ffn.fused
    _model, engine = make()
    with pytest.warns(UserWarning, match="grouped_mm runs on two kernels, since grouped_mm on triton, .*swiglu"):
        engine.generate(requests)
    assert len(engine.judge.notes) == 1


def test_a_wrong_fused_kernel_of_experts_is_refused_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    requests, expected = plant_wrong_fused_experts(monkeypatch)
    _model, engine = make(tune=True)
    found = engine.generate(requests)
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(found, expected, strict=True))
    assert not recwarn.list
    experts = [entry for entry in engine.tuning.log if entry.role == tuning.EXPERTS]
    assert {entry.chosen for entry in experts} == {"triton"}
    assert all("a scale is" in entry.refused["triton fused"] for entry in experts)


def test_wrong_experts_that_were_measured_by_an_earlier_gate_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU backends are chosen by measuring, unless asked not to, and rows of the database outlive the gate."""
    requests, expected = plant_wrong_fused_experts(monkeypatch)
    monkeypatch.setattr(tuning._Race, "_judge", lambda *given: Conformance(True, 0.0, 1.0))
    _model, engine = make(tune=True)
    with pytest.warns(UserWarning, match="grouped_mm runs on two kernels, since grouped_mm on triton, .*swiglu"):
        found = engine.generate(requests)
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(found, expected, strict=True))
    last = engine.tuning.log[-1]
    assert (last.role, last.chosen) == (tuning.EXPERTS, "triton")
    assert "fails the conformance gate" in last.refused["triton fused"]


def make_low(**options: Any) -> tuple[Any, Engine]:
    model = make_model(d=128, heads=4)
    config = EngineConfig(beams=8, requests=(1, 4), dtype="fp32", context_cache="e4m3", **options)
    return model, Engine(model, config, valid=make_index(model).trie)


def multiply_in_fp8(scale_off: float = 1.0) -> Any:
    """Attention that rounds queries and weights, as our kernel for a GPU does."""
    law = importlib.import_module("loka.kernels.beam_attention.reference")

    def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float) -> Tensor:
        low = dequantize(quantize_by_law(q.reshape(-1, q.shape[3]), Spec.parse("e4m3:row"))).view(q.shape)
        s = torch.einsum("rbhd,rshd->rbhs", low.float(), k.float()) * scale * scale_off
        seen = torch.arange(k.shape[1]) < lengths[:, None]
        s = s.masked_fill(~seen[:, None, None], -torch.inf)
        p = torch.exp2((s - s.amax(-1, keepdim=True)) * math.log2(math.e) + 8)
        wide = torch.einsum("rbhs,rshd->rbhd", p.to(k.dtype).float(), torch.where(seen[:, :, None, None], v.float(), 0))
        return (wide / p.sum(-1, keepdim=True)).to(q.dtype).contiguous()

    return law, run


def test_attention_to_a_context_in_fp8_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged without a note, taken if it is right; if its scores are 5 % off, another backend is."""
    monkeypatch.setattr(registry, "_AVOIDED", {})
    law, run = multiply_in_fp8()
    plant(monkeypatch, "beam_attention", law, run=run)
    registry._CACHE.clear()
    model, engine = make_low()
    requests = make_requests(model, (3, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(requests)
    judged = [one for one in engine.judge.judged if getattr(one.call, "cache", None) is not None]
    assert judged
    assert {one.backend for one in judged} == {"planted"}
    assert not engine.judge.notes

    law, run = multiply_in_fp8(1.05)
    plant(monkeypatch, "beam_attention", law, run=run)
    registry._CACHE.clear()
    model, engine = make_low()
    with pytest.warns(UserWarning, match=r"beam_attention runs on torch, since beam_attention on planted, .*float8_e4m3fn fails the conf"):  # fmt: skip
        engine.generate(requests)
    model, engine = make_low(backends=(("beam_attention", "planted"),))
    with pytest.raises(ValueError, match=r"(?s)fail the conformance gate.*beam_attention on planted"):
        engine.generate(requests)
