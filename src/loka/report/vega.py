"""What every chart shares. Charts are Vega-Lite specifications: plain dictionaries, data inline. Colours and fonts are the page's business (page.js).

A value is drawn with its interval, a decision with its limit. What was not measured is absent, and the text beside the chart says so.
"""

from typing import Any

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
ACCENT, SECOND, THIRD, QUIET = "accent", "second", "third", "quiet"  # names; page.js knows what they look like
RECIPE_COLOURS = {"tensorwise": SECOND, "rowwise_with_gw_hp": QUIET, "rowwise": ACCENT, "blockwise": THIRD}
PERCENT = ".3~f"


def make_chart(description: str, **rest: Any) -> Spec:
    """A specification as wide as its place."""
    fit = {"type": "fit-x", "contains": "padding"}
    return {"$schema": SCHEMA, "description": description, "width": "container", "autosize": fit, **rest}


def zero_line(axis: str, at: float = 0.0, **mark: Any) -> Spec:
    """A thin line across the chart."""
    return {
        "data": {"values": [{"at": at}]},
        "mark": {"type": "rule", "stroke": {"expr": "ink"}, "opacity": 0.5, **mark},
        "encoding": {axis: {"field": "at", "type": "quantitative"}},
    }


def colour_by(field: str, names: list[str], colours: list[str]) -> Spec:
    """A legend on top, one colour per name."""
    scale = {"domain": names, "range": [{"expr": colour} for colour in colours]}
    return {"field": field, "type": "nominal", "scale": scale, "legend": {"title": None, "orient": "top"}}
