"""Plans can be compared, explained and checked against a model."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from loka.dispatch import Policy, check, make_plan
from loka.records import LinkPlan, Plan, RecordError, SitePlan, UnitPlan
from loka.records.prose import diff, explain, spell

from .evidence import candidate, report, site

GEMMS = ("fprop", "dgrad", "wgrad")


def make(error: float = 0.05, limit: float = 0.2) -> Plan:
    evidence = report(
        site("0", *(candidate(gemm=g, error=error) for g in GEMMS), k=16, n=8),
        site("2", *(candidate(gemm=g) for g in GEMMS), k=8, n=4),
    )
    return make_plan(evidence, Policy(min_speedup=None, max_error=limit))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def test_a_plan_does_not_differ_from_itself() -> None:
    assert diff(make(), make()) == ""


def test_diff_names_each_change() -> None:
    text = diff(make(), make(error=0.5, limit=0.25))
    assert "max_error: 0.2 -> 0.25" in text
    assert "~ 0 fprop: e4m3:tensor @ e4m3:tensor on reference, fast accumulation -> high precision" in text
    assert "2 fprop" not in text


def test_diff_names_sites_that_come_and_go() -> None:
    whole = make()
    part = msgspec.structs.replace(whole, sites=whole.sites[:1])
    assert diff(whole, part) == "- 2: gone"
    assert diff(part, whole).startswith("+ 2: new, fprop e4m3:tensor")


def test_a_plan_has_verbs_of_its_own() -> None:
    one, two = make(), make(error=0.5)
    assert one.diff(two) == diff(one, two) != ""
    assert one.diff(one) == ""
    assert one.explain("0") == explain(one, "0")


def test_explain_gives_reason_and_refusals() -> None:
    text = explain(make(error=0.5), "0")
    assert "fprop: high precision" in text
    assert "error up to 0.51 exceeds 0.2" in text
    assert "accuracy only" in text
    with pytest.raises(ValueError, match="its sites are 0, 2"):
        explain(make(), "1")


def test_a_fitting_plan_has_no_problems() -> None:
    assert check(make(), model()) == []


def test_every_mismatch_is_named() -> None:
    plan = make()
    other = nn.Sequential(nn.Linear(16, 9), nn.Linear(3, 3))
    problems = check(plan, other)
    assert len(problems) == 2
    assert "0: the model has K 16, N 9, the plan K 16, N 8" in problems
    assert "2: the model has no such module" in problems
    assert check(plan, nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Identity())) == [
        "2: is a Identity, expected an nn.Linear"
    ]


def test_damaged_choices_are_named() -> None:
    plan = make()
    first = plan.sites[0]
    broken = msgspec.structs.replace(first.choices[0], backend="nobody")
    odd = msgspec.structs.replace(first.choices[1], a="e9m9:row")
    sites = [msgspec.structs.replace(first, choices=[broken, odd, first.choices[2], first.choices[2]]), plan.sites[1]]
    problems = check(msgspec.structs.replace(plan, sites=[*sites, plan.sites[1]]), model())
    text = "\n".join(problems)
    assert "2: the plan names it 2 times" in text
    assert "0 wgrad: the plan chooses 2 times" in text
    assert "no backend 'nobody'" in text
    assert "e9m9" in text


def test_a_backend_that_cannot_run_here_is_named() -> None:
    plan = make()
    first = plan.sites[0]
    choices = [msgspec.structs.replace(c, backend="torch") for c in first.choices]
    sites = [msgspec.structs.replace(first, choices=choices), plan.sites[1]]
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: the backend may run")
    problems = check(msgspec.structs.replace(plan, sites=sites), model())
    assert len(problems) == 3
    assert all("torch cannot run" in problem for problem in problems)


def test_spelling() -> None:
    choices = make(error=0.5).sites[0].choices
    assert spell(choices[0]) == "high precision"


def test_a_plan_for_another_device_does_not_fit() -> None:
    plan = make()
    elsewhere = msgspec.structs.replace(plan, target="NVIDIA H200", min_speedup=1.05)
    assert "the plan is for NVIDIA H200, the model is on cpu" in check(elsewhere, model())
    kept = make(error=0.5)
    kept = msgspec.structs.replace(kept, target="NVIDIA H200", sites=[_high(site) for site in kept.sites])
    assert check(kept, model()) == []  # converts nothing: it fits anywhere


def _high(site: SitePlan) -> SitePlan:
    choices = [msgspec.structs.replace(c, a=None, b=None, backend="high") for c in site.choices]
    return msgspec.structs.replace(site, choices=choices)


def test_explain_says_where_a_speed_comes_from() -> None:
    timed = make_plan(report(site("0", candidate(speedup=1.5))), Policy(min_speedup=1.05))
    assert "expected error 0.05; 1.50x over bf16: Probe on test device" in explain(timed, "0")
    assert "expected error 0.05; speed not measured" in explain(make(), "2")


def test_chains_are_explained_and_compared() -> None:
    links = [LinkPlan(linear="0", k=16, n=8, activation="relu", passed=["1"]), LinkPlan(linear="2", k=8, n=4)]
    unit = UnitPlan(name="0", links=links, reason="it is faster", refusals=["e5m2 gradients: error 0.2"])
    alone = msgspec.structs.replace(make(), sites=[_high(site) for site in make().sites])
    plan = msgspec.structs.replace(alone, units=[unit])
    text = explain(plan, "2")
    assert "in the unit 0: chain 0 relu -> 2, delayed scales, delayed gradients" in text
    assert "because it is faster" in text
    assert "refused e5m2 gradients: error 0.2" in text
    first, second, third = diff(make(), plan).split("\n")
    assert first.startswith("~ 0: fprop e4m3:tensor @ e4m3:tensor on reference")
    assert first.endswith("-> in the unit 0")
    assert second.endswith("-> in the unit 0")
    assert third == "~ unit 0: absent => chain 0 relu -> 2, delayed scales, delayed gradients"
    assert "unit" not in explain(make(), "0")
    assert plan.unit_of("2") is unit
    with pytest.raises(ValueError, match="0 is in two units"):
        msgspec.structs.replace(plan, units=[unit, unit])


def test_a_linear_of_a_chain_has_no_choice_of_its_own(tmp_path: Path) -> None:
    unit = UnitPlan(name="0", links=[LinkPlan(linear="0", k=16, n=8)])
    with pytest.raises(ValueError, match=r"0 is decided twice: it is in the unit 0.*fprop, dgrad, wgrad.*hint"):
        msgspec.structs.replace(make(), units=[unit])
    kept = msgspec.structs.replace(make(), sites=[_high(make().sites[0]), make().sites[1]], units=[unit])
    path = kept.save(tmp_path / "plan.json")
    assert Plan.load(path) == kept
    edited = json.loads(path.read_text())
    edited["sites"][0]["choices"][2] |= {"a": "e4m3:tensor", "b": "e4m3:tensor", "backend": "reference"}
    del edited["seal"]
    path.write_text(json.dumps(edited))
    with pytest.raises(RecordError, match=r"0 is decided twice.*choice for its wgrad"):
        Plan.load(path)


def test_diff_names_settings() -> None:
    other = msgspec.structs.replace(make(), target="NVIDIA H200", weights="cached", max_metric_change=0.001)
    assert diff(make(), other).split("\n") == [
        "target: None -> 'NVIDIA H200'",
        "weights: None -> 'cached'",
        "max_metric_change: None -> 0.001",
    ]
