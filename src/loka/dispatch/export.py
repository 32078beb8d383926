"""Export plans as configurations for other tools. None of these tools is imported.

    torchao              which linears `convert_to_float8_training` swaps and with which configuration
                         (`export_torchao`)
    transformer-engine   a debug YAML (nvdlfw_inspect): the layers, or their GEMMs, that stay out of FP8 inside
                         fp8_autocast
    llm-compressor       a recipe: preset scheme -> names, and the ignore list
    modelopt             a config for `mtq.quantize`: everything off, then the quantizers of the plan's sites

These formats express less than a plan: torchao has one configuration per conversion and no backends, the last two only
cover the forward pass. A site that a format cannot express is not approximated: it stays in high precision there, and
the export lists it with the reason. TransformerEngine is the exception: it cannot express scales at all and uses its
own recipe, which the text says. Plans with chains are rejected. Names are matched as a whole, never as substrings.
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
# forward Specs -> attributes of ModelOpt's input and weight quantizers. Weight scales may be calibrated: the result is
# the same.
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
    """Return a debug YAML that disables FP8 for every GEMM that the plan keeps in high precision or does not name."""
    refuse_chains(plan)
    by_gemms: dict[tuple[str, ...], list[str]] = {}
    left_out: dict[str, str] = {}
    for site in plan.sites:
        low = {choice.gemm for choice in site.quantized}
        off: tuple[str, ...] = tuple(gemm for gemm in GEMMS if gemm not in low)
        why = misaligned(site)
        if off != GEMMS and why is not None:
            left_out[site.site] = f"{why}, which TransformerEngine requires"
            continue
        by_gemms.setdefault(off, []).append(site.site)
    whole = [*by_gemms.pop(GEMMS, [])]
    everywhere = [name for names in by_gemms.values() for name in names]
    lines = [
        "# Made by loka from a plan, for nvdlfw_inspect: GEMMs that stay in high precision inside fp8_autocast.",
        "# Scaling is TransformerEngine's own recipe: it cannot express the plan's Specs.",
    ]
    lines += [f"# in high precision by the plan: {name}" for name in whole]
    lines += [f"# left in high precision: {name}: {why}" for name, why in left_out.items()]
    pattern = rf"^(?!(?:{_alternatives(everywhere)})$).*$" if everywhere else ".*"
    lines += _section("loka_high_precision", pattern, "DisableFP8Layer", None)
    for off, names in by_gemms.items():
        if off:
            lines += _section(f"loka_without_{'_'.join(off)}", f"^(?:{_alternatives(names)})$", "DisableFP8GEMM", off)
    return "\n".join(lines) + "\n"


def _section(name: str, pattern: str, feature: str, gemms: tuple[str, ...] | None) -> list[str]:
    """Format one section. It selects layers by one regular expression; a layer may be in one section only."""
    lines = [f"{name}:", "  enabled: True", "  layers:", f"    layer_name_regex_pattern: {_quote(pattern)}"]
    lines += ["  transformer_engine:", f"    {feature}:", "      enabled: True"]
    return lines + ([f"      gemms: [{', '.join(gemms)}]"] if gemms else [])


def _alternatives(names: Iterable[str]) -> str:
    return "|".join(re.escape(name) for name in sorted(names))


def _quote(text: str) -> str:
    """Quote a YAML scalar with single quotes, inside which only the quote itself is special."""
    return "'" + text.replace("'", "''") + "'"


def ignored(plan: Plan, model: nn.Module | None = None) -> list[str]:
    """List the linears whose forward product stays in high precision; given the model, also those not in the plan."""
    names = [site.site for site in plan.sites if _find_forward_choice(site) is None]
    if model is not None:
        known = {site.site for site in plan.sites}
        names += [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in known]
    return names


def _find_forward_choice(site: SitePlan) -> Choice | None:
    """Return the choice of a site's forward product if it is quantized."""
    return next((c for c in site.quantized if c.gemm == "fprop"), None)


def to_llm_compressor(plan: Plan, model: nn.Module | None = None) -> str:
    """Return an LLM Compressor recipe in YAML: presets with the names they apply to, and the ignore list."""
    refuse_chains(plan)
    targets: dict[str, list[str]] = {}
    left_out = {}
    for site in plan.sites:
        choice = _find_forward_choice(site)
        if choice is not None:
            scheme = SCHEMES.get((str(choice.a), str(choice.b)))
            if scheme is None:
                left_out[site.site] = f"no preset for {choice.a} @ {choice.b} with dynamic scales"
            elif scheme == "FP8_BLOCK" and (site.k % 128 or site.n % 128):
                left_out[site.site] = f"K {site.k}, N {site.n}: FP8_BLOCK requires multiples of 128"
            else:
                targets.setdefault(scheme, []).append(site.site)
    lines = [
        "# Made by loka from a plan. Activations are scaled per token or per block at run time; no calibration is needed."
    ]
    lines += [f"# left in high precision: {name}: {why}" for name, why in left_out.items()]
    lines += [
        "default_stage:",
        "  default_modifiers:",
        "    QuantizationModifier:",
        f"      scheme:{'' if targets else ' {}'}",
    ]
    lines += [f"        {scheme}: [{_quote_exact_names(names)}]" for scheme, names in targets.items()]
    lines += [f"      ignore: [{_quote_exact_names([*ignored(plan, model), *left_out])}]"]
    return "\n".join(lines) + "\n"


def _quote_exact_names(names: Iterable[str]) -> str:
    """Format names as exact regular expressions: a plain name would also match a module class."""
    return ", ".join(_quote(f"re:^{re.escape(name)}$") for name in names)


def to_modelopt(plan: Plan) -> str:
    """Return a ModelOpt config as Python source, since some keys are integers, which JSON does not support.

    All quantizers are switched off first, then those of the plan's sites on: later entries win.
    """
    refuse_chains(plan)
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    left_out = {}
    for site in plan.sites:
        choice = _find_forward_choice(site)
        if choice is None:
            continue
        attributes = QUANTIZERS.get((str(choice.a), str(choice.b)))
        if attributes is None:
            why = (
                "its blocks of activations have one fixed shape"
                if (choice.a, choice.b) == BLOCKS
                else "it has no such scales"
            )
            left_out[site.site] = f"{choice.a} @ {choice.b} cannot be expressed in ModelOpt: {why}"
            continue
        name = re.sub(r"([*?\[])", r"[\1]", site.site)  # the wildcards of `fnmatch`, escaped
        entries += [{"quantizer_name": f"{name}.{part}", "cfg": cfg} for part, cfg in attributes.items()]
    lines = [
        "# Made by loka from a plan: mtq.quantize(model, CONFIG, forward_loop). Input scales are computed at run time, as in the plan;",
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


FORMATS: dict[str, Callable[[Plan], str]] = {
    "torchao": lambda plan: str(to_torchao(plan)),
    "transformer-engine": to_transformer_engine,
    "llm-compressor": to_llm_compressor,
    "modelopt": to_modelopt,
}


def export(plan: Plan, to: str) -> str:
    """Export a plan as configuration text for another tool.

    Args:
        plan: the plan.
        to: "torchao", "transformer-engine", "llm-compressor" or "modelopt".

    Returns:
        Configuration or Python source for the tool.

    Raises:
        ValueError: unknown tool, or a plan with chains.

    Example:
        >>> print(export(plan, "torchao"))
    """
    if to not in FORMATS:
        raise ValueError(f"no export {to!r}; there are {', '.join(FORMATS)}")
    return FORMATS[to](plan)
