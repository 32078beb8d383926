"""Chains on the command line: towers are found in a model, planned from measured rows, and written into the plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from dispatch.evidence import candidate, report, site
from dispatch.measured import H200, interval, origin, row
from loka.cli import app
from loka.cli.chains import find_towers
from loka.dispatch import Database
from loka.nn import BlockNorm, HardSwish
from loka.records import Plan, load, save

runner = CliRunner()
W, M = 512, 2048
LAYER = "e4m3:tensor @ e4m3:tensor blocknorm256 hard_swish -> e4m3:tensor:static"
MODEL = """
from torch import nn
from loka.nn import BlockNorm, HardSwish

def build():
    tower = nn.Sequential(nn.Linear(512, 512), BlockNorm(512), HardSwish(), nn.Linear(512, 512))
    return nn.ModuleDict({"tower": tower, "head": nn.Linear(512, 8)})
"""


def run(*words: object) -> str:
    result = runner.invoke(app, [str(word) for word in words], obj={})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def kernel(op: str, variant: str, microseconds: float, n: int = W, backend: str = "triton") -> Any:
    version = H200.versions[backend]
    return row(op=op, variant=variant, m=M, k=W, n=n, backend=backend, version=version, microseconds=interval(microseconds), speedup=None, baseline=None)  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A report, rows of another machine, and a module that makes the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chained_model.py").write_text(MODEL)
    import msgspec

    sites = [site(name, candidate(), k=W, n=W) for name in ("tower.0", "tower.3")] + [site("head", candidate(), k=W)]
    save(report(*(msgspec.structs.replace(s, m=128) for s in sites)), tmp_path / "probe.json")
    with Database.open(tmp_path / "rows.sqlite") as database:
        rows = [
            kernel("scaled_mm", "e4m3:tensor @ e4m3:tensor -> bfloat16 fast", 6.0),
            kernel("scaled_mm", "e4m3:tensor @ e4m3:tensor -> bfloat16 fast", 9.0, backend="bf16"),
            kernel("fused_linear", LAYER, 2.0),
            kernel("fused_linear", LAYER, 12.0, backend="bf16"),
            kernel("quantize", "bfloat16 -> e4m3:tensor", 3.0, n=0),
        ]
        database.add(origin(), rows)
    return tmp_path


TARGET = ("--target", "NVIDIA H200", "--db", "rows.sqlite", "--row-factor", 16)


def test_a_tower_is_planned_as_a_whole(files: Path) -> None:
    text = run("plan", "probe.json", *TARGET, "--chains", "chained_model:build", "--out", "plan.json")
    assert "chain tower.0 -> tower.1 -> tower.2 -> tower.3: 11.0 us; in bf16 21.0 us, 1.91x" in text
    assert f"tower.0 + tower.1 + tower.2: fused_linear {LAYER} on triton, e4m3:tensor -> e4m3:tensor:static" in text
    assert "loka.mods.Fuse(precision='fp8') runs towers as chains" in text
    (chain,) = load(files / "plan.json", Plan).chains
    assert [step.writes for step in chain.steps] == ["e4m3:tensor", "e4m3:tensor:static", "bf16"]
    assert "in the chain tower.0 ->" in run("explain", "plan.json", "tower.3")


@pytest.mark.parametrize("words", [("--override", "tower.3=high"), ("--recipe", "rowwise"), ("--max-error", 0.01)])
def test_what_is_forbidden_to_a_linear_is_forbidden_to_its_chain(files: Path, words: tuple[object, ...]) -> None:
    found = json.loads(run("plan", "probe.json", *TARGET, "--chains", "chained_model:build", *words, "--json"))
    (chain,) = found["chains"]
    last = chain["steps"][-1]
    assert (last["ops"], last["kernel"]) == (["tower.3"], "bf16 linear")
    why = {"--override": "an override keeps it", "--recipe": "--recipe rowwise", "--max-error": "exceeds 0.01"}
    assert any(why[str(words[0])] in refusal for refusal in chain["refusals"])


def test_a_tower_without_rows_gets_a_note(files: Path) -> None:
    found = json.loads(run("plan", "probe.json", *TARGET[:-1], 1, "--chains", "chained_model:build", "--json"))
    assert found["chains"] == []
    assert any(note.startswith("no chain at 128 rows: no measured kernels lead from bf16") for note in found["notes"])


def test_requests_that_contradict_themselves(files: Path) -> None:
    for words, why in (
        (("--chains", "chained_model:build"), "name it with --target"),
        ((*TARGET, "--set", "norm=block"), "name it with --chains"),
        ((*TARGET, "--chains", "chained_model:build", "--max-metric-change", 0.1), "was not measured"),
    ):
        with pytest.raises(ValueError, match=why):
            run("plan", "probe.json", *words)


def test_chains_end_where_something_else_stands() -> None:
    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8), nn.Tanh())  # fmt: skip
            self.c = nn.Sequential(nn.LayerNorm(8), nn.Identity(), nn.SiLU(), nn.Linear(8, 4), BlockNorm(4), HardSwish(), nn.Linear(4, 2))  # fmt: skip

        def forward(self, x: Any) -> Any:
            return self.c(self.a(x) + self.b(x))

    shapes = {"a": (8, 8), "b.0": (8, 8), "b.3": (8, 8), "c.3": (8, 4)}
    sites = {name: site(name, candidate(), k=k, n=n) for name, (k, n) in shapes.items()}  # c.6 was not probed
    found = [[(op.name, op.detail) for op in tower] for tower in find_towers(Branched(), sites)]
    assert found == [
        [("b.0", ""), ("b.1", "relu")],
        [("c.0", "layer"), ("c.2", "silu"), ("c.3", ""), ("c.4", "block"), ("c.5", "hard_swish")],
    ]


def test_a_linear_that_runs_twice_is_in_no_chain() -> None:
    shared = nn.Linear(W, W)
    model = nn.Sequential(shared, BlockNorm(W), HardSwish(), shared)
    assert list(find_towers(model, {"0": site("0", candidate(), k=W, n=W)})) == []
