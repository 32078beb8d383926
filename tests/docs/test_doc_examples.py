"""The examples in docstrings and the Python of the manual run, show what comes out, and call things with arguments they have."""

import copy
import doctest
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loka
from docs.doc_examples import Documented, blocks_of, documented, run, wrong_calls
from loka.kernels import registry
from loka.kernels.scaled_mm.call import MatmulCall
from loka.serving.times import Bucket

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = list(documented())
RANKS = "needs several ranks"
GPU = "needs a GPU"
LONG = "takes minutes"
DOWNLOADED = "needs a data set that is downloaded"
# What is not run has its calls checked all the same.
NOT_RUN = {
    "loka.demo.Demo": LONG,
    "loka.demo.DemoConfig": LONG,
    "loka.export": "needs a C++ compiler",
    "loka.exporting.Exported": "needs a C++ compiler",
    "loka.comms.Agreement": RANKS,
    "loka.comms.StepClock": RANKS,
    "loka.comms.Wire": RANKS,
    "loka.comms.all_gather": RANKS,
    "loka.comms.all_reduce": RANKS,
    "loka.comms.quantize_ddp": RANKS,
    "loka.comms.quantize_fsdp": RANKS,
    "loka.comms.reduce_scatter": RANKS,
    "loka.metrics.all_reduce": RANKS,
    "loka.data.SequenceData": DOWNLOADED,
    "loka.data.load_sequences": DOWNLOADED,
    "loka.dispatch.tune": GPU,
    "loka.measure.Contender": GPU,
    "loka.measure.time_together": GPU,
    "loka.integrations.hf_callback": "needs transformers",
    "loka.integrations.lightning_callback": "needs lightning",
    "loka.training.NextIdTask": DOWNLOADED,
    "loka.training.NextItemTask": DOWNLOADED,
    "loka.training.embed_items": DOWNLOADED,
    "loka.training.TensorBoard": "needs tensorboard",
    "loka.probe.Engine": "needs a backend of the reader's own; examples/write_a_backend.py runs one",
    "loka.probe.swap": "needs a layer of the reader's own that can be switched",
}


class Ranker(nn.Module):
    """Two tables, two linears and a prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(100, 32), nn.Embedding(100, 32)
        self.top = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.head(self.top(x))
        assert isinstance(found, torch.Tensor)
        return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What takes a moment to make: a report and a plan of the model, and the files that examples open."""
    torch.manual_seed(0)
    model, x = Ranker(), torch.randn(64, 64)
    labels = (x[:, :1] > 0).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = loka.Probe(model)
    for _ in range(6):
        F.binary_cross_entropy_with_logits(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.step()
    report = probe.evaluate()
    folder = tmp_path_factory.mktemp("examples")
    report.save(folder / "probe.json")
    plan = report.plan(recipe="rowwise", min_speedup=None)
    plan.save(folder / "plan.json")
    data = loka.data.load("synthetic", rows=256)
    vectors = torch.randn(64, 8)
    return {
        "model": model,
        "probe": probe,
        "report": report,
        "plan": plan,
        "folder": folder,
        "x": x,
        "labels": labels,
        "data": data,
        "ranker": loka.models.build_ranker(data.schema, "wukong", "tiny"),
        "index": loka.semantic_ids.fit_semantic_ids(
            vectors, loka.semantic_ids.ResidualKMeans((4, 4)), collisions="level"
        ),
    }


# What must have happened before an example; `model` is its own copy.
CONVERTED = "loka.convert(model, recipe='rowwise')"
DELAYED = "loka.convert(model, recipe='tensorwise', options=loka.LinearOptions(scales='delayed'))"
STATIC = "loka.convert(model, recipe='tensorwise', options=loka.LinearOptions(scales='static'))"
QUANTIZED = "loka.ptq.save(model, loka.quantize(model, 'rowwise'), 'model.safetensors')"
INDEX = "index.save('index.safetensors')"
TRAINED = "loka.training.Trainer(ranker, data, loka.training.TrainConfig(steps=20, batch_size=64, checkpoint_every=10, evaluate_every=20), out='runs/x').fit()"
PREPARED = {
    "loka.Guard": CONVERTED,
    "loka.lowp.GuardConfig": CONVERTED,
    "loka.refresh": CONVERTED,
    "loka.revert": CONVERTED,
    "loka.scale_state": DELAYED,
    "loka.load_scale_state": f"{DELAYED}; from safetensors.torch import save_file; save_file(loka.scale_state(model), 'scales.safetensors')",
    "loka.placing.calibrating": STATIC,
    "loka.placing.freeze_model": CONVERTED,
    "loka.lowp.chain_of": "loka.units.place(model, loka.units.discover(model, batch).units[0])",
    "loka.lowp.chains_of": "loka.units.place(model, loka.units.discover(model, batch).units[0])",
    "loka.mods.applied_to": "loka.mods.apply(model, ['no_bias'])",
    "loka.mods.revert": "loka.mods.apply(model, ['no_bias'])",
    "loka.mods.adapt_state_dict": "torch.save(model.state_dict(), 'weights.pt')",
    "loka.mods.load_state_dict": "torch.save(model.state_dict(), 'weights.pt')",
    "loka.mods.load_checkpoint": "from safetensors.torch import save_file; Path('runs/x/checkpoints/step-00000020').mkdir(parents=True); save_file(model.state_dict(), 'runs/x/checkpoints/step-00000020/model.safetensors')",
    "loka.ptq.analyze_checkpoint": QUANTIZED,
    "loka.ptq.load_quantized": QUANTIZED,
    "loka.semantic_ids.load_index": INDEX,
    **{
        f"loka.training.{name}": TRAINED
        for name in ("Snapshot", "find_checkpoints", "load_weights", "read_best", "read_checkpoint")
    },
    "loka.units.placed_tables": "loka.units.place_tables(model, loka.units.find_tables(model))",
    "loka.units.release_tables": "loka.units.place_tables(model, loka.units.find_tables(model))",
}


@pytest.fixture
def world(shared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins: what a reader who comes to an example has at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOKA_DB", str(tmp_path / "performance.sqlite"))
    for name in ("probe.json", "plan.json"):
        (tmp_path / name).write_bytes((shared["folder"] / name).read_bytes())
    x, labels = shared["x"], shared["labels"]
    results = loka.report.Results(probe=shared["report"].record)
    each = F.binary_cross_entropy_with_logits
    return {
        **{name: value for name, value in shared.items() if name not in ("folder", "labels")},
        "model": copy.deepcopy(shared["model"]),
        "another_model": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
        "batch": x,
        "batches": [x, x.flip(0)],
        "held_out": [x, x.flip(0)],
        "loader": [x],
        "loss": partial(each, reduction="none"),
        "step": lambda model, batch: each(model(batch), labels, reduction="none"),
        "train_step": lambda model, batch: each(model(batch), labels).backward(),
        "score": lambda model: (each(model(x), labels, reduction="none").flatten(), None),
        "MyModel": Ranker,
        "MyLinear": type("MyLinear", (nn.Linear,), {}),
        "before": results,
        "after": results,
    }


def for_room(example: Documented, world: dict[str, Any]) -> dict[str, Any]:
    """The stand-ins that mean something of their own in a room."""
    if example.name.startswith(("loka.tune", "loka.Tuned", "loka.tuning.Task")):
        return {"batches": [(x, (x[:, :1] > 0).float()) for x in world["batches"]]}
    if example.room in ("loka.training", "loka.models"):
        batch = next(world["data"].train.batches(64, shuffle=True, seed=0))
        return {"model": copy.deepcopy(world["ranker"]), "batch": batch}
    if example.room == "loka.kernels":
        spec = loka.Spec.parse("e4m3:row")
        return {"call": MatmulCall(64, 64, 64, spec, spec), "registry": registry}
    if example.room == "loka.serving":
        return {"Bucket": Bucket}
    if example.room == "loka.records":
        return {"conversion": loka.convert(world["model"], recipe="rowwise")}
    if example.name in ("loka.ptq.export_compressed_tensors", "loka.ptq.quantization_config"):
        return {"summary": loka.quantize(world["model"], "rowwise")}
    return {}


@pytest.mark.parametrize(
    "example", [each for each in EXAMPLES if each.run and each.name not in NOT_RUN], ids=lambda each: each.name
)
def test_it_runs_and_says_so(example: Documented, world: dict[str, Any]) -> None:
    exec(PREPARED.get(example.name, ""), {"loka": loka, "torch": torch, "Path": Path, **world})
    assert run(example, world | for_room(example, world)) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.name)
def test_its_calls_have_these_arguments(example: Documented) -> None:
    assert wrong_calls(example) == []


MANUAL = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
# Pages whose Python is run, block after block, with what their text assumes.
RUN_PAGES = {
    "README.md": "",
    "docs/index.md": "",
    "docs/mods.md": "",
    "docs/guides/quantize.md": "batches = [batch]; per_example_losses = lambda model: loss(model(batch), labels).flatten()",
    "docs/concepts/norms.md": "w = b = torch.ones(64); scale = gradient_scale = torch.tensor(0.01); dy = x; amax, gradient_amax = torch.zeros(2)",
    "docs/concepts/chains.md": "quantized = loka.formats.quantize; x = w = quantized(x, loka.Spec.parse('e4m3:tensor')); scale = torch.tensor(0.1); bias = torch.zeros(64)",
    "docs/concepts/score.md": "layer, dy, loss = nn.Linear(64, 64), x / 64, torch.tensor(0.5)",
}


@pytest.mark.parametrize("page", RUN_PAGES)
def test_the_python_of_a_page_runs(page: str, world: dict[str, Any], shared: dict[str, Any]) -> None:
    names = world | {"torch": torch, "nn": nn, "loka": loka, "labels": shared["labels"], "make_model": Ranker}
    names["batches"] = [(x, (x[:, :1] > 0).float()) for x in (world["x"], world["x"].flip(0))]
    exec(RUN_PAGES[page], names)
    for block in blocks_of(MANUAL[page]):
        if page == "docs/guides/quantize.md":  # every block quantizes a model of its own
            names["model"] = copy.deepcopy(shared["model"])
        exec(compile(block.lines[0].source, block.name, "exec"), names)


@pytest.mark.parametrize("page", MANUAL)
def test_calls_in_pages_have_these_arguments(page: str) -> None:
    assert {block.name: wrong for block in blocks_of(MANUAL[page]) if (wrong := wrong_calls(block))} == {}


def test_what_is_not_run_is_an_example() -> None:
    assert set(NOT_RUN) | set(PREPARED) <= {each.name for each in EXAMPLES}


def parsed(text: str) -> Documented:
    return Documented("loka.formats.sqnr", "loka.formats", tuple(doctest.DocTestParser().get_examples(text)))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (">>> scale_shape((4, 256), Block.parse('1x128'))\n", False),
        (">>> scale_shape((4, 256), blocks='1x128')\n", True),
        (">>> loka.formats.no_such_name(3)\n", True),
        (">>> Block.parse('1x128', 3)\n", True),
    ],
)
def test_a_call_with_other_arguments_is_seen(text: str, wrong: bool) -> None:
    assert bool(wrong_calls(parsed(text))) is wrong


@pytest.mark.parametrize(("text", "wrong"), [("448.0", False), ("440.0", True)])
def test_another_result_is_seen(text: str, wrong: bool) -> None:
    assert bool(run(parsed(f">>> FORMATS['e4m3'].max\n{text}\n"), {})) is wrong


@pytest.mark.parametrize(("text", "wrong"), [("12", False), ("['top.0']", True)])
def test_of_stand_ins_only_the_type_counts(text: str, wrong: bool) -> None:
    assert bool(run(parsed(f">>> len(model)\n{text}\n"), {"model": [1]})) is wrong
