"""Render records as one HTML file: text and tables are made here, charts are drawn in the browser from embedded data.

Everything a reader needs without JavaScript (headline, comparisons, plan, environment) is plain HTML. Charts, filters
and the pages of single sites need JavaScript. A content security policy in the page forbids every network request.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from loka.records import write_atomically
from loka.report import generative, headline, kernels, origin, quality, serving, sites, tuning
from loka.report.markup import escape
from loka.report.payload import collect, dump, write_chunks
from loka.report.results import Results


def require_charts() -> None:
    """Raise ValueError if the charting library is missing. Jobs that end with a report call this before they start."""
    try:
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise ValueError("the report embeds its charting library; install it: pip install 'loka[report]'") from error


@cache  # making the bundle takes two seconds
def load_runtime() -> str:
    """Return the JavaScript that draws the charts (Vega, Vega-Lite, vega-embed), safe between <script> tags.

    vl-convert contains it, so nothing is downloaded, neither here nor in the browser.
    """
    require_charts()
    import vl_convert

    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


Section = tuple[str, str, Callable[[Results], str]]
SECTIONS: tuple[Section, ...] = (
    ("tuning", "Tuning", tuning.write_tuning),
    ("quality", "Quality", quality.write_quality),
    ("sites", "Sites", sites.write_sites),
    ("plan", "Plan", sites.write_plan),
    ("mods", "Mods", quality.write_mods),
    ("drift", "Drift", sites.write_drift),
    ("memory", "Memory", sites.write_memory),
    ("kernels", "Kernels", kernels.write_kernels),
    ("generative", "Serving", generative.write_generative),
    ("served", "Under load", serving.write_serving),
    ("made", "How it was made", origin.write_environment),
)


def render(results: Results) -> str:
    """Render records as a page of text, tables, and charts that the browser draws.

    Args:
        results: the records of one job.

    Returns:
        One self-contained HTML document.

    Example:
        >>> render(Results(probe=report.record))[:15]
        '<!doctype html>'
    """
    written = [(anchor, name, text) for anchor, name, write in SECTIONS if (text := write(results))]
    body = headline.write_headline(results)
    return fill_page(headline.name_report(results), body, written, collect(results), write_chunks(results))


def fill_page(
    title: str, body: str, written: Sequence[tuple[str, str, str]], data: dict[str, Any], chunks: str = ""
) -> str:
    """Fill the page template. `written` has one (anchor, name, HTML) per section."""
    parts = {
        "title": escape(title),
        "style": _read("page.css"),
        "nav": "".join(f'<a href="#{anchor}">{name}</a>' for anchor, name, _ in written),
        "body": body
        + "".join(
            f'<section id="{anchor}" aria-labelledby="{anchor}-title">\n<h2 id="{anchor}-title">{name}</h2>\n{text}</section>\n'
            for anchor, name, text in written
        ),
        "data": dump(data),
        "chunks": chunks,
        "runtime": load_runtime(),
        "script": _read("page.js"),
    }
    pieces = _read("page.html").split("@@")  # alternately text and name, so inserted values are never parsed for names
    return "".join(parts[piece] if index % 2 else piece for index, piece in enumerate(pieces))


def write_html(results: Results, path: str | Path) -> None:
    """Write the page to a file, atomically.

    Args:
        results: the records of one job.
        path: the file to write.

    Example:
        >>> write_html(Results(probe=report.record, plans=(plan,)), "report.html")
    """
    write_atomically(path, render(results).encode())


def _read(name: str) -> str:
    return (files("loka.report") / name).read_text(encoding="utf-8")
