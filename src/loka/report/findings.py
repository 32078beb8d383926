"""Probe findings besides errors: predicted cost and chain of each linear, hazards, and what was not observed."""

from loka.records import Interval, ProbeReport, Site
from loka.report.markup import about, chip, dotted, escape, mono, table

ROWS = 200  # shown in the table of costs
_WAYS = ("chain", "rowwise", "blockwise", "tensorwise")  # in order of preference: in its chain, then the finest recipe


def write_findings(probe: ProbeReport) -> str:
    """Return the tables of predicted costs and of warnings; empty if there are neither."""
    return _write_costs(probe) + _write_warnings(probe)


def _write_costs(probe: ProbeReport) -> str:
    chains = {name: unit.name for unit in probe.chains for name in unit.linears}
    found = [(site, *cost) for site in probe.sites if (cost := _cost_of(site)) is not None]
    if not found:
        return ""
    found.sort(key=lambda entry: -entry[2].high)
    rows = [
        [
            f'<button type="button" class="link mono" data-site="{escape(site.name)}">{dotted(site.name)}</button>',
            escape(way),
            f"{100 * harm.value:.2g} %",
            f"{100 * harm.high:.2g} %",
            dotted(chains[site.name]) if site.name in chains else escape(probe.alone.get(site.name, "")),
        ]
        for site, way, harm in found[:ROWS]
    ]
    head = ("site", "runs as", "typical change of the loss", "upper bound", "its chain, or why it is in none")
    share = probe.margin / max(probe.units, 1) ** 0.5
    return (
        "<h3>What each linear may cost</h3>"
        + about(
            f"Predicted relative change of the loss caused by rounding in the linear's forward product (the error weighted by the gradient): as it runs in its chain, otherwise "
            f"with the finest recipe that was scored. Each of {probe.units} units may cost {100 * share:.2g} %: the margin of {100 * probe.margin:.2g} % divided by the square root of their number."
        )
        + table(head, rows, numeric=(2, 3), caption="Predicted cost, highest first")
    )


def _cost_of(site: Site) -> tuple[str, Interval] | None:
    """Return how the forward product runs and the harm predicted for it; None if it was not scored."""
    harms = {c.recipe: c.harm for c in site.candidates if c.gemm == "fprop" and c.harm is not None}
    return next(((way, harm) for way in _WAYS if (harm := harms.get(way)) is not None), None)


def _write_warnings(probe: ProbeReport) -> str:
    entries: list[tuple[str, str, str]] = []
    for site in probe.sites:
        entries += [(site.name, "hazard", f"{alarm.text}; what helps: {alarm.help}") for alarm in site.alarms]
        entries += [(site.name, "cannot be converted", site.kept)] if site.kept else []
        entries += [(site.name, "no longer observed", site.off)] if site.off else []
    entries += [(part.name or "the model itself", "not observed", part.reason) for part in probe.unseen]
    entries += [("", "chains", probe.no_chains)] if probe.no_chains else []
    entries += [("", "note", note) for note in probe.notes]
    if not entries:
        return ""
    rows = [[mono(name), chip(what, "bad" if what == "hazard" else ""), escape(text)] for name, what, text in entries]
    return "<h3>What to know before trusting this</h3>" + table(
        ("site", "what", "why"), rows, caption="Hazards, and what was left out"
    )
