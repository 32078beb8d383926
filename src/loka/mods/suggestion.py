"""Suggest mods that would make more of the model safe or fast, from what Probe found at each site.

    outlier channels or heavy tails in the input     block_norm    bounds the values, if a norm makes the input
    an input far from zero                           no_bias       if the mean is a bias of the previous layer or norm
    an unsafe GEMM with few outputs                  protect_intermediates    a prediction layer: cheap and critical
    a non-finite value, sigmoid-like amplification   hard_swish
    K or N that kernels refuse or pad                align_shapes
    safe, but slow                                   fuse          quantization is free when fused into the layer before

The first two depend on what feeds a site, which statistics do not tell: a mean of the raw data is not a bias, and
without a norm there is nothing to replace. They are suggested only if the model is given and a run on the example shows
a norm or a bias before the site. `unjudged` lists the sites that need such a run.

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
from loka.records.prose import name_some

HEAVY_KURTOSIS = 50.0
FAR_FROM_ZERO = 2.0  # |mean| over std: the constant part carries more than 80 % of the energy
ALIGNMENT = 16


class HasRecord(Protocol):
    """An object with a probe report as `record`, as `Probe.evaluate` returns it."""

    @property
    def record(self) -> ProbeReport:
        """The report's record."""
        ...


@dataclass(frozen=True)
class Suggestion:
    """A suggested mod, with the sites that would gain from it.

    Args:
        mod: the mod's name.
        sites: names of the sites.
        why: the reason, in words.

    Example:
        >>> for suggestion in loka.mods.suggest(report): print(suggestion)
    """

    mod: str
    sites: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return (
            f"{self.mod}: {self.why} ({len(self.sites)} site{'s' * (len(self.sites) != 1)}: {name_some(self.sites, 4)})"
        )


def suggest(
    report: "ProbeReport | HasRecord", model: nn.Module | None = None, *, example: Any = None
) -> list[Suggestion]:
    """Suggest mods from a probe report, those that affect the most FLOPs first.

    Args:
        report: what `Probe.evaluate` returned, or its record.
        model: the model that was probed, wrapped or not. Without it, `block_norm` and `no_bias` are not suggested.
        example: one input of the model, as for `apply`.

    Returns:
        One suggestion for each mod, with its sites.

    Example:
        >>> for suggestion in suggest(report, model, example=batch):
        ...     print(suggestion)
    """
    record, feeding = _record(report), None if model is None else Feeding.of(model, example)
    found: dict[str, dict[str, str]] = {}
    for site in record.sites:
        for mod, why in _find_reasons(site).items():
            if mod not in NEEDS_FEEDING or (feeding is not None and feeding.fits(mod, site.name)):
                found.setdefault(mod, {})[site.name] = why
    shares = {site.name: site.flops_share for site in record.sites}
    ranked = sorted(found, key=lambda mod: (-sum(shares[name] for name in found[mod]), mod))
    return [Suggestion(mod, tuple(found[mod]), _join(found[mod])) for mod in ranked]


def unjudged(report: "ProbeReport | HasRecord") -> dict[str, tuple[str, ...]]:
    """Return the mods that a report alone cannot decide on, with the sites for which `suggest` needs the model.

    Args:
        report: what `Probe.evaluate` returned, or its record.

    Returns:
        Sites by mod; empty if there are none.

    Example:
        >>> loka.mods.unjudged(report)
    """
    sites = _record(report).sites
    found = {mod: tuple(site.name for site in sites if mod in _find_reasons(site)) for mod in NEEDS_FEEDING}
    return {mod: names for mod, names in found.items() if names}


def _record(report: "ProbeReport | HasRecord") -> ProbeReport:
    return report if isinstance(report, ProbeReport) else report.record


def _find_reasons(site: Site) -> dict[str, str]:
    """Return the mods that a site's statistics suggest, with the reason."""
    reasons: dict[str, str] = {}
    for rule in _RULES:
        for mod, why in rule(site).items():
            reasons.setdefault(mod, why)
    return reasons


def _read_verdicts(site: Site) -> dict[str, str]:
    """Read the mods that Probe's verdicts name themselves, including its wording for prediction layers."""
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
    """Apply the rules on input statistics to a site with an unsafe GEMM."""
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
    return {"align_shapes": f"K or N is not a multiple of {ALIGNMENT}, which FP8 kernels need"}


def _read_speed(site: Site) -> dict[str, str]:
    slow = [v for v in site.verdicts if v.safety == "safe" and v.speed == "slow"]
    return {"fuse": "safe, but quantisation eats the gain: fuse it into the layer before"} if slow else {}


_RULES: tuple[Callable[[Site], dict[str, str]], ...] = (
    _read_verdicts,
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
