"""What a probe found beside errors: what each linear may cost, the chain it is in, hazards at inputs, what stays as it is and why, what nobody looked at."""

from loka.records import Interval, ProbeReport, Site
from loka.report.markup import about, chip, escape, row, table

ROWS = 200  # of the table of costs
_WAYS = ("chain", "rowwise", "blockwise", "tensorwise")  # as it runs, then the finest


def write_findings(probe: ProbeReport) -> str:
    """Tables of costs and of what a reader must know before trusting them; empty where there is nothing to say."""
    return _write_costs(probe) + _write_warnings(probe)


def _write_costs(probe: ProbeReport) -> str:
    chains = {name: unit.name for unit in probe.chains for name in unit.linears}
    found = [(site, *cost) for site in probe.sites if (cost := _cost_of(site)) is not None]
    if not found:
        return ""
    found.sort(key=lambda entry: -entry[2].high)
    rows = [
        row(
            [
                f'<button type="button" class="link mono" data-site="{escape(site.name)}">{escape(site.name)}</button>',
                escape(way),
                f"{100 * harm.value:.2g} %",
                f"{100 * harm.high:.2g} %",
                escape(chains.get(site.name) or probe.alone.get(site.name, "")),
            ],
            numeric=(2, 3),
        )
        for site, way, harm in found[:ROWS]
    ]
    head = ("site", "way", "usual change of the loss", "at most", "chain it is in, or why in none")
    share = probe.margin / max(probe.units, 1) ** 0.5
    return (
        "<h3>What each linear may cost</h3>"
        + about(
            f"Predicted relative change of the loss by its forward product: the error weighed by the gradient, as it runs in its chain, else under the finest recipe that was "
            f"scored. Each of {probe.units} units may cost {100 * share:.2g} %, the margin of {100 * probe.margin:.2g} % divided by the square root of their number."
        )
        + table(head, rows, numeric=(2, 3), caption="Predicted cost, dearest first")
    )


def _cost_of(site: Site) -> tuple[str, Interval] | None:
    """(way, harm) of the forward product."""
    harms = {c.recipe: c.harm for c in site.candidates if c.gemm == "fprop" and c.harm is not None}
    return next(((way, harm) for way in _WAYS if (harm := harms.get(way)) is not None), None)


def _write_warnings(probe: ProbeReport) -> str:
    entries: list[tuple[str, str, str]] = []
    for site in probe.sites:
        entries += [(site.name, "hazard", f"{alarm.text}; what helps: {alarm.help}") for alarm in site.alarms]
        entries += [(site.name, "stays as it is", site.kept)] if site.kept else []
        entries += [(site.name, "not looked at any more", site.off)] if site.off else []
    entries += [(part.name or "the model itself", "not looked at", part.reason) for part in probe.unseen]
    entries += [("", "chains", probe.no_chains)] if probe.no_chains else []
    entries += [("", "while looking", note) for note in probe.notes]
    if not entries:
        return ""
    rows = [
        row([f'<span class="mono">{escape(name)}</span>', chip(what, "bad" if what == "hazard" else ""), escape(text)])
        for name, what, text in entries
    ]
    return "<h3>What to know before trusting this</h3>" + table(
        ("site", "what", "why"), rows, caption="Hazards, and what was left out"
    )
