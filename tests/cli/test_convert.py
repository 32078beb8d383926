"""loka convert on a user's own model: by recipe, by plan, kept and refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from loka import records
from loka.cli import app

runner = CliRunner()
MODULE = """
import torch
from torch import nn

def build(seed):
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 1)
    def forward(self, x):
        print("the model speaks")
        return self.linear(x)

def loud():
    print("the factory speaks")
    return Loud()

class Dots(nn.Module):
    def __init__(self):
        super().__init__()
        self.tall, self.wide = nn.Linear(16, 64), nn.Linear(16, 64)
    def forward(self, x, y):
        return (self.tall(x) + self.wide(y)).sum(1, keepdim=True)

def pairs(split, batch_size, seed):
    for x, target in batches(split, batch_size, seed):
        yield (x, x.flip(1)), target

def broken():
    model = build(0)
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    return model

def none():
    return iter(())

def batches(split, batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        x = torch.randn(batch_size, 16, generator=generator)
        yield x, (x[:, :1] > 0).float()
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_convert_model.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*words: object, model: str = "build", data: str = "batches") -> tuple[int, str]:
    own = ["convert", f"own_convert_model:{model}", "--data", f"own_convert_model:{data}", "--batch-size", "32"]
    result = runner.invoke(app, [*own, *map(str, words)], obj={})
    if isinstance(result.exception, ValueError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.exit_code, result.stdout


def test_a_recipe_and_what_is_kept() -> None:
    _, text = run("--recipe", "rowwise", "--keep", "2")
    assert "1 of 2 linears converted, 1 kept" in text
    assert "kept 2: excluded by module_filter_fn" in text
    assert "loss of one batch" in text


def test_what_is_written(tmp_path: Path) -> None:
    torch.manual_seed(3)
    weights = {
        "0.weight": torch.randn(32, 16),
        "0.bias": torch.zeros(32),
        "2.weight": torch.randn(1, 32),
        "2.bias": torch.zeros(1),
    }
    save_file(weights, tmp_path / "weights.safetensors")
    _, text = run("--recipe", "tensorwise", "--scales", "delayed", "--gradients", "e5m2", "--json",
                  "--weights", tmp_path / "weights.safetensors", "--out", tmp_path / "out")  # fmt: skip
    found = json.loads(text)
    assert found["low_precision_share"] == pytest.approx(1.0)
    before, after = found["notes"][-1].removeprefix("loss of one batch: ").split(" -> ")
    assert before != after
    assert "e5m2:tensor:delayed" in found["converted"]["0"]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
    assert set(saved) == set(weights)
    scales = load_file(tmp_path / "out" / "scales.safetensors")
    assert scales["0/x/history"].max() > 0
    assert json.loads((tmp_path / "out" / "conversion.json").read_text()) == found
    assert records.load(tmp_path / "out" / "conversion.json", records.Conversion).converted == found["converted"]


def test_static_scales_are_calibrated(tmp_path: Path) -> None:
    run("--recipe", "tensorwise", "--scales", "static", "--out", tmp_path / "out")
    assert load_file(tmp_path / "out" / "scales.safetensors")["0/x/static"] > 0
    run("--recipe", "tensorwise", "--out", tmp_path / "out")  # dynamic scales have no state
    assert not (tmp_path / "out" / "scales.safetensors").exists()


def test_a_plan(tmp_path: Path) -> None:
    import own_convert_model

    from loka import records
    from loka.probe import Probe

    model = own_convert_model.build(0)
    probe = Probe(model, every=1)
    model(torch.randn(64, 16)).square().sum().backward()
    probe.step()
    report = probe.evaluate(["tensorwise"], samples=2)
    plan = report.plan(max_error=1.0, max_gradient_error=1.0, min_speedup=None)
    records.save(plan, tmp_path / "plan.json")
    _, text = run("--plan", tmp_path / "plan.json")
    assert "2 of 2 linears converted" in text
    with pytest.raises(ValueError, match="--keep goes with --recipe"):
        run("--plan", tmp_path / "plan.json", "--keep", "0")
    with pytest.raises(ValueError, match="cannot be combined with a plan"):
        run("--plan", tmp_path / "plan.json", "--scales", "delayed")


def test_a_plan_with_mods_for_a_model_of_two_inputs(tmp_path: Path) -> None:
    """Mods are tried on the inputs of a batch, as `loka tune` tried them when it made the plan."""
    import own_convert_model

    from loka.placing import plan_everything

    example = (torch.randn(32, 16), torch.randn(32, 16))
    records.save(plan_everything(own_convert_model.Dots(), example, mods=["narrow_outputs"]), tmp_path / "plan.json")
    _, text = run("--plan", tmp_path / "plan.json", model="Dots", data="pairs")
    assert "mods: narrow_outputs" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "a plan or a recipe"),
        (["--recipe", "fastest"], "no recipe 'fastest'"),
        (["--recipe", "rowwise", "--scales", "delayed"], "one per tensor"),
        (["--recipe", "tensorwise", "--scales", "often"], "dynamic, delayed or static"),
        (["--recipe", "tensorwise", "--save", "fp4"], "auto, fp8 or high"),
        (["--recipe", "tensorwise", "--steps", "0"], "at least 1"),
        (["--recipe", "tensorwise", "--weights", "nowhere.safetensors"], "nowhere"),
        (["--recipe", "tensorwise", "--weights", "own_convert_model.py"], "--weights own_convert_model.py: "),
        (["--recipe", "rowwise", "--keep", "typo*"], r"--keep matches no linear: typo\*; linears are 0, 2"),
        (["--recipe", "rowwise", "--keep", "0", "--keep", "head"], "--keep matches no linear: head"),
        (["--recipe", "rowwise", "--steps", "3"], "dynamic ones need no batch"),
        (
            ["--recipe", "rowwise", "--out", "own_convert_model.py"],
            "--out own_convert_model.py: is a file, expected a folder",
        ),
        (["--recipe", "rowwise", "--backend", "cutlass"], "no backend 'cutlass'"),
    ],
)
def test_requests_that_cannot_be_honoured(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*words)


def test_batches_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match="own_convert_model:none: no batch"):
        run("--recipe", "rowwise", data="none")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="--device cuda: torch sees no CUDA GPU"):
        run("--recipe", "rowwise", "--device", "cuda")


def test_a_model_without_its_data() -> None:
    result = runner.invoke(app, ["convert", "own_convert_model:build", "--recipe", "rowwise"], obj={})
    assert isinstance(result.exception, ValueError)
    assert "hint: --data pkg.module:batches" in str(result.exception)


def test_json_is_json_whatever_the_model_prints_or_loses(tmp_path: Path) -> None:
    _, text = run("--recipe", "rowwise", "--json", model="loud")
    assert list(json.loads(text)["converted"]) == ["linear"]

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    _, text = run("--recipe", "rowwise", "--json", "--out", tmp_path / "out", model="broken")
    for document in (text, (tmp_path / "out" / "conversion.json").read_text()):
        found = json.loads(document, parse_constant=refuse)
        assert found["notes"][-1] == "loss of one batch: nan -> nan"


def test_the_kernel_and_who_refused_are_told() -> None:
    _, text = run("--recipe", "rowwise", "--json")
    found = json.loads(text)
    assert "auto (reference on cpu)" in found["converted"]["0"]
    assert "refused: torch" in found["notes"][0]
    _, text = run("--recipe", "rowwise", "--backend", "reference")
    assert "/reference" in text
    assert "note: auto" not in text
