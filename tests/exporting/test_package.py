"""A frozen model as a file: equal to the model, loaded where this library cannot be imported, refused by name where it cannot be written."""

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import loka
from foreign_zoo import ZOO
from loka.exporting import agreement, ops, package
from loka.exporting.signature import name_results, take_apart
from loka.kernels import registry
from loka.nn import GroupedLinear
from loka.placing import calibrating, plan_everything

CHILD = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "loka" or name.startswith("loka."):
            raise ImportError("this process has no loka")
sys.meta_path.insert(0, Refuse())
import torch
runner = torch._inductor.aoti_load_package(sys.argv[1])
tensors = torch.load(sys.argv[2])
torch.save(runner(*tensors), sys.argv[3])
assert "loka" not in sys.modules
"""


def frozen(name: str = "tower") -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    build, inputs = ZOO[name]
    model, x = build(), inputs(16)
    loka.convert(model, plan_everything(model, x, serving=True), freeze=True)
    return model, x


def small(recipe: str = "rowwise", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 96), nn.ReLU(), nn.Linear(96, 200), nn.ReLU(), nn.Linear(200, 3)).eval()
    loka.convert(model, recipe=recipe, freeze=True, **options)
    return model


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traced graph runs in the compiler's place, which takes many seconds and is tried once below."""

    def write(program: Any, path: Path, inputs: Any, outputs: Any, shapes: Any, device: Any) -> Any:
        path.write_bytes(b"not compiled")
        return lambda tensors: list(program.module()(*tensors))

    monkeypatch.setattr(package, "_write_aoti", write)


@pytest.mark.slow  # a C++ compiler runs
def test_a_package_runs_where_loka_cannot_be_imported(tmp_path: Path) -> None:
    model, x = frozen("auxiliary")
    made = loka.export(model, x, tmp_path / "ranker.pt2")
    assert made.difference < 1e-3
    assert made.rows == [16, 19]
    assert list(made.inputs.values()) == ["float32[rows, 64]"]
    other = tuple(torch.cat([t, t[:5]]) for t in x)  # a size that nobody traced
    torch.save(other, tmp_path / "in.pt")
    words = [sys.executable, "-c", CHILD, *(str(tmp_path / name) for name in ("ranker.pt2", "in.pt", "out.pt"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = model(*other)
    got = torch.load(tmp_path / "out.pt")
    assert torch.allclose(got[0] if isinstance(got, (list, tuple)) else got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ZOO)
def test_every_chain_is_written_out(name: str, tmp_path: Path, traced_only: None) -> None:
    model, x = frozen(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(*x)
    made = loka.export(model, x, tmp_path / "m.pt2")
    assert made.low_precision
    assert made.difference < 1e-5
    with torch.no_grad():
        assert torch.equal(model(*x), before), "the model itself is not changed"
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("between", [[], [nn.ReLU()]], ids=["nothing", "relu"])
def test_what_a_chain_hands_on_is_rounded_once(between: list[nn.Module], tmp_path: Path, traced_only: None) -> None:
    """To FP8, from float32: rounded to bf16 before that, one number in thirty becomes its neighbour."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), *between, nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).bfloat16()  # fmt: skip
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    plan = plan_everything(model, x, serving=True)
    assert len(plan.units[0].links) == 3
    loka.convert(model, plan, freeze=True)
    assert loka.export(model, x, tmp_path / "m.pt2").difference == 0.0


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_linears_of_every_recipe_ragged_widths_included(recipe: str, tmp_path: Path, traced_only: None) -> None:
    model = small(recipe)
    made = loka.export(model, torch.randn(8, 40), tmp_path / "m.pt2")
    assert len(made.low_precision) == 3
    assert made.difference < 1e-5


def test_static_scales_and_quantised_models(tmp_path: Path, traced_only: None) -> None:
    model = small("tensorwise", options=loka.LinearOptions(scales="static"))
    with pytest.raises(ValueError, match="static scale is not known yet"):
        package.write_out(model, ops.AtenOps(torch.device("cpu")), torch.float32)
    with calibrating(model), torch.no_grad():
        model(torch.randn(64, 40))
    assert loka.export(model, torch.randn(8, 40), tmp_path / "m.pt2").difference < 1e-5
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).eval()
    loka.quantize(other, recipe="rowwise")
    assert loka.export(other, torch.randn(8, 32), tmp_path / "q.pt2").difference < 1e-5


def test_a_chain_with_dropout_is_served_without(tmp_path: Path, traced_only: None) -> None:
    """As a module, and as a function: both have no effect in what is served."""

    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.last = *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 1)
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.drop(torch.relu(self.a(x)))
            return self.last(self.c(nn.functional.dropout(torch.relu(self.b(x)), 0.5, self.training)))

    torch.manual_seed(0)
    model, x = Dropping().eval(), torch.randn(16, 64)
    loka.convert(model, plan_everything(model, x, serving=True), freeze=True)
    made = loka.export(model, x, tmp_path / "m.pt2")
    assert made.difference < 1e-5
    assert "a" in made.low_precision


def test_inputs_are_named_and_labels_are_none(tmp_path: Path, traced_only: None) -> None:
    from loka.data import Batch

    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(11, 8), nn.Linear(8 + 4, 1)

        def forward(self, batch: Batch) -> dict[str, Tensor]:
            return {"logit": self.head(torch.cat([batch.dense, self.table(batch.categorical).sum(1)], 1))}

    torch.manual_seed(0)
    batch = Batch(torch.randn(6, 4), torch.randint(11, (6, 2)), {}, torch.zeros(6, 1), torch.zeros(6, dtype=torch.int64))  # fmt: skip
    made = loka.export(Ranker().eval(), batch, tmp_path / "m.pt2")
    assert made.inputs == {"dense": "float32[rows, 4]", "categorical": "int64[rows, 2]"}
    assert made.outputs == ["logit"]
    assert made.low_precision == {}


def test_inputs_and_outputs_have_the_names_of_the_model(tmp_path: Path, traced_only: None) -> None:
    """A package gives a flat tuple: without names nobody could tell a click from a purchase."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.click, self.buy = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, user: Tensor, item: Tensor, more: dict[str, Tensor]) -> dict[str, Tensor]:
            x = user + item + more["context"]
            return {"click": self.click(x), "buy": self.buy(x)}

    x = torch.randn(6, 4)
    made = loka.export(Two().eval(), (x, x + 1, {"context": x}), tmp_path / "m.pt2")
    assert list(made.inputs) == ["user", "item", "more.context"]
    assert made.outputs == ["click", "buy"]
    assert "  output click\n  output buy" in str(made)
    assert name_results((x, [x, x])) == ["output_0", "output_1.0", "output_1.1"]
    assert name_results(x) == ["output"]


@pytest.mark.parametrize("cut", [lambda x: x.t(), lambda x: x[:, 4:44], lambda x: x[:1, :40].expand(48, 40)])
def test_an_example_that_is_a_view_fixes_no_strides(cut: Callable[[Tensor], Tensor], tmp_path: Path, traced_only: None) -> None:  # fmt: skip
    """Compiled code has the strides of its example in it: a call with a contiguous tensor would read something else."""
    torch.manual_seed(0)
    example = cut(torch.randn(48, 48))
    (given,) = take_apart(example).tensors.values()
    assert torch.equal(given, example)
    assert given.is_contiguous()
    assert not given._is_view()
    width = example.shape[1]
    made = loka.export(nn.Sequential(nn.Softsign(), nn.Linear(width, 2)).eval(), example, tmp_path / "m.pt2")
    assert made.inputs == {"input": f"float32[rows, {width}]"}


def test_the_imaginary_part_of_a_result_counts() -> None:
    right = torch.complex(torch.ones(4), torch.ones(4))
    assert agreement.differ([right], [right.conj().resolve_conj()]) > 1
    assert agreement.differ([right.conj()], [right.conj().resolve_conj()]) == 0


def test_a_file_that_computes_something_else_is_not_written(
    tmp_path: Path, traced_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ops.AtenOps.multiply
    monkeypatch.setattr(ops.AtenOps, "multiply", lambda *args, **how: 1.05 * right(*args, **how))
    with pytest.raises(ValueError, match=r"differs from the model by 0.*nothing was written"):
        loka.export(small(), torch.randn(8, 40), tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("recipe", "fast"), [("rowwise", True), ("blockwise", False)])
def test_a_package_adds_up_as_the_model_does(recipe: str, fast: bool, tmp_path: Path, traced_only: None, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Sums stay in the tensor cores where those of the model do: what they round away decides casts to FP8 behind them."""
    seen: list[bool] = []
    right = ops.AtenOps.multiply
    monkeypatch.setattr(ops.AtenOps, "multiply", lambda *args, fast_accum: seen.append(fast_accum) or right(*args, fast_accum=fast_accum))  # fmt: skip
    loka.export(small(recipe), torch.randn(8, 40), tmp_path / "m.pt2")
    assert set(seen) == {fast}
    seen.clear()
    loka.export(*frozen("dlrm"), tmp_path / "chains.pt2")
    assert set(seen) == {True}


def test_a_package_rounds_to_16_bits_where_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {}
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", lambda program, *, package_path, inductor_configs: settings.update(inductor_configs))  # fmt: skip
    package._write_aoti(None, tmp_path / "m.pt2", ["x"], ["y"], {}, torch.device("cpu"))
    assert settings["emulate_precision_casts"] is True
    assert (
        torch._inductor.config.emulate_precision_casts is False
    )  # a setting of the compiler, and not what it does by itself


def test_what_cannot_be_exported_is_named(tmp_path: Path, traced_only: None) -> None:
    x, path = torch.randn(8, 40), tmp_path / "m.pt2"
    with pytest.raises(ValueError, match="hint: an example is the model's input without a target"):
        loka.export(small(), (x, torch.zeros(8)), path)
    with pytest.raises(ValueError, match=r"more are in training mode"):
        loka.export(small().train(), x, path)
    model, inputs = frozen()
    loka.revert(model)
    loka.convert(model, plan_everything(model, inputs, serving=True))
    with pytest.raises(ValueError, match=r"net\.0: a chain that is not frozen"):
        loka.export(model.eval(), inputs, path)
    with pytest.raises(ValueError, match="one row in the example"):
        loka.export(small(), x[:1], path)
    with pytest.raises(ValueError, match=r"ending in \.pt2 or \.onnx"):
        loka.export(small(), x, tmp_path / "m.bin")
    with pytest.raises(ValueError, match="format='torchscript'"):
        loka.export(small(), x, path, format="torchscript")  # type: ignore[arg-type]

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = GroupedLinear(2, 40, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x, torch.tensor([4, 8], dtype=torch.int32))

    with pytest.raises(ValueError, match=r"experts \(GroupedLinear\): loka\.grouped_linear\.default is an op implemented in Python"):  # fmt: skip
        loka.export(Experts().eval(), x, path, dynamic=False)

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.ones(int(x.shape[0]), 1)

    with pytest.raises(ValueError, match="fixes the number of rows"):
        loka.export(Fixed().eval(), x, path)
    assert list(tmp_path.iterdir()) == []


class Behaved(nn.Module):
    """A tower that ends in a function of (input, logits, itself)."""

    def __init__(self, end: Callable[[Tensor, Tensor, Any], Any]) -> None:
        super().__init__()
        self.tower, self.end = small(), end
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.end(x, self.tower(x), self)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda x, y, model: y + torch.rand_like(y), "other results if it is called with the same example again"),
        (lambda x, y, model: y * model.calls, "other results if it is called with the same example again"),
        (lambda x, y, model: torch.log(y - 100), "returns NaN for the example"),
        (lambda x, y, model: y if x.sum() > 0 else -y, r"depends on values of its inputs.*test_package\.py"),
    ],
)
def test_a_model_that_no_file_can_be_like_is_refused(end: Any, said: str, tmp_path: Path, traced_only: None, capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    model = Behaved(end).eval()
    with pytest.raises(ValueError, match=said):
        loka.export(model, torch.randn(8, 40), tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []
    assert "def forward" not in capfd.readouterr().err


def test_scores_that_are_masked_out_are_compared(tmp_path: Path, traced_only: None) -> None:
    model = Behaved(lambda x, y, model: y.masked_fill(x[:, :3] > 0, -math.inf)).eval()
    assert loka.export(model, torch.randn(8, 40), tmp_path / "m.pt2").difference < 1e-3
    assert agreement.differ([torch.tensor([1.0, 2.0])], [torch.tensor([1.0, -math.inf])]) == math.inf


def test_results_that_are_no_tensors_are_named_and_the_model_stays_as_it_is(tmp_path: Path, traced_only: None) -> None:
    model = Behaved(lambda x, y, model: {"score": y, "version": "v3", "loss": None, "more": (y[:, 0], 7)}).eval()
    done = loka.export(model, torch.randn(8, 40), tmp_path / "m.pt2")
    assert done.outputs == ["score", "more.0"]
    assert done.left_out == {"version": "str", "more.1": "int"}
    assert "version, which is no tensor (str)" in str(done)
    assert model.calls == 1


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda rows: rows >= 100, "rows of x from 2 to 99"),
        (lambda rows: rows < 16, "rows of x >= 16"),
        (lambda rows: rows % 8 == 0, r"\(rows of x % 8\) == 0"),
        (lambda rows: rows == 63, "rows of x != 63"),
    ],
)
def test_a_model_that_goes_by_its_number_of_rows_is_refused(other: Callable[[int], bool], said: str, tmp_path: Path, traced_only: None) -> None:  # fmt: skip
    """Traced with 64 rows the package has one of its two ways, and nothing in it would notice."""

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(x).relu() if other(x.shape[0]) else self.top(x)

    model, x = Forked().eval(), torch.randn(64, 16)
    with pytest.raises(ValueError, match=f"was traced for {said}: .*dynamic=False"):
        loka.export(model, x, tmp_path / "m.pt2")
    assert not (tmp_path / "m.pt2").exists()
    loka.export(model, x, tmp_path / "m.pt2", dynamic=False)


def test_the_model_is_compared_as_it_runs(tmp_path: Path, traced_only: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every backend that it has: without its own kernels it would compute something else."""
    model, x = frozen()
    everything, seen = dict(registry.BACKENDS), []
    compare = package.call_model

    def note(*arguments: Any) -> Any:
        seen.append(dict(registry.BACKENDS))
        return compare(*arguments)

    for module in (package, agreement):
        monkeypatch.setattr(module, "call_model", note)
    loka.export(model, x, tmp_path / "model.pt2")
    assert seen == [everything] * 2  # on the example again, and at another number of rows


def test_kernels_in_python_are_out_of_reach_meanwhile() -> None:
    before = dict(registry.BACKENDS)
    with registry.offering(package.PACKABLE):
        assert "triton" not in registry.BACKENDS["scaled_mm"]
        with pytest.raises(ValueError, match="no backend 'triton'"):
            registry.backend("scaled_mm", "triton")
    assert before == registry.BACKENDS


@pytest.mark.parametrize("name", ["dlrm", "encoder"])
def test_onnx_has_quantize_and_dequantize_around_every_product(name: str, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, x = frozen(name)
    made = loka.export(model, x, tmp_path / "m.onnx")
    assert made.difference < 1e-3
    nodes = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    links = sum(what.count(",") + 1 for what in made.low_precision.values())
    assert nodes.count("QuantizeLinear") == links
    assert nodes.count("DequantizeLinear") == 2 * links
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    assert len(session.get_inputs()) == len(x)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_onnx_of_every_recipe(recipe: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    assert loka.export(small(recipe), torch.randn(8, 40), tmp_path / "m.onnx").difference < 1e-5


def test_onnx_without_its_packages_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ValueError, match=r"needs onnx .*pip install 'loka\[onnx\]'"):
        loka.export(small(), torch.randn(8, 40), tmp_path / "m.onnx")


@pytest.mark.parametrize("tolerance", [-1.0, float("nan")])
def test_a_tolerance_that_is_none_is_refused_before_anything_is_compiled(tolerance: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        loka.export(nn.Linear(2, 2).eval(), torch.randn(2, 2), tmp_path / "x.pt2", tolerance=tolerance)
    assert not list(tmp_path.iterdir())
