"""Records to one HTML file: text and tables made here, charts drawn in the reader's browser from data inside the page.

Everything a reader needs without JavaScript (headline, comparisons, plan, environment) is plain HTML. Charts, filters and the pages
of single sites need it. A content security policy in the page forbids every network request.
"""

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from loka.records import GEMMS, Choice, ProbeReport, write_atomically
from loka.report import charts, sections
from loka.report.results import Results
from loka.report.runtime import load_runtime

Section = tuple[str, str, Callable[[Results], str]]
SECTIONS: tuple[Section, ...] = (
    ("quality", "Quality", sections.write_quality),
    ("sites", "Sites", sections.write_sites),
    ("plan", "Plan", sections.write_plan),
    ("made", "How it was made", sections.write_environment),
)


def render(results: Results) -> str:
    """The page."""
    written = [(anchor, name, text) for anchor, name, write in SECTIONS if (text := write(results))]
    parts = {
        "title": sections.escape(sections.name_report(results)),
        "style": _read("page.css"),
        "nav": "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name, _ in written),
        "body": sections.write_headline(results)
        + "".join(f'<section id="{anchor}">\n<h2>{name}</h2>\n{text}</section>\n' for anchor, name, text in written),
        "data": _collect(results),
        "runtime": load_runtime(),
        "script": _read("page.js"),
    }
    pieces = _read("page.html").split("@@")  # text, name, text, name, ...: a value is never scanned for names
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def write_html(results: Results, path: str | Path) -> None:
    """Write the page, atomically."""
    write_atomically(path, render(results).encode())


def _read(name: str) -> str:
    return (files("loka.report") / name).read_text(encoding="utf-8")


def _collect(results: Results) -> str:
    """What the script needs, as JSON that cannot end its own <script> element."""
    probe, plan = results.probe, results.plan
    data: dict[str, Any] = {
        "sites": _compact(msgspec.to_builtins(probe.sites)) if probe else [],
        "formats": msgspec.to_builtins(probe.formats) if probe else [],
        "limits": _limits(probe) if probe else {},
        "flopsOf": "model's" if probe and probe.flops_of == "model" else "probed",
        "choices": {site.site: [_brief(choice) for choice in site.choices] for site in plan.sites} if plan else {},
        "charts": _draw(results),
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _brief(choice: Choice) -> dict[str, Any]:
    return {"gemm": choice.gemm, "a": choice.a, "b": choice.b, "backend": choice.backend}


def _limits(probe: ProbeReport) -> dict[str, float]:
    return {gemm: probe.max_mere if gemm == "fprop" else probe.max_gradient_error for gemm in GEMMS}


def _compact(value: Any) -> Any:
    """Five digits are what a chart can show, and absent is shorter than null: half the size for a model of 2,000 sites."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items() if item is not None}
    return [_compact(item) for item in value] if isinstance(value, list) else value


def _draw(results: Results) -> dict[str, Any]:
    drawn: dict[str, Any] = {"histogram": charts.draw_histogram()}
    if results.comparisons:
        drawn["comparisons"] = charts.draw_comparisons(results.ordered_comparisons)
    if results.runs:
        drawn["curves"] = charts.draw_curves(results.ordered_runs)
        gaps = charts.draw_gaps(results.ordered_runs)
        if gaps is not None:
            drawn["gaps"] = gaps
    if results.probe:
        drawn["sites"] = charts.draw_sites(results.probe)
        sensitivity = charts.draw_sensitivity(results.probe)
        if sensitivity is not None:
            drawn["sensitivity"] = sensitivity
    return drawn
