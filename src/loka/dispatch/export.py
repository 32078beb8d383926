"""A plan in other people's words, for those who train or serve with other tools. Nothing of theirs is imported.

    torchao              which linears `convert_to_float8_training` swaps and with which configuration (`export_torchao`)
    transformer-engine   a debug YAML (nvdlfw_inspect): which layers, or which of their GEMMs, stay out of FP8 inside fp8_autocast
    llm-compressor       a recipe: preset scheme -> names, and the ignore list
    modelopt             a quantisation config for `mtq.quantize`: everything off, then the quantizers of the plan's sites, each with its scales

Each of these says less than a plan: torchao has one configuration a conversion and no backend, the last two know the forward pass only. What cannot be said
is not approximated: such a site stays in high precision there, and the export says which and why. TransformerEngine is the exception: it has no place for
scales at all, they are those of its own recipe, and the text says so. A plan with chains is refused. Names are matched as a whole; a name that only contains a site's is another layer.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from loka.dispatch.export_torchao import TorchaoExport, misaligned, refuse_chains, to_torchao
from loka.records import GEMMS, Choice, Plan, SitePlan

__all__ = [
    "FORMATS", "TorchaoExport", "export", "ignored", "to_llm_compressor", "to_modelopt", "to_torchao",
    "to_transformer_engine",
]  # fmt: skip

ROWS = ("e4m3:row", "e4m3:row")
TENSORS = ("e4m3:tensor", "e4m3:tensor")
BLOCKS = ("e4m3:1x128", "e4m3:128x128")
SCHEMES = {ROWS: "FP8_DYNAMIC", BLOCKS: "FP8_BLOCK"}  # forward Specs -> llm-compressor's preset
# forward Specs -> ModelOpt's attributes of a linear's input and weight quantizers; a weight's scale may as well be calibrated, it is the same
QUANTIZERS: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ROWS: {
        "input_quantizer": {"num_bits": (4, 3), "type": "dynamic", "block_sizes": {-1: None}},
        "weight_quantizer": {"num_bits": (4, 3), "axis": 0},
    },
    TENSORS: {
        "input_quantizer": {"num_bits": (4, 3), "type": "dynamic", "axis": None},
        "weight_quantizer": {"num_bits": (4, 3), "axis": None},
    },
}


def to_transformer_engine(plan: Plan) -> str:
    """Debug YAML: every GEMM that is not in FP8 in the plan is switched off, and so is every layer the plan does not name."""
    refuse_chains(plan)
    by_gemms: dict[tuple[str, ...], list[str]] = {}
    left_out: dict[str, str] = {}
    for site in plan.sites:
        off: tuple[str, ...] = tuple(g for g in GEMMS if not any(c.gemm == g and c.quantized for c in site.choices))
        why = misaligned(site)
        if off != GEMMS and why is not None:
            left_out[site.site] = f"{why}, which TransformerEngine wants"
            continue
        by_gemms.setdefault(off, []).append(site.site)
    whole = [*by_gemms.pop(GEMMS, [])]
    everywhere = [name for names in by_gemms.values() for name in names]
    lines = ["# Made by loka from a plan, for nvdlfw_inspect: GEMMs that stay in high precision inside fp8_autocast.", "# Scaling is TransformerEngine's own recipe: the plan's Specs cannot be said here."]  # fmt: skip
    lines += [f"# in high precision by the plan: {name}" for name in whole]
    lines += [f"# left in high precision: {name}: {why}" for name, why in left_out.items()]
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
    refuse_chains(plan)
    targets: dict[str, list[str]] = {}
    left_out = {}
    for site in plan.sites:
        choice = _forward(site)
        if choice is not None:
            scheme = SCHEMES.get((str(choice.a), str(choice.b)))
            if scheme is None:
                left_out[site.site] = f"no preset for {choice.a} @ {choice.b} with dynamic scales"
            elif scheme == "FP8_BLOCK" and (site.k % 128 or site.n % 128):
                left_out[site.site] = f"K {site.k}, N {site.n}: FP8_BLOCK wants multiples of 128"
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


def to_modelopt(plan: Plan) -> str:
    """A config as Python text (its keys are numbers too, which JSON has not): every quantizer off, then those of the plan's sites. Later entries win."""
    refuse_chains(plan)
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    left_out = {}
    for site in plan.sites:
        choice = _forward(site)
        if choice is None:
            continue
        attributes = QUANTIZERS.get((str(choice.a), str(choice.b)))
        if attributes is None:
            why = (
                "it takes blocks of activations of one fixed shape only"
                if (choice.a, choice.b) == BLOCKS
                else "it has no such scales"
            )
            left_out[site.site] = f"{choice.a} @ {choice.b} cannot be said to ModelOpt: {why}"
            continue
        entries += [{"quantizer_name": f"{_literal(site.site)}.{part}", "cfg": cfg} for part, cfg in attributes.items()]
    lines = [
        "# Made by loka from a plan: mtq.quantize(model, CONFIG, forward_loop). Scales of inputs are computed when they are seen, as in the plan;",
        "# FP8_DEFAULT_CFG would calibrate them.",
    ]
    lines += [f"# in high precision by the plan: {name}" for name in ignored(plan)]
    lines += [f"# left in high precision: {name}: {why}" for name, why in left_out.items()]
    lines += [
        "CONFIG = {",
        '    "quant_cfg": [',
        *(f"        {entry!r}," for entry in entries),
        "    ],",
        '    "algorithm": "max",',
        "}",
    ]
    return "\n".join(lines) + "\n"


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
    """The plan as text for another tool.

    Args:
        plan: what to say.
        to: torchao, transformer-engine, llm-compressor or modelopt.

    Returns:
        Configuration or code in its words.

    Raises:
        ValueError: no such tool, or a plan it has no words for.

    Example:
        >>> print(export(plan, "torchao"))
    """
    if to not in FORMATS:
        raise ValueError(f"no export {to!r}; there are {', '.join(FORMATS)}")
    return FORMATS[to](plan)
