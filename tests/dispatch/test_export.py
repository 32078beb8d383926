"""Exports say what a plan says, no more: exact names, and what another tool cannot express is left out by name."""

import fnmatch
import json
import re
from typing import Any

import pytest
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

    sites = [SitePlan(site=name, m=8, k=16, n=16, flops_share=0.1, choices=[_choice(g, r) for g, r in gemms.items()]) for name, gemms in SITES.items()]  # fmt: skip
    return msgspec.structs.replace(base, sites=sites)


def _choice(gemm: str, recipe: str | None) -> Choice:
    operands = RECIPES[recipe].operands(gemm) if recipe else None  # type: ignore[arg-type]
    a, b = (str(operands.a), str(operands.b)) if operands else (None, None)
    return Choice(gemm=gemm, backend="torch" if a else "high", a=a, b=b, reason="test")  # type: ignore[arg-type]


def model() -> nn.Module:
    """Every site under its own name, and one linear the plan does not know."""
    made = nn.Module()
    for name in (*SITES, "unknown"):
        if "." not in name:
            made.add_module(name, nn.Linear(16, 16, bias=False))
    made.get_submodule("rows").add_module("2", nn.Linear(16, 16))
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


def test_the_text_for_torchao_runs_and_means_the_same() -> None:
    scope: dict[str, Any] = {}
    exec(str(to_torchao(plan())), scope)
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        ours, theirs = to_torchao(plan()).module_filter_fn(recipe), scope["filter_for"](recipe)
        assert [ours(nn.Identity(), n) for n in SITES] == [theirs(nn.Identity(), n) for n in SITES]
    assert "# left in high precision: blocks: no recipe of torchao runs fprop e4m3:1x128 @ e4m3:128x128" in str(
        to_torchao(plan())
    )


def test_torchao_itself_swaps_what_the_plan_says() -> None:
    float8 = pytest.importorskip("torchao.float8")
    found = to_torchao(plan())
    names = {name for names in found.recipes.values() for name in names if name != "rows.2"}
    subject = nn.Sequential()
    for name in (*SITES, "unknown"):
        if "." not in name:
            subject.add_module(name, nn.Linear(16, 16, bias=False))
    for recipe in found.recipes:
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        float8.convert_to_float8_training(subject, config=config, module_filter_fn=found.module_filter_fn(recipe))
    swapped = {name for name, m in subject.named_modules() if type(m).__name__ == "Float8Linear"}
    assert swapped == names


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


def test_modelopt_switches_the_quantizers_of_kept_linears_off() -> None:
    entries = json.loads(to_modelopt(plan(), model()))
    off = [e["quantizer_name"] for e in entries if e["enable"] is False]
    for name, expected in (("kept", True), ("unknown", True), ("rows", False), ("xkept", False)):
        for part in ("weight_quantizer", "input_quantizer"):
            assert any(fnmatch.fnmatchcase(f"{name}.{part}", pattern) for pattern in off) == expected


@pytest.mark.parametrize("to", FORMATS)
def test_every_export_takes_a_plan_that_converts_nothing(to: str) -> None:
    nothing = make_plan(report(site("x", candidate(error=0.9))), Policy(min_speedup=None))
    assert export(nothing, to)
    assert export(plan(), to)


def test_unknown_exports_are_refused() -> None:
    with pytest.raises(ValueError, match="no export 'onnx'; there are torchao"):
        export(plan(), "onnx")
