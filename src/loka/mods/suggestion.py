"""Suggest: from what Probe saw at each site, the mods that would make more of the model safe or fast.

    outlier channels or heavy tails in the input     block_norm    the values of a block become bounded, where a norm makes the input
    an input far from zero                           no_bias       where the mean of x is a bias of the layer before (or of its norm), not the data's own
    an unsafe GEMM with few outputs                  protect_intermediates    a prediction layer is cheap and decides the metric
    a non-finite value, sigmoid-like amplification   hard_swish
    K or N that kernels refuse or pad                align_shapes
    safe, but slow                                   fuse          quantisation is the cost; fused into the layer before it is free

Statistics do not say what feeds a site, and two of these depend on it: a mean that raw data has is no bias, and without a norm there is none to replace. So both are
proposed only with the model at hand, where a run on the example shows a bias or a norm before the site; `unjudged` lists what waits for that.

A suggestion is a reading of statistics, not a promise: apply, train or fine-tune, probe again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from loka.mods.editor import FEW_OUTPUTS
from loka.mods.feeding import NEEDS_FEEDING, Feeding
from loka.mods.registry import MODS
from loka.records import ProbeReport, Site, TensorStats

HEAVY_KURTOSIS = 50.0
FAR_FROM_ZERO = 2.0  # |mean| over std: the constant part carries more than 80 % of the energy
ALIGNMENT = 16


class HasRecord(Protocol):
    """What `Probe.evaluate` returns."""

    @property
    def record(self) -> ProbeReport:
        """The report's record."""
        ...


@dataclass(frozen=True)
class Suggestion:
    """A mod, the sites it is for, and what at these sites speaks for it.

    Args:
        mod: its name.
        sites: where.
        why: in words.

    Example:
        >>> for suggestion in loka.mods.suggest(report): print(suggestion)
    """

    mod: str
    sites: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return f"{self.mod}: {self.why} ({len(self.sites)} sites: {', '.join(self.sites[:4])}{', ...' if len(self.sites) > 4 else ''})"


def suggest(
    report: "ProbeReport | HasRecord", model: nn.Module | None = None, *, example: Any = None
) -> list[Suggestion]:
    """The mods that Probe's findings speak for, those that concern the most FLOPs first.

    Args:
        report: what `Probe.evaluate` returned, or its record.
        model: the model that was probed, wrapped or not. Without it, mods whose use depends on what feeds a site are not proposed.
        example: one input of it, as for `apply`.

    Returns:
        One suggestion for each mod, with the sites it is for.

    Example:
        >>> for suggestion in suggest(report, model, example=batch):
        ...     print(suggestion)
    """
    record, feeding = _record(report), None if model is None else Feeding.of(model, example)
    found: dict[str, dict[str, str]] = {}
    for site in record.sites:
        for mod, why in _read(site).items():
            if mod not in NEEDS_FEEDING or (feeding is not None and feeding.fits(mod, site.name)):
                found.setdefault(mod, {})[site.name] = why
    shares = {site.name: site.flops_share for site in record.sites}
    ranked = sorted(found, key=lambda mod: (-sum(shares[name] for name in found[mod]), mod))
    return [Suggestion(mod, tuple(found[mod]), _join(found[mod])) for mod in ranked]


def unjudged(report: "ProbeReport | HasRecord") -> dict[str, tuple[str, ...]]:
    """The mods that a report alone cannot decide about: their sites, for which `suggest` wants the model.

    Args:
        report: what `Probe.evaluate` returned, or its record.

    Returns:
        Sites by mod; empty where nothing of the kind was found.

    Example:
        >>> loka.mods.unjudged(report)
    """
    sites = _record(report).sites
    found = {mod: tuple(site.name for site in sites if mod in _read(site)) for mod in NEEDS_FEEDING}
    return {mod: names for mod, names in found.items() if names}


def _record(report: "ProbeReport | HasRecord") -> ProbeReport:
    return report if isinstance(report, ProbeReport) else report.record


def _read(site: Site) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for rule in _RULES:
        for mod, why in rule(site).items():
            reasons.setdefault(mod, why)
    return reasons


def _believe_probe(site: Site) -> dict[str, str]:
    """What Probe's own verdicts name: a mod's name, or its words for the prediction layer."""
    out: dict[str, str] = {}
    for verdict in site.verdicts:
        text = verdict.suggested_mod or ""
        if "prediction layer" in text:
            out["protect_intermediates"] = "an unsafe GEMM of a prediction layer"
        for name in MODS:
            if text.startswith(name):
                out[name] = text.removeprefix(name).lstrip(": ") or verdict.reason
    return out


def _read_input(site: Site) -> dict[str, str]:
    """Statistics of the input at a site with an unsafe GEMM."""
    x = _stats(site, "x")
    if x is None or not _unsafe(site) or site.n <= FEW_OUTPUTS:
        return {}
    out: dict[str, str] = {}
    if x.outlier_channels or x.kurtosis > HEAVY_KURTOSIS:
        out["block_norm"] = "outliers in the input: a norm in fixed blocks bounds it"
    if x.std > 0 and abs(x.mean) > FAR_FROM_ZERO * x.std:
        out["no_bias"] = "the input is far from zero: a bias before it has grown"
    if x.non_finite:
        out["hard_swish"] = "non-finite inputs: a smooth activation amplified an outlier"
    return out


def _read_outputs(site: Site) -> dict[str, str]:
    if _unsafe(site) and site.n <= FEW_OUTPUTS:
        return {"protect_intermediates": "few outputs and an unsafe GEMM: a prediction layer"}
    return {}


def _read_shape(site: Site) -> dict[str, str]:
    if site.n <= FEW_OUTPUTS or (site.k % ALIGNMENT == 0 and site.n % ALIGNMENT == 0):
        return {}
    return {"align_shapes": f"K or N is no multiple of {ALIGNMENT}, which FP8 kernels need"}


def _read_speed(site: Site) -> dict[str, str]:
    slow = [v for v in site.verdicts if v.safety == "safe" and v.speed == "slow"]
    return {"fuse": "safe, but quantisation eats the gain: fuse it into the layer before"} if slow else {}


_RULES: tuple[Callable[[Site], dict[str, str]], ...] = (
    _believe_probe,
    _read_input,
    _read_outputs,
    _read_shape,
    _read_speed,
)


def _unsafe(site: Site) -> bool:
    return any(verdict.safety == "unsafe" for verdict in site.verdicts)


def _stats(site: Site, role: str) -> TensorStats | None:
    return next((stats for stats in site.stats if stats.role == role), None)


def _join(reasons: dict[str, str]) -> str:
    return "; ".join(dict.fromkeys(reasons.values()))
