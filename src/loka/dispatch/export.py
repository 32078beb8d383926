"""A plan in other people's words, for those who train or serve with other tools. Nothing of theirs is imported.

    torchao              which linears `convert_to_float8_training` may swap, one filter per recipe: (module, fqn) -> bool, or as Python text
    transformer-engine   a debug YAML (nvdlfw_inspect): which layers, or which of their GEMMs, stay out of FP8 inside fp8_autocast
    llm-compressor       a recipe: preset scheme -> names, and the ignore list
    modelopt             `quant_cfg` entries that switch the quantizers of all other linears off

Each of these says less than a plan: torchao has one recipe a conversion and no backend, TransformerEngine takes its scaling from its own recipe, the
last two know the forward pass only. What cannot be said is not approximated: such a site stays in high precision there, and the export says which and why.
Names are matched as a whole; a name that only contains a site's is another layer.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from loka.dispatch.recipe import RECIPES
from loka.records import GEMMS, Choice, Plan, SitePlan

__all__ = [
    "FORMATS",
    "TorchaoExport",
    "export",
    "ignored",
    "to_llm_compressor",
    "to_modelopt",
    "to_torchao",
    "to_transformer_engine",
]

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SCHEMES = {  # forward Specs -> llm-compressor's preset
    ("e4m3:row", "e4m3:row"): "FP8_DYNAMIC",
    ("e4m3:1x128", "e4m3:128x128"): "FP8_BLOCK",
}
ModuleFilter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class TorchaoExport:
    """Sites by torchao's recipe, and the sites that no recipe of it expresses."""

    recipes: dict[str, list[str]]
    left_out: dict[str, str]

    def module_filter_fn(self, recipe: str) -> ModuleFilter:
        """For `convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe), module_filter_fn=...)`."""
        if recipe not in self.recipes:
            raise ValueError(
                f"the plan has no site for torchao's {recipe!r}; it has {', '.join(self.recipes) or 'none'}"
            )
        names = frozenset(self.recipes[recipe])
        return lambda module, fqn: fqn in names

    def __str__(self) -> str:
        lines = [
            "# Made by loka from a plan. One call per recipe:",
            "#     convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe),",
        ]
        lines += [
            "#                                module_filter_fn=filter_for(recipe))",
            "# torchao casts output gradients to E5M2 under tensorwise; the plan's errors are for E4M3.",
        ]
        lines += [f"# left in high precision: {name}: {why}" for name, why in self.left_out.items()]
        lines += [
            "SITES = {",
            *(f"    {recipe!r}: {sorted(names)!r}," for recipe, names in self.recipes.items()),
            "}",
            "",
            "",
        ]
        lines += [
            "def filter_for(recipe):",
            "    names = frozenset(SITES[recipe])",
            "    return lambda module, fqn: fqn in names",
        ]
        return "\n".join(lines) + "\n"  # fmt: skip


def to_torchao(plan: Plan) -> TorchaoExport:
    """Sites whose every GEMM is what one of torchao's recipes runs."""
    recipes: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for site in _converted(plan):
        found = next((name for name in TORCHAO_RECIPES if _runs(site, name)), None)
        if found is not None:
            recipes.setdefault(found, []).append(site.site)
        else:
            spelled = ", ".join(f"{c.gemm} {f'{c.a} @ {c.b}' if c.quantized else 'high'}" for c in site.choices)
            left_out[site.site] = f"no recipe of torchao runs {spelled}"
    return TorchaoExport({name: recipes[name] for name in TORCHAO_RECIPES if name in recipes}, left_out)


def _runs(site: SitePlan, recipe: str) -> bool:
    for choice in site.choices:
        operands = RECIPES[recipe].operands(choice.gemm)
        if (choice.a, choice.b) != ((str(operands.a), str(operands.b)) if operands else (None, None)):
            return False
    return True


def _converted(plan: Plan) -> list[SitePlan]:
    return [site for site in plan.sites if any(c.quantized for c in site.choices)]


def to_transformer_engine(plan: Plan) -> str:
    """Debug YAML: every GEMM that is not in FP8 in the plan is switched off, and so is every layer the plan does not name."""
    by_gemms: dict[tuple[str, ...], list[str]] = {}
    for site in plan.sites:
        off: tuple[str, ...] = tuple(g for g in GEMMS if not any(c.gemm == g and c.quantized for c in site.choices))
        by_gemms.setdefault(off, []).append(site.site)
    whole = [*by_gemms.pop(GEMMS, [])]
    everywhere = [name for names in by_gemms.values() for name in names]
    lines = ["# Made by loka from a plan, for nvdlfw_inspect: GEMMs that stay in high precision inside fp8_autocast.", "# Scaling is TransformerEngine's own recipe: the plan's Specs cannot be said here."]  # fmt: skip
    lines += [f"# in high precision by the plan: {name}" for name in whole]
    pattern = rf"^(?!(?:{_alternatives(everywhere)})$).*$" if everywhere else ".*"
    lines += _section("loka_high_precision", pattern, "DisableFP8Layer", None)
    for off, names in by_gemms.items():
        if off:
            lines += _section(f"loka_without_{'_'.join(off)}", f"^(?:{_alternatives(names)})$", "DisableFP8GEMM", off)
    return "\n".join(lines) + "\n"


def _section(name: str, pattern: str, feature: str, gemms: tuple[str, ...] | None) -> list[str]:
    """Layers are named by one regular expression; a layer may be in one section only."""
    lines = [f"{name}:", "  enabled: True", "  layers:", f"    layer_name_regex_pattern: {_quote(pattern)}"]
    lines += ["  transformer_engine:", f"    {feature}:", "      enabled: True"]
    return lines + ([f"      gemms: [{', '.join(gemms)}]"] if gemms else [])


def _alternatives(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in sorted(names))


def _quote(text: str) -> str:
    """A YAML scalar in single quotes, where only the quote itself is special."""
    return "'" + text.replace("'", "''") + "'"


def ignored(plan: Plan, model: nn.Module | None = None) -> list[str]:
    """Linears whose forward product stays in high precision; with the model also those the plan does not name."""
    names = [site.site for site in plan.sites if _forward(site) is None]
    if model is not None:
        known = {site.site for site in plan.sites}
        names += [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in known]
    return names


def _forward(site: SitePlan) -> Choice | None:
    """The choice of a site's forward product where it is quantised."""
    return next((c for c in site.choices if c.gemm == "fprop" and c.quantized), None)


def to_llm_compressor(plan: Plan, model: nn.Module | None = None) -> str:
    """A recipe in YAML: presets by the names they apply to, and what to ignore."""
    targets: dict[str, list[str]] = {}
    left_out = {}
    for site in plan.sites:
        choice = _forward(site)
        if choice is not None:
            scheme = SCHEMES.get((str(choice.a), str(choice.b)))
            if scheme is None:
                left_out[site.site] = f"no preset for {choice.a} @ {choice.b} with dynamic scales"
            else:
                targets.setdefault(scheme, []).append(site.site)
    lines = [
        "# Made by loka from a plan. Activations are scaled per token or per block when they are seen; no calibration is needed."
    ]
    lines += [f"# left in high precision: {name}: {why}" for name, why in left_out.items()]
    lines += [
        "default_stage:",
        "  default_modifiers:",
        "    QuantizationModifier:",
        f"      scheme:{'' if targets else ' {}'}",
    ]
    lines += [f"        {scheme}: [{_names(names)}]" for scheme, names in targets.items()]
    lines += [f"      ignore: [{_names([*ignored(plan, model), *left_out])}]"]
    return "\n".join(lines) + "\n"


def _names(names: Iterable[str]) -> str:
    """Exact names, as regular expressions: a plain word would also match a class of modules."""
    return ", ".join(_quote(f"re:^{re.escape(name)}$") for name in names)


def to_modelopt(plan: Plan, model: nn.Module | None = None) -> str:
    """`quant_cfg` entries as JSON, to be appended to those of FP8_DEFAULT_CFG: later entries win."""
    entries: list[dict[str, Any]] = [
        {"quantizer_name": f"{_literal(name)}.*quantizer", "enable": False} for name in ignored(plan, model)
    ]
    return json.dumps(entries, indent=1) + "\n"


def _literal(name: str) -> str:
    """A name for fnmatch: its wildcards are made plain."""
    return re.sub(r"([*?\[])", r"[\1]", name)


FORMATS: dict[str, Callable[[Plan], str]] = {
    "torchao": lambda plan: str(to_torchao(plan)),
    "transformer-engine": to_transformer_engine,
    "llm-compressor": to_llm_compressor,
    "modelopt": to_modelopt,
}


def export(plan: Plan, to: str) -> str:
    """The plan as text for another tool."""
    if to not in FORMATS:
        raise ValueError(f"no export {to!r}; there are {', '.join(FORMATS)}")
    return FORMATS[to](plan)
