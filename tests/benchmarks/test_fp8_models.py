"""The whole-model cases on a CPU, tiny: what is converted, that it is compared before it is timed, and how much of it is FP8."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from forked import run_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script with its two neighbours. Its `models` must not be the tests' folder of that name, nor the other way round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.delitem(sys.modules, "models", raising=False)
        import fp8_models
        import fp8_models_cases
        import fp8_models_lower
    fp8_models.cases, fp8_models.lower = fp8_models_cases, fp8_models_lower
    return fp8_models


def build(script: ModuleType, case: str) -> dict:
    step, facts = script.cases.build(case, "cpu", scale=512, compiled=False)
    step()
    return facts


MODELS = ("wukong", "wukong8k", "wukong8k4k", "dlrm", "elfm", "interformer", "hstu", "dcn", "dhen")
OURS = [f"{model}-loka" for model in MODELS] + ["hstu-loka-convert", "elfm-loka-convert"]


@pytest.mark.parametrize("case", OURS)
def test_ours_is_near_float32_and_says_its_share(script: ModuleType, case: str) -> None:
    model, precision = case.split("-", 1)
    found = {mode: build(script, f"{model}-{mode}-{precision}") for mode in ("train", "infer")}
    for facts in found.values():
        assert 1e-3 < facts["difference"] < 0.15  # FP8 did run
        assert 0.7 < facts["fp8_share"] < facts["fp8_share_of_linears"] <= 1 or model == "dcn"  # dcn: all is linear
        assert len(facts["kept"]) == 1  # the prediction layer
    assert 1e-3 < found["train"]["gradient_difference"] < 0.25
    assert found["train"]["compiled_gradient_difference"] == 0  # eager here: the same code twice
    assert found["train"]["flops"] == 3 * found["infer"]["flops"]
    assert found["train"]["fp8_share"] == found["infer"]["fp8_share"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_high_precision_has_no_fp8(script: ModuleType, precision: str) -> None:
    for mode in ("train", "infer"):
        facts = build(script, f"hstu-{mode}-{precision}")
        assert facts["fp8_share"] == 0
        assert "kept" not in facts
        assert "difference" not in facts


def test_hstu_share_by_hand(script: ModuleType) -> None:
    facts = build(script, "hstu-infer-loka")
    config = script.cases.configure("hstu", "tiny", **script.cases.HSTU_TINY)
    feed = script.cases.draw(config, 16, "cpu")
    lengths = feed.offsets.diff().tolist()
    assert facts["positions"] == sum(lengths) == 16 * 24 // 2
    assert min(lengths) >= 4
    assert max(lengths) <= 20
    uvqk, out = 2 * 192 * 32 * 128, 2 * 192 * 32 * 32
    attention = sum(2 * (i + 1) * 2 * (16 + 16) for n in lengths for i in range(n))
    total = 2 * (uvqk + out + attention) + 2 * 192 * 32
    assert facts["flops"] == total
    assert facts["fp8_share"] == pytest.approx(2 * (uvqk + out) / total)


def test_the_full_size_has_a_fixed_number_of_positions(script: ModuleType) -> None:
    family, size, rows, overrides = script.cases.SIZES["hstu"]
    feed = script.cases.draw(script.cases.configure(family, size, **{**overrides, "d": 1}), rows, "cpu")
    assert feed.vectors[0].shape[0] == 49152
    assert len(set(feed.offsets.diff().tolist())) > 50  # ragged
    few = feed.first(512)
    assert few.vectors[0].shape[0] == few.rest[0].shape[0] == int(few.offsets[-1])


def test_narrow_linears_of_interformer_stay(script: ModuleType) -> None:
    family, size, _, overrides = script.cases.SIZES["interformer"]
    config = script.cases.configure(family, size, **overrides, style=script.cases.MODS)
    model = script.cases.make_model(config, "meta").to_empty(device="cpu")  # memory that nothing touches
    script.lower.fuse(model, "train", None, script.lower.WIDE)
    low = script.lower.find_fp8(model)
    assert "layers.0.backbone.interaction.interactions.0_dot.project" in low  # 2556 -> 8192
    assert "layers.1.pffn.make_weight.last" in low
    assert not any("mha" in name or "gate" in name or "pma" in name for name in low)  # 128 wide
    assert "head.last" not in low


@pytest.mark.slow
def test_compiled_gradients_are_compared(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_quickly(model: nn.Module, compiled: bool) -> nn.Module:
        return torch.compile(model, fullgraph=True, dynamic=False, backend="eager")

    torch._dynamo.reset()
    monkeypatch.setattr(script.cases, "compile_static", compile_quickly)
    assert build(script, "hstu-train-loka")["compiled_gradient_difference"] < 0.1


def test_a_wrong_backward_is_not_timed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_wrongly(model: nn.Module, compiled: bool) -> nn.Module:
        return lambda *inputs: model(*inputs) * 3  # type: ignore[return-value]

    monkeypatch.setattr(script.cases, "compile_static", compile_wrongly)
    with pytest.raises(ValueError, match="compiled and of the eager model differ"):
        build(script, "hstu-train-loka")


def test_a_wrong_forward_is_not_timed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_model(model: nn.Module, precision: str, mode: str, example: tuple, *, least: int) -> dict:
        with torch.no_grad():
            model.layers[1].out.weight.mul_(-3)
        return {}

    monkeypatch.setattr(script.cases, "lower", break_model)
    with pytest.raises(ValueError, match="differs from the float32 one"):
        build(script, "hstu-infer-loka")


def test_a_missing_gradient_is_an_error(script: ModuleType) -> None:
    one = torch.ones(2)
    assert script.cases.compare_gradients([one, None], [one, None], "x", limit=0.25) == 0
    with pytest.raises(ValueError, match="has none"):
        script.cases.compare_gradients([one, None], [one, one], "x", limit=0.25)
    with pytest.raises(ValueError, match=r"differ by 1\.00"):
        script.cases.compare_gradients([torch.zeros(2)], [one], "x", limit=0.25)


def test_gradients_that_are_off_by_a_third_are_an_error(script: ModuleType) -> None:
    """Half of the gradient's size was once let through."""
    one = torch.ones(9)
    with pytest.raises(ValueError, match=r"differ by 0\.33, limit 0\.25"):
        script.cases.compare_gradients([one * 4 / 3], [one], "x", limit=script.cases.GRADIENT_LIMIT)


def test_a_linear_nobody_counted_is_an_error(script: ModuleType) -> None:
    with pytest.raises(ValueError, match="tower"):
        script.lower.describe_share({"tower": 1.0}, {"head": 2.0}, 2.0)
    facts = script.lower.describe_share({"a": 2 / 3}, {"a": 6.0, "b": 3.0}, 12.0)
    assert facts["fp8_share"] == pytest.approx(4 / 12)
    assert facts["kept"] == {"b": 0.25}


def test_a_name_is_one_case_and_a_beginning_is_many(script: ModuleType) -> None:
    assert script.select(["hstu-train-loka"]) == ["hstu-train-loka"]
    assert script.select(["hstu-train-loka-"]) == ["hstu-train-loka-convert"]
    assert len(script.select(["hstu"])) == 14
    assert len(script.select([])) == len(script.CASES)
    assert {"hstu-infer-torchao-rowwise", "interformer-train-fp32", "dlrm-infer-tf32"} <= set(script.CASES)


@pytest.mark.slow
def test_the_script_writes_its_record(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--out", str(out), "--device", "cpu", "--eager", "--scale", "512", "--only", "hstu-infer-bf16,hstu-infer-loka"]  # fmt: skip
    code, said = run_script(BENCHMARKS / "fp8_models.py", *words)
    assert code == 0, said
    report = json.loads(out.read_text())
    assert set(report["cases"]) == {"hstu-infer-bf16", "hstu-infer-loka"}
    assert report["speedup"]["hstu-infer-loka"]["speedup"] > 0
    assert "90.7%" in said
