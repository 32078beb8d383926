"""A plan from a report puts linears into chains where each is within its share of the margin, and says why the others are not."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from tests.probe.test_chain_sites import LINKS, WIDTH, Tower, batches, low, train
from torch import nn
from typer.testing import CliRunner

from loka.cli import app
from loka.dispatch import Policy, export, make_plan
from loka.dispatch.export import FORMATS
from loka.lowp import chains_of
from loka.placing import convert, revert
from loka.probe import Probe, Report
from loka.records import Candidate, Interval
from loka.units import describe_chain

CHEAP = {"samples": 2, "recipes": ("tensorwise", "rowwise"), "sources": ("rows",), "judged_on": ("rows",)}


@pytest.fixture(scope="module")
def report() -> Report:
    model = Tower()
    probe = Probe(model, every=1)
    train(model, batches(5), probe)
    return probe.evaluate(**CHEAP)


def harmed(report: Report, site: str, value: float, *, gemm: str | None = None, recipe: str = "delayed") -> Report:
    """The report with another predicted harm at one site."""

    def change(c: Candidate) -> Candidate:
        if c.recipe == recipe and gemm in (None, c.gemm):
            return msgspec.structs.replace(c, harm=Interval(value=value, low=value, high=value))
        return c

    sites = [
        msgspec.structs.replace(s, candidates=[change(c) for c in s.candidates]) if s.name == site else s
        for s in report.record.sites
    ]
    return Report(msgspec.structs.replace(report.record, sites=sites))


def cheap(report: Report) -> Report:
    for site in LINKS:
        report = harmed(report, site, 1e-9)
    return report


def linears(plan: object) -> list[list[str]]:
    return [unit.linears for unit in plan.units]


def test_probe_finds_chains_on_a_batch_it_saw(report: Report) -> None:
    (unit,) = report.record.chains
    assert unit.linears == list(LINKS)
    assert "prediction layer" in report.record.alone["last"]
    assert report.record.no_chains is None
    first, second, _ = (unit.magnitudes[name] for name in LINKS)
    assert first.output == second.input > 0
    assert first.gradient > 0


def test_a_plan_for_accuracy_places_chains_and_convert_runs_them(report: Report) -> None:
    plan = cheap(report).plan(min_speedup=None)
    assert linears(plan) == [list(LINKS)]
    assert all(c.reason == "in the chain tower.0" for s in plan.sites if s.site in LINKS for c in s.choices)
    assert plan.units[0].evidence.harm.value < 1e-8
    model = Tower()
    done = convert(model, plan, backend="reference")
    assert [unit.linears for unit in done.units] == [list(LINKS)]
    ((_, chain),) = chains_of(model)
    assert chain.primed  # from the magnitudes that Probe saw
    before = [p.detach().clone() for p in model.parameters()]
    after = train(model, batches(2))
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert revert(model) == 3 + sum(any(c.quantized for c in s.choices) for s in plan.sites)


def test_the_plan_is_the_one_that_describes_what_runs(report: Report) -> None:
    plan = cheap(report).plan(min_speedup=None)
    model = Tower()
    convert(model, plan, backend="reference")
    ((_, chain),) = chains_of(model)
    described = describe_chain(model, chain)
    assert described.links == plan.units[0].links
    assert (described.scales, described.gradient) == (plan.units[0].scales, plan.units[0].gradient)


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_linear_that_costs_too_much_leaves_its_chain(report: Report, gemm: str) -> None:
    plan = harmed(cheap(report), "tower.6", 1e-3, gemm=gemm).plan(min_speedup=None)
    assert linears(plan) == [["tower.0", "tower.3"]]
    site = next(s for s in plan.sites if s.site == "tower.6")
    assert any("in a chain: " in text and "share of the margin" in text for text in site.choices[0].refusals)


def test_what_is_left_of_a_chain_that_splits_may_be_single(report: Report) -> None:
    assert linears(harmed(cheap(report), "tower.3", 1e-3).plan(min_speedup=None)) == []


def test_overrides_and_measured_changes_speak_against(report: Report) -> None:
    record = cheap(report).record
    assert linears(cheap(report).plan(min_speedup=None, overrides={"tower.6": "high"})) == [["tower.0", "tower.3"]]
    assert linears(cheap(report).plan(min_speedup=None, overrides={"*": "auto"})) == [list(LINKS)]
    change = Interval(value=1e-2, low=0.0, high=1e-2)
    sites = [msgspec.structs.replace(s, metric_change=change) if s.name == "tower.6" else s for s in record.sites]
    moved = make_plan(msgspec.structs.replace(record, sites=sites), Policy(min_speedup=None))
    assert linears(moved) == [["tower.0", "tower.3"]]


def test_requests_that_cannot_be_honoured_are_refused_and_others_noted(report: Report) -> None:
    good = cheap(report)
    assert linears(good.plan(min_speedup=None, chains=False)) == []
    timed = good.plan()
    assert linears(timed) == []
    assert any("a report has no time of a chain" in note for note in timed.notes)
    assert linears(good.plan(chains=True)) == [list(LINKS)]
    with pytest.raises(ValueError, match="tensorwise was asked for at every linear"):
        good.plan(min_speedup=None, recipe="tensorwise", chains=True)
    dear = good
    for site in LINKS:
        dear = harmed(dear, site, 1.0)
    with pytest.raises(ValueError, match=r"every linear of every chain is refused: tower.0: delayed"):
        dear.plan(min_speedup=None, chains=True)


@pytest.mark.parametrize("tool", FORMATS)
def test_other_tools_are_told_of_no_chain(report: Report, tool: str) -> None:
    with pytest.raises(ValueError, match=r"runs tower.0, tower.3, tower.6 in FP8 chains.*chains=False"):
        export(cheap(report).plan(min_speedup=None), tool)
    assert export(cheap(report).plan(min_speedup=None, chains=False), tool)


def test_on_the_command_line_a_plan_may_be_asked_for_without_chains(report: Report, tmp_path: Path) -> None:
    cheap(report).save(tmp_path / "probe.json")
    words = ["plan", str(tmp_path / "probe.json"), "--accuracy-only", "--json"]
    for more, chains in (([], 1), (["--no-chains"], 0)):
        done = CliRunner().invoke(app, [*words, *more], obj={})
        assert done.exit_code == 0, done.exception
        assert len(json.loads(done.stdout).get("units", [])) == chains


def test_a_report_without_an_example_places_linears_and_says_so() -> None:
    model = Tower()
    probe = Probe(model, every=1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for x, y in batches(3):  # the model itself is never called, only its parts
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model.last(model.tower(x)), y).backward()
        optimizer.step()
        probe.step()
    report = probe.evaluate(**CHEAP)
    assert "finding chains takes an example" in report.record.no_chains
    plan = report.plan(min_speedup=None)
    assert not plan.units
    assert any("no chains: finding chains takes an example" in note for note in plan.notes)
    given = probe.evaluate(example=torch.randn(4, WIDTH), **CHEAP)
    assert [unit.linears for unit in given.record.chains] == [list(LINKS)]


def test_a_report_of_chains_that_run_plans_by_what_was_measured_in_them() -> None:
    model = low()
    probe = Probe(model, every=1)
    train(model, batches(5, heavy=True), probe)
    report = probe.evaluate(**CHEAP)
    assert [unit.linears for unit in report.record.chains] == [list(LINKS)]
    assert linears(report.plan(min_speedup=None)) == []  # rows of exp(8z) do not fit one scale
    good = report
    for site in LINKS:
        good = harmed(good, site, 1e-9, recipe="chain")
    assert linears(good.plan(min_speedup=None)) == [list(LINKS)]
