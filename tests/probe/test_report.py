"""A report can be read, compared, saved and turned into a plan."""

import math

import pytest
from msgspec.structs import replace

from loka.probe import Probe, Report
from loka.records import Interval

from .small import Small, batches, train


@pytest.fixture(scope="module")
def report() -> Report:
    model = Small()
    probe = Probe(model, every=1, rows=32)
    train(model, batches(4), probe)
    return probe.evaluate(["tensorwise", "rowwise"], samples=3, data_name="made up")


def test_ratios_are_those_of_the_errors(report: Report) -> None:
    ratios = report.compare_sources()
    assert set(ratios) == {"rows", "copula", "gaussian"}
    values = []
    for site in report.record.sites:
        for candidate in site.candidates:
            errors = {e.source: e.mere.value for e in candidate.errors}
            if candidate.gemm == "fprop" and errors:
                values.append(errors["copula"] / errors["normal"])
    assert ratios["copula"].count == len(values)
    assert ratios["copula"].largest == max(values)
    assert ratios["copula"].mean == pytest.approx(math.prod(values) ** (1 / len(values)))
    assert (
        report.compare_sources("dgrad", "rowwise")["rows"].count == 2
    )  # `first` needs no dgrad, `idle` was not called


def test_the_summary_counts(report: Report) -> None:
    lines = report.summary()
    assert lines[0].startswith("Small on made up: 4 sites, 4 steps")
    assert lines[1].startswith("fprop: ")
    assert "1 not measured" in lines[1]
    assert sum("geometric mean" in line for line in lines) == 3
    change = Interval(value=0.001, low=0.0, high=0.002)
    more = Report(replace(report.record, combined_change=change, combined_sites=["first"], sensitivity="log loss"))
    assert more.summary()[-1] == "all 1 safe sites together: +0.1000% [+0.0000%, +0.2000%] of log loss"


def test_it_becomes_a_plan_that_keeps_to_the_limits(report: Report) -> None:
    chosen = report.plan(min_speedup=None)
    assert {site.site for site in chosen.sites} == {site.name for site in report.record.sites}
    strict = report.plan(min_speedup=None, max_error=1e-6, max_gradient_error=1e-9)
    assert not any(choice.quantized for site in strict.sites for choice in site.choices if choice.gemm == "fprop")
    assert not any(choice.quantized for site in report.plan(min_speedup=1.05).sites for choice in site.choices)


def test_every_gemm_has_a_line_in_the_table_and_below_it_the_reason(report: Report) -> None:
    lines = report.table().splitlines()
    reasons = [verdict.reason for site in report.record.sites for verdict in site.verdicts]
    text = " ".join(" ".join(lines).split())
    assert all(" ".join(reason.split()) in text for reason in reasons)
    assert max(map(len, lines)) <= 120  # a terminal would break longer ones anywhere


def test_a_plan_takes_what_the_policy_takes(report: Report) -> None:
    assert report.plan(recipe="rowwise").recipe == "rowwise"
    with pytest.raises(ValueError, match="set max_metric_change"):
        report.plan(verify=lambda plan: Interval(0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="weights="):
        report.plan(weights="never")  # type: ignore[arg-type]


def test_a_plan_asks_for_a_measured_speed_unless_told_otherwise(report: Report) -> None:
    """Converting what was never shown to be faster is a choice that somebody must make."""
    assert not any(choice.quantized for site in report.plan().sites for choice in site.choices)
