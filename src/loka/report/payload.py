"""The data for the page's script, compact enough for 2,000 sites.

    overview     names, one row per candidate for the map, one row per site for the table; strings are stored once and
                 referred to by number
    chunks       all details, `CHUNK` sites each, parsed when a reader opens a site; deflated if there are many sites

Floats are cut to five digits, which is enough for a chart, and nulls are omitted: this halves the size.
"""

import base64
import json
import zlib
from typing import Any

import msgspec

from loka.records import GEMMS, Choice, Gemm, ProbeReport, Site, SitePlan
from loka.report import kernel_charts, quality_charts, serving, site_charts
from loka.report.results import Results
from loka.report.vega import RECIPE_COLOURS

CHUNK = 25  # sites parsed together
PACKED = 200  # with more sites than this, chunks are deflated


class Words:
    """Numbers strings, so that each is stored once."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def __call__(self, text: str | None) -> int | None:
        """Return the number of a string; None for None."""
        return None if text is None else self.known.setdefault(text, len(self.known))


def dump(value: Any) -> str:
    """Return JSON with every "<" escaped, so that it cannot end its own <script> element."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def compact(value: Any) -> Any:
    """Round floats to five digits, and drop nulls and empty lists."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items() if item is not None and item != []}
    return [compact(item) for item in value] if isinstance(value, list) else value


def collect(results: Results) -> dict[str, Any]:
    """Return the overview."""
    probe, plan = results.probe, results.plan
    words = Words()
    planned = {site.site: site for site in plan.sites} if plan else {}
    chained = plan.chained if plan else set()
    sites = probe.sites if probe else []
    table = [_table_row(number, site, planned.get(site.name), probe, words) for number, site in enumerate(sites)]
    if probe is None and plan is not None:
        table = [_plan_only_row(number, site, words) for number, site in enumerate(plan.sites)]
    for row, name in zip(table, [site.name for site in sites] or list(planned), strict=True):
        if name in chained:
            row["h"] = 1
    data = {
        "names": [site.name for site in sites] or [site.site for site in planned.values()],
        "points": {gemm: _points(probe, gemm, words) for gemm in GEMMS} if probe else {},
        "table": table,
        "words": [],
        "formats": msgspec.to_builtins(probe.formats) if probe else [],
        "limits": {g: probe.max_mere if g == "fprop" else probe.max_gradient_error for g in GEMMS} if probe else {},
        "flopsOf": "model's" if probe and probe.flops_of == "model" else "probed",
        "hasPlan": plan is not None,
        "chunk": CHUNK,
        "charts": draw(results),
    }
    data["words"] = list(words.known)
    return data


def _points(probe: ProbeReport, gemm: Gemm, words: Words) -> list[list[Any]]:
    """Return rows of [site, recipe, backend, error, low, high], extended by [speed-up, low, high] if measured."""
    rows = []
    for number, site in enumerate(probe.sites):
        for c in site.candidates:
            error = c.error
            if c.gemm != gemm or error is None:
                continue
            speed = [c.speedup.value, c.speedup.low, c.speedup.high] if c.speedup else []
            values = [float(f"{v:.4g}") for v in (error.value, error.low, error.high, *speed)]
            rows.append([number, words(c.recipe), words(c.backend), *values])
    return rows


def _table_row(
    number: int, site: Site, plan: SitePlan | None, probe: ProbeReport | None, words: Words
) -> dict[str, Any]:
    unsafe = any(v.safety == "unsafe" for v in site.verdicts)
    worst = max((e.high for c in site.candidates if (e := c.error) is not None), default=0.0)
    row: dict[str, Any] = {
        "i": number,
        "k": site.k,
        "n": site.n,
        "f": float(f"{site.flops_share:.4g}"),
        "e": float(f"{worst:.4g}"),
    }
    if unsafe:
        row["u"] = 1
    if plan is not None:
        row["c"] = {choice.gemm: _brief(choice, words) for choice in plan.choices}
    else:
        row["v"] = {v.gemm: [words(v.safety), words(v.speed), words(v.reason)] for v in site.verdicts}
    return row


def _plan_only_row(number: int, site: SitePlan, words: Words) -> dict[str, Any]:
    choices = {choice.gemm: _brief(choice, words) for choice in site.choices}
    return {"i": number, "k": site.k, "n": site.n, "f": float(f"{site.flops_share:.4g}"), "e": 0, "c": choices}


def _brief(choice: Choice, words: Words) -> list[Any]:
    """Return [a, b, backend, reason, error, speed-up]; a and b are None in high precision."""
    numbers = [None if v is None else float(f"{v:.4g}") for v in (choice.expected_error, choice.expected_speedup)]
    return [words(choice.a), words(choice.b), words(choice.backend), words(choice.reason), *numbers]


def write_chunks(results: Results) -> str:
    """Return the <script> elements with all details of each site."""
    probe = results.probe
    if probe is None:
        return ""
    planned = {site.site: site for site in results.plan.sites} if results.plan else {}
    pieces = []
    for start in range(0, len(probe.sites), CHUNK):
        sites = []
        for site in probe.sites[start : start + CHUNK]:
            detail = msgspec.to_builtins(site)
            plan = planned.get(site.name)
            detail["choices"] = msgspec.to_builtins(plan.choices) if plan else []
            sites.append(compact(detail))
        text, number = dump(sites), start // CHUNK
        if len(probe.sites) > PACKED:
            packed = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
            pieces.append(f'<script type="text/plain" id="chunk-{number}" data-packed="deflate">{packed}</script>')
        else:
            pieces.append(f'<script type="application/json" id="chunk-{number}">{text}</script>')
    return "\n".join(pieces)


def draw(results: Results) -> dict[str, Any]:
    """Return the specifications of all charts that the records allow."""
    drawn: dict[str, Any] = {}
    if results.comparisons:
        drawn["comparisons"] = quality_charts.draw_comparisons(results.ordered_comparisons)
    if results.runs:
        drawn["curves"] = quality_charts.draw_curves(results.ordered_runs)
        drawn["gaps"] = quality_charts.draw_gaps(results.ordered_runs)
    if results.probe:
        drawn |= _draw_sites(results, results.probe)
    if results.drift:
        drawn["drift"] = site_charts.draw_drift(results.drift)
    for number, bench in enumerate(results.benches):
        drawn[f"roofline-{number}"] = kernel_charts.draw_roofline(bench)
    for number, rows in enumerate(results.rows):
        drawn[f"rows-{number}"] = kernel_charts.draw_rows(rows)
    for number, done in enumerate(results.quantized):
        drawn[f"waterfall-{number}"] = kernel_charts.draw_waterfall(done)
    for number, analysis in enumerate(results.analyses):
        drawn[f"layers-{number}"] = kernel_charts.draw_layers(analysis)
    for number, test in enumerate(results.loads):
        drawn[f"load-{number}"] = serving.draw_load(test)
    return {name: spec for name, spec in drawn.items() if spec is not None}


def _draw_sites(results: Results, probe: ProbeReport) -> dict[str, Any]:
    seen = {c.recipe for site in probe.sites for c in site.candidates if c.error is not None}
    recipes = [*(r for r in RECIPE_COLOURS if r in seen), *sorted(seen - RECIPE_COLOURS.keys())]
    least = results.plan.min_speedup if results.plan and results.plan.min_speedup else 1.05
    drawn: dict[str, Any] = {
        "histogram": site_charts.draw_histogram(),
        "sensitivity": site_charts.draw_sensitivity(probe),
    }
    if any(c.speedup for site in probe.sites for c in site.candidates):
        drawn["speeds"] = site_charts.draw_speeds(recipes, probe.environment.device, least)
    else:
        drawn["sites"] = site_charts.draw_sites(recipes, len(probe.sites))
    return drawn
