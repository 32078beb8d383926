"""Every example of every `--help` runs as written, in one folder, in the order a person would; what is not run says why."""

import json
import os
import shlex
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from loka import cli

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch
from torch import nn

def build(seed=0):
    model = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
    model.add_module("head", nn.Linear(32, 1))
    return model

def batches(batch_size=64, seed=0):
    torch.manual_seed(seed)
    for _ in range(6):
        x = torch.randn(batch_size, 13)
        yield x, (x[:, :1] > 0).float()

def mean_squared(output, targets):
    return (output - targets).square().mean(1)
"""
# In this order; the exit codes are what the verbs promise (1 is a finding: the plans differ, there are suggestions).
RUN: dict[str, int] = {
    "loka doctor": 0,
    "loka tune wukong:tiny --out runs/tuned --train-steps 40 --seconds 60": 0,
    "loka doctor --json": 0,
    "loka data list": 0,
    "loka train --model wukong --config tiny --data complete-journey --steps 20 --precision bf16 --out runs/x": 0,
    "loka train --from runs/x/checkpoints/step-00000020 --mods no_bias,block_norm,hard_swish --steps 10": 0,
    "loka probe --model wukong:tiny --steps 60 --samples 10 --out probe.json": 0,
    "loka probe --model mine.model:build --data mine.data:batches --loss mine.loss:mean_squared --steps 50 --samples 10 --out mine.json": 0,
    "loka mods list": 0,
    "loka mods apply --model wukong:tiny --data synthetic --mods no_bias,block_norm,hard_swish": 0,
    "loka mods apply --model mypkg.net:make --data mypkg.net:batches --mods align_shapes --json": 0,
    "loka mods suggest probe.json": 1,
    "loka plan probe.json --accuracy-only --out plan.json": 0,
    'loka plan probe.json --target "NVIDIA H200" --row-factor 16': 0,
    "loka plan probe.json --accuracy-only --max-metric-change 0.001": 0,
    "loka plan probe.json --accuracy-only --no-chains --out single.json": 0,
    "loka explain plan.json core.head.last": 0,
    "loka diff plan.json other.json": 1,
    "loka translate plan.json torchao": 0,
    "loka convert wukong:tiny --recipe rowwise": 0,
    "loka convert wukong:tiny --plan plan.json --weights runs/x/checkpoints/step-00000020 --out converted": 0,
    "loka convert mymodel:build --data mymodel:batches --recipe tensorwise --scales delayed --keep 'head*'": 0,
    "loka simulate --forward 4 --backward 8 --dense 60e6 --embeddings 13.6e6 --machine h200-ndr --gpus 8,64,512,1024": 0,
    "loka db show --shipped --json": 0,
    "loka db merge rows.json benchmarks/results/h200/scaled_mm.json": 0,
    "loka db show --op linear --backend triton": 0,
    'loka db export --device "NVIDIA H200" --out rows.json': 0,
    "loka db prune --before 2026-01-01": 0,
    "loka analyze onerec:tiny wukong:small": 0,
    "loka ab base.jsonl candidate.jsonl --margin 0.005": 0,
    "loka report runs/demo/records --out report.html": 0,
    "loka report runs/demo/records --add benchmarks/results/h200/scaled_mm.json": 0,
    "loka report runs/a/records runs/b/records --out compare.html": 0,
}
LONG = "takes minutes; tests of the verb run it small"
NETWORK = "downloads"
ONEREC = "needs runs/onerec, whose training takes minutes; tests of the verb run it small"
NOT_RUN = {
    "loka ab --online runs/ab --margin 0.01": "needs live traffic",
    "loka load http://127.0.0.1:8000 --model onerec --rate 100 --seconds 20 --sla 50ms": "needs a server",
    "loka load http://127.0.0.1:8000 --model onerec --rate 200 --seconds 20 --arrivals uniform --out load.json --report load.html": "needs a server",
    "loka load http://127.0.0.1:8000 --model ranker --rate 50 --seconds 10 --rows 512": "needs a server",
    "loka load http://127.0.0.1:8000 --model ranker --rate 6000 --seconds 10 --processes 4": "needs a server",
    "loka serve --check http://127.0.0.1:8000": "needs a server",
    "loka serve runs/a runs/b --shadow --events runs/shadow": "serves until it is stopped",
    "loka serve runs/a runs/b --split 95,5 --salt autumn --events runs/ab": "serves until it is stopped",
    "loka serve runs/ranker --sla 20ms --fronts 6": "serves until it is stopped",
    "loka serve runs/ranker --sla 20ms --rows 256,1024": "serves until it is stopped",
    "loka tune dlrm:small --serve --checkpoint runs/dlrm/model.safetensors --out runs/served": "needs a checkpoint",
    'loka tune wukong:tiny --target "NVIDIA H200" --row-factor 16 --train-steps 40 --out runs/planned': "as without --target, which is run",
    "loka tune mine.model:build --data mine.data:batches --loss mine.loss:mean_squared --out runs/mine": LONG,
    "loka export wukong:tiny --recipe rowwise --out ranker.pt2": "compiles for minutes; tests of exporting run it small",
    "loka export wukong:tiny --plan plan.json --weights runs/x/checkpoints/step-00000020 --out planned.pt2": "compiles for minutes",
    "loka export runs/ranker --out ranker.onnx": "needs onnx",
    "loka export mine.model:build --data mine.data:batches --recipe rowwise --format onnx --out mine.onnx": "needs onnx",
    "loka demo": LONG,
    "loka demo --out runs/mine --steps 800 --seed 3": LONG,
    "loka data get ml-1m": NETWORK,
    "loka data get criteo --source ~/criteo": "needs files of Criteo",
    "loka data get complete-journey --kind ranking --set size=full": "as a test below, without building it",
    "loka data info ml-1m --verify": "needs the download",
    "loka probe --model wukong:tiny --steps 60 --samples 10 --out probe.json --resume": "as without --resume, which is run; tests of the verb resume one that was cut",
    "loka probe --model hstu:small --data ml-1m --steps 300 --metric recall@10 --out hstu.json": NETWORK,
    'loka plan probe.json --target "NVIDIA H200" --db rows.sqlite --weights cached --override \'core.head.*=high\'': "needs a database",
    "loka db tune probe.json --seconds 120": "needs a GPU",
    "loka quantize pkg.module:factory --weights model.safetensors --recipe rowwise --out q.safetensors": "needs a checkpoint",
    "loka quantize wukong:tiny --recipe rowwise --out q.safetensors --data complete-journey --bound 0.001": LONG,
    "loka analyze runs/onerec pkg.module:factory --out analysis.json": ONEREC,
    "loka bench kernels": "needs a GPU",
    "loka bench kernels --shapes 2048x1024x1024,512x479x64 --backends torch,triton": "needs a GPU",
    "loka bench kernels --op quantize --out benchmarks/results/h200/quantize.json": "needs a GPU",
    "loka bench kernels --op fused_linear": "needs a GPU",
    "loka bench kernels --op attention --shapes 256x8x320": "needs a GPU",
    "loka bench kernels --device cpu --no-isolate": LONG,
}  # fmt: skip


def test_every_example_is_run_or_says_why_not() -> None:
    shown = {command for verb in cli.VERBS for command, _ in cli.examples_of(verb)}
    onerec = {command for command in shown if "runs/onerec" in command}
    assert shown - onerec == (RUN.keys() | NOT_RUN.keys()) - onerec, "an example was added or changed: run it here"
    silent = [verb for verb in cli.VERBS if not cli.examples_of(verb)]
    assert silent == []


def test_options_of_a_data_set_are_given_as_the_example_says(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}
    monkeypatch.setattr(
        "loka.data.loader._open_or_build", lambda build, *_: given.update(build.options) or (build, None)
    )
    monkeypatch.setattr("loka.data.loader.open_ranking", lambda *_: (_ for _ in ()).throw(EndOfTestError))
    (command,) = (words for words, _ in cli.examples_of("data") if "--set" in words)
    assert isinstance(run(command).exception, EndOfTestError)
    assert given["size"] == "full"


class EndOfTestError(Exception):
    """The example has come as far as building."""


def prepare(folder: Path) -> None:
    """What the examples name: a package of one's own, results of an A/B, the repository's benchmark records."""
    for path in ("mine/model.py", "mine/data.py", "mine/loss.py", "mypkg/net.py", "mymodel.py"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(MODEL.replace("def build", "def make") if "mypkg" in path else MODEL)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    for name, shift in (("base", 0.0), ("candidate", 0.0001)):
        lines = [json.dumps({"user": u, "recall@10": 0.1 + 0.01 * (u % 7) + shift}) for u in range(300)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def arrange(folder: Path, command: str) -> None:
    """Files that another example of the same help would have left."""
    records = folder / "runs" / "demo" / "records"
    if (folder / "probe.json").exists() and not records.exists():
        records.mkdir(parents=True)
        (records / "probe.json").write_bytes((folder / "probe.json").read_bytes())
    if command.startswith("loka diff"):
        run("loka plan probe.json --recipe rowwise --accuracy-only --out other.json")
    if command.startswith("loka db merge"):
        source = ROOT / "src" / "loka" / "dispatch" / "measured" / "h200-linear.json"
        (folder / "rows.json").write_bytes(source.read_bytes())
    if command.startswith("loka report runs/a"):
        for name, plan in (("a", "plan.json"), ("b", "other.json")):
            place = folder / "runs" / name / "records"
            place.mkdir(parents=True)
            for file in ("probe.json", plan):
                (place / file).write_bytes((folder / file).read_bytes())


def run(command: str) -> Result:
    return CliRunner().invoke(cli.app, shlex.split(command)[1:], obj={})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_examples_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LOKA_DB", str(tmp_path / "performance.sqlite"))
    assert os.environ["LOKA_DB"]
    prepare(tmp_path)
    wrong = {}
    for command, code in RUN.items():
        arrange(tmp_path, command)
        start = time.monotonic()
        result = run(command)
        print(f"{time.monotonic() - start:6.1f} s  {command}")  # pytest shows it when the test fails, and with -s
        if result.exit_code != code:
            wrong[command] = (result.exit_code, repr(result.exception), result.output[-500:])
    assert wrong == {}
