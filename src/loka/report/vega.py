"""Building blocks of all charts. Charts are Vega-Lite specifications: plain dictionaries with inline data.

page.js sets colors and fonts. Values are drawn with their interval, decisions with their limit. What was not measured
is absent, and the text next to the chart says so.
"""

from typing import Any

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
ACCENT, SECOND, THIRD, QUIET = "accent", "second", "third", "quiet"  # color names, defined in page.css
SERIES = [QUIET, ACCENT, SECOND, THIRD, "alarm", "ink"]
RECIPE_COLOURS = {"tensorwise": SECOND, "rowwise_with_gw_hp": QUIET, "rowwise": ACCENT, "blockwise": THIRD}
PERCENT = ".3~f"
DASHED = {"strokeDash": [5, 4]}
LIMIT = {"type": "rule", "stroke": {"expr": "alarm"}, **DASHED, "strokeWidth": 1.5}
SITES = {"field": "site", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 240, "grid": True}}


def make_chart(description: str, **rest: Any) -> Spec:
    """Return a chart specification that fills the width of its container."""
    fit = {"type": "fit-x", "contains": "padding"}
    return {"$schema": SCHEMA, "description": description, "width": "container", "autosize": fit, **rest}


def draw(mark: Spec, rows: list[Spec] | None = None, **encoding: Any) -> Spec:
    """Return a layer: a mark, its data (the chart's if `rows` is None) and its encoding. A plain string is a field."""
    data = {} if rows is None else {"data": {"values": rows}}
    fields = {name: {"field": each} if isinstance(each, str) else each for name, each in encoding.items()}
    return {**data, "mark": mark, "encoding": fields}


def number(
    field: str | None = None,
    title: str | None = None,
    *,
    log: int | None = None,
    ticks: int | None = None,
    format: str | None = None,
    **rest: Any,
) -> Spec:
    """Return a numeric axis. `log` makes it logarithmic, with this padding."""
    scale = {} if log is None else {"scale": {"type": "log", "nice": False, **({"padding": log} if log else {})}}
    axis = {name: value for name, value in (("format", format), ("tickCount", ticks)) if value is not None}
    named = {name: value for name, value in (("field", field), ("title", title)) if value is not None}
    return {"type": "quantitative", **named, **scale, **({"axis": axis} if axis else {}), **rest}


def point(size: int, opacity: float, **rest: Any) -> Spec:
    """Return a filled point mark."""
    return {"type": "point", "filled": True, "size": size, "opacity": opacity, **rest}


def tooltip(*fields: str, **formats: str) -> list[Spec]:
    """Return a tooltip of plain fields, then fields with "format" or "format:title"."""
    said = [{"field": field} for field in fields]
    for field, text in formats.items():
        shape, _, title = text.partition(":")
        said.append({"field": field, "format": shape, **({"title": title} if title else {})})
    return said


def zero_line(axis: str, at: float = 0.0, **mark: Any) -> Spec:
    """Return a thin line across the chart."""
    return draw(
        {"type": "rule", "stroke": {"expr": "ink"}, "opacity": 0.5, **mark}, [{"at": at}], **{axis: number("at")}
    )


def colour_by(field: str, names: list[str], colours: list[str]) -> Spec:
    """Return a color encoding with a legend on top, one color per name."""
    scale = {"domain": names, "range": [{"expr": colour} for colour in colours]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {"title": None, "orient": "top"}}


def shape_by(field: str, names: list[str] | None = None) -> Spec:
    """Return a shape encoding with a legend on top, one shape per name."""
    scale = {} if names is None else {"scale": {"domain": names}}
    return {"field": field, "type": "nominal", "legend": {"title": None, "orient": "top"}, **scale}


def cycle(names: list[str], first: int = 0) -> list[str]:
    """Return one color per name, starting over when they run out."""
    return [SERIES[(index + first) % len(SERIES)] for index in range(len(names))]
