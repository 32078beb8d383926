"""The page says what a linear may cost, which chain it is in, what is hazardous, what stays and what nobody looked at."""

from pathlib import Path

import msgspec
import pytest
import torch
from tests.probe.test_chain_sites import LINKS, batches, low, train
from torch import nn

from loka.probe import Probe, Report
from loka.records import Alarm, Unseen
from loka.report.findings import write_findings


@pytest.fixture(scope="module")
def report() -> Report:
    model = low()
    probe = Probe(model, every=1)
    train(model, batches(3), probe)
    return probe.evaluate(samples=2, recipes=("rowwise",), sources=("rows",), judged_on=("rows",))


def test_costs_name_the_chain(report: Report, tmp_path: Path) -> None:
    text = write_findings(report.record)
    for site in LINKS:
        assert f'data-site="{site}"' in text
    assert text.count("<td>chain</td>") == 3
    assert text.count("<td>rowwise</td>") == 1
    assert "What to know" not in text
    report.to_html(tmp_path / "page.html")
    assert "What each linear may cost" in (tmp_path / "page.html").read_text()


def test_what_was_left_out_is_said_and_escaped(report: Report) -> None:
    sites = list(report.record.sites)
    alarm = Alarm(column=3, mean=2000.0, spread=1.0, text="column 3 is a <year>", help="subtract its mean")
    sites[0] = msgspec.structs.replace(sites[0], alarms=[alarm], kept="its weight is parametrised")
    unseen = [Unseen(name="gru", type="GRU", reason="a recurrent layer", flops=1.0)]
    record = msgspec.structs.replace(report.record, sites=sites, unseen=unseen, no_chains="no example", notes=["odd"])
    text = write_findings(record)
    for said in ("column 3 is a &lt;year&gt;; what helps: subtract its mean", "its weight is parametrised", "gru", "a recurrent layer", "no example", "odd"):  # fmt: skip
        assert said in text


def test_nothing_scored_is_nothing_said() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    probe = Probe(model, every=1)
    with torch.no_grad():
        model(torch.randn(4, 8))
    probe.step()
    record = probe.evaluate(samples=2, recipes=("rowwise",), sources=("rows",), judged_on=("rows",)).record
    assert write_findings(record) == ""
