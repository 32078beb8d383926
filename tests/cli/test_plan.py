"""Plans on the command line: made, explained, compared."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import loka
from loka import records
from loka.cli import app
from loka.cli.plan import parse_overrides
from loka.probe import Probe

runner = CliRunner()


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    watching = Probe(model, every=1)
    model(torch.randn(64, 32)).square().sum().backward()
    watching.step()
    path = tmp_path_factory.mktemp("plan") / "probe.json"
    watching.evaluate(["tensorwise", "rowwise"], samples=2).save(path)
    return path


def run(*words: object) -> tuple[int, str]:
    result = runner.invoke(app, [str(word) for word in words], obj={})
    if isinstance(result.exception, ValueError):
        raise result.exception
    return result.exit_code, result.stdout


def test_accuracy_only_converts_and_says_so(probe: Path, tmp_path: Path) -> None:
    code, text = run("plan", probe, "--accuracy-only", "--out", tmp_path / "plan.json")
    assert code == 0
    assert "fprop e4m3:row @ e4m3:row on reference" in text
    assert "accuracy only" in text
    assert json.loads((tmp_path / "plan.json").read_text())["kind"] == "plan"


def test_without_measured_speed_nothing_is_converted(probe: Path) -> None:
    code, text = run("plan", probe)
    assert code == 0
    assert "0.0% of the probed GEMM FLOPs" in text
    assert "nothing is converted" in text


def test_a_mistyped_site_is_answered_with_the_nearest_one(probe: Path, tmp_path: Path) -> None:
    run("plan", probe, "--accuracy-only", "--out", tmp_path / "plan.json")
    plan = records.load(tmp_path / "plan.json", records.Plan)
    with pytest.raises(ValueError, match=r"no site '9'; its sites are 0, 2"):
        plan.explain("9")
    sites = [msgspec.structs.replace(plan.sites[0], site=name) for name in ("tower.first", "tower.last", "head")]
    with pytest.raises(ValueError, match=r"no site 'tower\.lst'; did you mean tower\.last"):
        msgspec.structs.replace(plan, sites=sites, seal=None).explain("tower.lst")


def test_explain_and_diff(probe: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    run("plan", probe, "--accuracy-only", "--out", one)
    run("plan", probe, "--accuracy-only", "--override", "2=high", "--out", two)
    code, text = run("explain", two, "2")
    assert code == 0
    assert "override '2': high" in text
    code, text = run("explain", two)
    assert code == 0
    assert "2  fprop high precision" in text
    assert json.loads(run("explain", two, "--json")[1])["kind"] == "plan"
    assert run("diff", one, one) == (0, "")
    code, text = run("diff", one, two)
    assert code == 1
    assert "~ 2 fprop: e4m3:row @ e4m3:row on reference, fast accumulation -> high precision" in text


def test_a_linear_in_a_unit_is_explained_by_the_unit(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plan = loka.placing.plan_everything(model, torch.randn(8, 64)).save(tmp_path / "plan.json")
    for name in ("0", "2"):
        assert json.loads(run("explain", plan, name, "--json")[1])["name"] == "0"


def test_requests_that_cannot_be_honoured(probe: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected WILDCARD=RECIPE"):
        run("plan", probe, "--override", "head")
    with pytest.raises(ValueError, match="cannot be read"):
        run("explain", tmp_path / "none.json", "0")
    assert parse_overrides(["a=b=high"]) == {"a=b": "high"}


def test_a_speed_up_for_accuracy_only_is_a_contradiction(probe: Path) -> None:
    with pytest.raises(ValueError, match="--accuracy-only ignores speed, --min-speedup 2 asks for it"):
        run("plan", probe, "--accuracy-only", "--min-speedup", 2)
    default = json.loads(run("plan", probe, "--json")[1])
    assert default["min_speedup"] == 1.05
    assert json.loads(run("plan", probe, "--min-speedup", 2, "--json")[1])["min_speedup"] == 2


def test_the_margin_is_that_of_the_report(probe: Path, tmp_path: Path) -> None:
    wide = msgspec.structs.replace(records.load(probe, records.ProbeReport), margin=0.05)
    records.save(wide, tmp_path / "wide.json")
    run("plan", tmp_path / "wide.json", "--accuracy-only", "--out", tmp_path / "plan.json")
    assert records.Plan.load(tmp_path / "plan.json").margin == 0.05
