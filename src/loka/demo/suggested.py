"""The mods that Probe's findings speak for: those that leave a trained model what it is are applied, the others are listed.

An architecture change computes another function and belongs in front of a training from scratch; the demo continues one checkpoint, so that every run
starts from the same weights. The prediction layer is protected whatever was found: it is a thousandth of the work and decides the metric.
"""

from typing import Any

import msgspec
from torch import nn

from loka import mods
from loka.records import ModLeft, ModSummary, ProbeReport

__all__ = ["apply_suggested", "protected_sites"]

ALWAYS = "protect_intermediates"
NOT_HERE = {
    "fuse": "for serving, after training",
    "align_shapes": "it changes the shapes Probe has measured: apply it before the probe",
}


def apply_suggested(model: nn.Module, report: ProbeReport, example: Any, *, name: str) -> ModSummary:
    """Rewrite the model in place; the summary says what was done, and what was left for another training."""
    suggestions = mods.suggest(report, model, example=example)
    found = {s.mod: s for s in suggestions}
    keep = [m for m in found if mods.find(m).effect != "architecture" and m not in NOT_HERE]
    chosen = list(dict.fromkeys([ALWAYS, *keep]))
    summary = mods.apply(model, chosen, example=example, model_name=name).summary
    left = [
        ModLeft(mod=s.mod, site=site, why=_why_not(s.mod, s.why))
        for s in suggestions
        if s.mod not in chosen
        for site in s.sites
    ]
    return msgspec.structs.replace(summary, left=[*summary.left, *left])


def _why_not(mod: str, why: str) -> str:
    reason = NOT_HERE.get(mod, "another function: for a training from scratch (loka train --mods)")
    return f"suggested ({why}); not applied to this checkpoint: {reason}"


def protected_sites(model: nn.Module, report: ProbeReport) -> dict[str, str]:
    """Overrides of a plan: what is protected stays in high precision."""
    modules = dict(model.named_modules())
    return {site.name: "high" for site in report.sites if mods.is_protected(modules[site.name], site.name)}
