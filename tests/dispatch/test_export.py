"""Exports say what a plan says, no more: exact names, and what another tool cannot express is left out by name."""

import fnmatch
import re
from typing import Any

import pytest
import torch
from torch import nn

from loka.dispatch import Policy, make_plan
from loka.dispatch.export import (
    FORMATS,
    export,
    ignored,
    to_llm_compressor,
    to_modelopt,
    to_torchao,
    to_transformer_engine,
)
from loka.dispatch.recipe import RECIPES
from loka.formats import Spec, dequantize, quantize
from loka.records import GEMMS, Choice, Plan, SitePlan

from .evidence import candidate, report, site

SITES = {
    "rows": dict.fromkeys(GEMMS, "rowwise"),
    "rows.2": dict.fromkeys(GEMMS, "rowwise"),
    "tensor": dict.fromkeys(GEMMS, "tensorwise"),
    "mixed": {"fprop": "rowwise", "dgrad": "rowwise_with_gw_hp", "wgrad": None},
    "first": {"fprop": "tensorwise", "wgrad": "tensorwise"},
    "blocks": dict.fromkeys(GEMMS, "blockwise"),
    "onlyforward": {"fprop": "rowwise", "dgrad": None, "wgrad": None},
    "kept": dict.fromkeys(GEMMS),
}


def plan() -> Plan:
    base = make_plan(report(site("x", candidate())), Policy(min_speedup=None))
    import msgspec

    sites = [SitePlan(site=name, m=8, k=128, n=128, flops_share=0.1, choices=[_choice(g, r) for g, r in gemms.items()]) for name, gemms in SITES.items()]  # fmt: skip
    return msgspec.structs.replace(base, sites=sites)


def _choice(gemm: str, recipe: str | None) -> Choice:
    operands = RECIPES[recipe].operands(gemm) if recipe else None  # type: ignore[arg-type]
    a, b = (str(operands.a), str(operands.b)) if operands else (None, None)
    fast = operands.fast_accum if operands else False
    return Choice(gemm=gemm, backend="torch" if a else "high", a=a, b=b, reason="test", fast_accum=fast)  # type: ignore[arg-type]


def model() -> nn.Module:
    """Every site under its own name, and one linear the plan does not know."""
    made = nn.Module()
    for name in (*SITES, "unknown"):
        if "." not in name:
            made.add_module(name, nn.Linear(128, 128, bias=False))
    made.get_submodule("rows").add_module("2", nn.Linear(128, 128))
    return made


def test_torchao_has_one_filter_per_recipe() -> None:
    found = to_torchao(plan())
    assert found.recipes == {
        "tensorwise": ["tensor", "first"],
        "rowwise": ["rows", "rows.2"],
        "rowwise_with_gw_hp": ["mixed"],
    }
    assert set(found.left_out) == {"blocks", "onlyforward"}
    keep = found.module_filter_fn("rowwise")
    assert [name for name in (*SITES, "rows.20", "unknown") if keep(nn.Linear(1, 1), name)] == ["rows", "rows.2"]
    with pytest.raises(ValueError, match="no site for torchao's 'blockwise'"):
        found.module_filter_fn("blockwise")


def shaped(name: str, k: int, n: int) -> Plan:
    import msgspec

    made = plan()
    sites = [msgspec.structs.replace(s, k=k, n=n) if s.site == name else s for s in made.sites]
    return msgspec.structs.replace(made, sites=sites)


@pytest.mark.parametrize(("k", "n", "why"), [(128, 7, "N 7: not a multiple of 16"), (479, 13, "K 479 and N 13: not")])
def test_torchao_is_given_no_shape_it_would_have_to_pad(k: int, n: int, why: str) -> None:
    found = to_torchao(shaped("tensor", k, n))
    assert found.recipes["tensorwise"] == ["first"]
    assert found.left_out["tensor"].startswith(why)
    assert f"# left in high precision: tensor: {why}" in str(found)
    assert f"# left in high precision: tensor: {why}" in to_transformer_engine(shaped("tensor", k, n))


def test_torchao_accumulates_as_the_plan_says_or_not_at_all() -> None:
    import msgspec

    made = plan()
    sites = [
        msgspec.structs.replace(s, choices=[msgspec.structs.replace(c, fast_accum=False) for c in s.choices])
        for s in made.sites
    ]
    assert to_torchao(msgspec.structs.replace(made, sites=sites)).recipes == {}


def test_the_text_for_torchao_runs_and_means_the_same() -> None:
    scope: dict[str, Any] = {}
    exec(str(to_torchao(plan())), scope)
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        ours, theirs = to_torchao(plan()).module_filter_fn(recipe), scope["filter_for"](recipe)
        assert [ours(nn.Identity(), n) for n in SITES] == [theirs(nn.Identity(), n) for n in SITES]
    assert "# left in high precision: blocks: no recipe of torchao runs fprop e4m3:1x128 @ e4m3:128x128" in str(
        to_torchao(plan())
    )


def test_torchao_itself_swaps_what_the_plan_says_with_its_specs() -> None:
    float8 = pytest.importorskip("torchao.float8")
    found = to_torchao(plan())
    scope: dict[str, Any] = {}
    exec(str(found), scope)
    names = {name for names in found.recipes.values() for name in names if name != "rows.2"}
    subject = nn.Sequential()
    for name in (*SITES, "unknown"):
        if "." not in name:
            subject.add_module(name, nn.Linear(128, 128, bias=False))
    for recipe in found.recipes:
        config = scope["config_for"](recipe)
        float8.convert_to_float8_training(subject, config=config, module_filter_fn=found.module_filter_fn(recipe))
        for gemm, (a, b), gemm_config in (
            ("fprop", (config.cast_config_input, config.cast_config_weight), config.gemm_config_output),
            ("dgrad", (config.cast_config_grad_output, config.cast_config_weight_for_grad_input), config.gemm_config_grad_input),
            ("wgrad", (config.cast_config_grad_output_for_grad_weight, config.cast_config_input_for_grad_weight), config.gemm_config_grad_weight),
        ):  # fmt: skip
            operands = RECIPES[recipe].operands(gemm)  # type: ignore[arg-type]
            if operands is None:
                assert {a.scaling_type.value, b.scaling_type.value} == {"disabled"}
                continue
            assert [str(operands.a), str(operands.b)] == [_spell_cast(a), _spell_cast(b)]
            assert gemm_config.use_fast_accum == operands.fast_accum
        assert not config.round_scales_to_power_of_2
    swapped = {name for name, m in subject.named_modules() if type(m).__name__ == "Float8Linear"}
    assert swapped == names


def _spell_cast(cast: Any) -> str:
    block = {"tensorwise": "tensor", "axiswise": "row"}[cast.scaling_granularity.value]
    return {"torch.float8_e4m3fn": "e4m3", "torch.float8_e5m2": "e5m2"}[str(cast.target_dtype)] + f":{block}"


def sections(text: str) -> dict[str, dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return loaded


def test_transformer_engine_switches_off_what_the_plan_keeps() -> None:
    text = to_transformer_engine(plan())
    patterns = dict(
        re.findall(r"^(\w+):\n  enabled: True\n  layers:\n    layer_name_regex_pattern: '(.*)'$", text, re.M)
    )
    features = dict(re.findall(r"^(\w+):(?:\n .*)*?\n    (Disable\w+):", text, re.M))
    gemms = dict(re.findall(r"^(\w+):(?:\n .*)*?\n      gemms: \[(.*)\]", text, re.M))
    assert features["loka_high_precision"] == "DisableFP8Layer"
    assert features["loka_without_wgrad"] == "DisableFP8GEMM"
    for name in (*SITES, "unknown", "rows.20", "xrows"):
        matching = [section for section, pattern in patterns.items() if re.match(pattern, name)]
        off = {g for g in GEMMS if not (SITES.get(name, {})).get(g)}
        assert len(matching) == (1 if off else 0), name  # a layer may be in one section only
        if off == set(GEMMS):
            assert matching == ["loka_high_precision"]
        elif off:
            assert set(gemms[matching[0]].split(", ")) == off


def test_transformer_engines_yaml_is_yaml() -> None:
    found = sections(to_transformer_engine(plan()))
    assert found["loka_without_wgrad"]["transformer_engine"]["DisableFP8GEMM"] == {"enabled": True, "gemms": ["wgrad"]}
    assert all(section["enabled"] is True for section in found.values())


def test_the_ignore_list_has_the_forward_pass_and_what_the_plan_does_not_know() -> None:
    assert ignored(plan()) == ["kept"]
    assert ignored(plan(), model()) == ["kept", "unknown"]


def test_llm_compressor_gets_exact_names() -> None:
    text = to_llm_compressor(plan(), model())
    assert "FP8_DYNAMIC: ['re:^rows$', 're:^rows\\.2$', 're:^mixed$', 're:^onlyforward$']" in text
    assert "FP8_BLOCK: ['re:^blocks$']" in text
    assert "ignore: ['re:^kept$', 're:^unknown$', 're:^tensor$', 're:^first$']" in text
    assert "# left in high precision: tensor: no preset for e4m3:tensor @ e4m3:tensor" in text


def test_llm_compressors_yaml_is_yaml() -> None:
    found = sections(to_llm_compressor(plan()))["default_stage"]["default_modifiers"]["QuantizationModifier"]
    assert set(found) == {"scheme", "ignore"}


def test_llm_compressor_is_given_no_block_that_does_not_fit() -> None:
    text = to_llm_compressor(shaped("blocks", 256, 13))
    assert "# left in high precision: blocks: K 256, N 13: FP8_BLOCK requires multiples of 128" in text
    assert "FP8_BLOCK: [" not in text
    assert "'re:^blocks$'" in text  # ignored


def modelopt_config(made: Plan) -> list[dict[str, Any]]:
    scope: dict[str, Any] = {}
    exec(to_modelopt(made), scope)
    assert scope["CONFIG"]["algorithm"] == "max"
    entries: list[dict[str, Any]] = scope["CONFIG"]["quant_cfg"]
    return entries


def applied(entries: list[dict[str, Any]], quantizer: str) -> dict[str, Any] | None:
    """What a quantizer ends up as; None: off. Entries in order, the last that matches decides."""
    state = None
    for entry in entries:
        if fnmatch.fnmatch(quantizer, entry["quantizer_name"]):
            state = entry["cfg"] if entry.get("enable", True) else None
    return state


def test_modelopt_gets_the_plans_scales_and_everything_else_is_off() -> None:
    entries = modelopt_config(plan())
    per_row = {"num_bits": (4, 3), "type": "dynamic", "block_sizes": {-1: None}}
    for name in ("rows", "rows.2", "mixed", "onlyforward"):
        assert applied(entries, f"{name}.input_quantizer") == per_row
        assert applied(entries, f"{name}.weight_quantizer") == {"num_bits": (4, 3), "axis": 0}
    for name in ("tensor", "first"):
        assert applied(entries, f"{name}.input_quantizer") == {"num_bits": (4, 3), "type": "dynamic", "axis": None}
        assert applied(entries, f"{name}.weight_quantizer") == {"num_bits": (4, 3), "axis": None}
    for name in ("kept", "blocks", "unknown", "xrows", "rows.20", "head.rows"):  # not in FP8, or not in the plan
        for part in ("weight_quantizer", "input_quantizer", "output_quantizer"):
            assert applied(entries, f"{name}.{part}") is None
    assert "# left in high precision: blocks: e4m3:1x128 @ e4m3:128x128 cannot be expressed in ModelOpt" in to_modelopt(
        plan()
    )


def test_modelopt_itself_accepts_the_config() -> None:
    mtq = pytest.importorskip("modelopt.torch.quantization")
    scope: dict[str, Any] = {}
    exec(to_modelopt(plan()), scope)
    quantized = mtq.quantize(model(), scope["CONFIG"], lambda m: m.tensor(m.rows(torch.ones(4, 128))))
    on = {n for n, m in quantized.named_modules() if n.endswith("_quantizer") and m.is_enabled}
    assert on == {f"{n}.{p}_quantizer" for n in ("rows", "rows.2", "mixed", "onlyforward", "tensor", "first") for p in ("input", "weight")}  # fmt: skip


@pytest.mark.parametrize(("name", "spec"), [("rows", "e4m3:row"), ("tensor", "e4m3:tensor")])
def test_modelopt_computes_what_the_plan_says(name: str, spec: str) -> None:
    mtq = pytest.importorskip("modelopt.torch.quantization")
    torch.manual_seed(0)
    x, subject = torch.randn(32, 128) * torch.randn(32, 1).exp(), model()
    weight = subject.get_submodule(name).weight.detach().clone()
    scope: dict[str, Any] = {}
    exec(to_modelopt(plan()), scope)
    quantized = mtq.quantize(subject, scope["CONFIG"], lambda m: m.get_submodule(name)(x)).get_submodule(name)
    rounded = [
        dequantize(quantize(t, Spec.parse(spec))) for t in (3 * x[:5], weight)
    ]  # other values than it calibrated with
    torch.testing.assert_close(quantized(3 * x[:5]).detach(), rounded[0] @ rounded[1].T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("to", FORMATS)
def test_every_export_takes_a_plan_that_converts_nothing(to: str) -> None:
    nothing = make_plan(report(site("x", candidate(error=0.9))), Policy(min_speedup=None))
    assert export(nothing, to)
    assert export(plan(), to)


def test_unknown_exports_are_refused() -> None:
    with pytest.raises(ValueError, match="no export 'onnx'; there are torchao"):
        export(plan(), "onnx")
