"""Charts as Vega-Lite specifications: plain dictionaries, data inline. Colours and fonts are the page's business (page.js).

A value is drawn with its interval, a decision with its limit. What was not measured is absent, and the text beside the chart says so.
"""

from typing import Any

from loka.records import Comparison, ProbeReport, Run

Spec = dict[str, Any]
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
ACCENT, SECOND, THIRD, QUIET = "accent", "second", "third", "quiet"  # names; page.js knows what they look like
RECIPE_COLOURS = {"tensorwise": SECOND, "rowwise_with_gw_hp": QUIET, "rowwise": ACCENT, "blockwise": THIRD}
PERCENT = ".3~f"


def _chart(description: str, **rest: Any) -> Spec:
    fit = {"type": "fit-x", "contains": "padding"}
    return {"$schema": SCHEMA, "description": description, "width": "container", "autosize": fit, **rest}


def draw_comparisons(comparisons: tuple[Comparison, ...]) -> Spec:
    """One row per run: the change of the metric with its interval, over the band that does not matter."""
    rows = [
        {
            "run": c.candidate,
            "change": 100 * c.relative_change.value,
            "low": 100 * c.relative_change.low,
            "high": 100 * c.relative_change.high,
            "outcome": c.outcome,
        }
        for c in comparisons
    ]
    margin = 100 * comparisons[0].margin
    ends = [end for c in comparisons for end in (c.relative_change.low, c.relative_change.high)]
    span = max([1.6 * margin, *(115 * abs(end) for end in ends)])
    x = {"type": "quantitative", "scale": {"domain": [-span, span]}, "axis": {"tickCount": 7}}
    y = {"field": "run", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 160}}
    tooltip = [{"field": f, "format": PERCENT, "title": f"{f}, %"} for f in ("change", "low", "high")]
    return _chart(
        f"Relative change of {comparisons[0].metric} against {comparisons[0].baseline}, with 95 % intervals and the margin",
        height=44 * len(rows),
        layer=[
            {
                "data": {"values": [{"from": -margin, "to": margin}]},
                "mark": {"type": "rect", "opacity": 0.14, "fill": {"expr": "accent"}},
                "encoding": {"x": {**x, "field": "from", "title": "change of log loss, %"}, "x2": {"field": "to"}},
            },
            {
                "data": {"values": [{"at": 0}]},
                "mark": {"type": "rule", "stroke": {"expr": "ink"}, "opacity": 0.5},
                "encoding": {"x": {**x, "field": "at"}},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "rule", "strokeWidth": 2, "stroke": {"expr": "ink"}},
                "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1, "fill": {"expr": "accent"}},
                "encoding": {"x": {**x, "field": "change"}, "y": y, "tooltip": tooltip},
            },
        ],
    )


def draw_curves(runs: tuple[Run, ...]) -> Spec:
    """Training loss by step."""
    rows = [{"run": run.name, "step": p.step, "loss": p.loss} for run in runs for p in run.curve]
    return _chart(
        "Training loss by step, one line per run",
        height=230,
        data={"values": rows},
        mark={"type": "line", "strokeWidth": 1.8},
        encoding={
            "x": {"field": "step", "type": "quantitative", "scale": {"zero": False}, "axis": {"tickMinStep": 1}},
            "y": {"field": "loss", "type": "quantitative", "scale": {"zero": False}, "title": "training loss"},
            "color": _colour_runs(runs),
            "tooltip": [{"field": "run"}, {"field": "step"}, {"field": "loss", "format": ".5f"}],
        },
    )


def draw_gaps(runs: tuple[Run, ...]) -> Spec | None:
    """Loss minus the first run's on the same batches: what the curves above are too close to show."""
    if len(runs) < 2:
        return None
    base = {p.step: p.loss for p in runs[0].curve}
    rows = [
        {"run": run.name, "step": p.step, "gap": 100 * (p.loss / base[p.step] - 1)}
        for run in runs[1:]
        for p in run.curve
        if base.get(p.step)
    ]
    return _chart(
        f"Training loss relative to {runs[0].name} on the same batches, in percent, by step",
        height=230,
        layer=[
            {
                "data": {"values": [{"at": 0}]},
                "mark": {"type": "rule", "stroke": {"expr": "ink"}, "opacity": 0.5},
                "encoding": {"y": {"field": "at", "type": "quantitative"}},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "line", "strokeWidth": 1.8},
                "encoding": {
                    "x": {"field": "step", "type": "quantitative", "scale": {"zero": False}},
                    "y": {"field": "gap", "type": "quantitative", "title": f"against {runs[0].name}, %"},
                    "color": {**_colour_runs(runs), "legend": None},
                    "tooltip": [{"field": "run"}, {"field": "step"}, {"field": "gap", "format": "+.3f"}],
                },
            },
        ],
    )


def _colour_runs(runs: tuple[Run, ...]) -> Spec:
    names = [run.name for run in runs]
    colours = [QUIET, ACCENT, SECOND, THIRD][: len(names)]
    scale = {"domain": names, "range": [{"expr": colour} for colour in colours]}
    return {"field": "run", "type": "nominal", "scale": scale, "legend": {"title": None, "orient": "top"}}


def draw_sites(probe: ProbeReport) -> Spec:
    """Every site and recipe: error against speed-up where speed was measured, error by site where it was not.

    page.js fills the data in from the sites, which are in the page already.
    """
    candidates = [c for site in probe.sites for c in site.candidates]
    timed = any(c.speedup for c in candidates)
    recipes = list(dict.fromkeys(c.recipe for c in candidates))
    colour = {
        "field": "recipe",
        "type": "nominal",
        "scale": {"domain": recipes, "range": [{"expr": RECIPE_COLOURS.get(r, QUIET)} for r in recipes]},
        "legend": {"title": None, "orient": "top"},
    }
    shape = {"field": "recipe", "type": "nominal", "scale": {"domain": recipes}, "legend": colour["legend"]}
    x = {"type": "quantitative", "scale": {"type": "log", "nice": False, "padding": 12}, "axis": {"tickCount": 5}}
    if timed:
        y: Spec = {"field": "speedup", "type": "quantitative", "title": "speed-up over bf16"}
    else:
        many = len(probe.sites) > 60
        y = {"field": "site", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 240, "grid": True}}
        if many:
            y = {"field": "index", "type": "quantitative", "scale": {"reverse": True}, "title": "site, in model order"}
    tooltip = [
        {"field": "site"},
        {"field": "recipe"},
        {"field": "error", "format": ".4f"},
        {"field": "low", "format": ".4f"},
        {"field": "high", "format": ".4f"},
    ]
    return _chart(
        "Error of every linear under every recipe, with the limit; choose a point for the site's page",
        height=420 if timed or len(probe.sites) > 60 else max(24 * len(probe.sites), 96),
        params=[{"name": "gemm", "value": "fprop"}],
        data={"values": []},
        transform=[{"filter": "datum.gemm == gemm"}],
        layer=[
            {
                "mark": {"type": "rule", "stroke": {"expr": "alarm"}, "strokeDash": [5, 4], "strokeWidth": 1.5},
                "encoding": {"x": {**x, "aggregate": "min", "field": "limit"}},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 5, "y": -8, "fill": {"expr": "alarm"}, "text": "limit"},
                "encoding": {"x": {**x, "aggregate": "min", "field": "limit"}},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6},
                "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y, "color": colour},
            },
            {
                "mark": {"type": "point", "filled": True, "size": 70, "opacity": 0.95, "cursor": "pointer"},
                "encoding": {
                    "x": {**x, "field": "error", "title": "error of the product"},
                    "y": y,
                    "color": colour,
                    "shape": shape,
                    "tooltip": tooltip,
                },
            },
        ],
    )


def draw_sensitivity(probe: ProbeReport) -> Spec | None:
    """Change of the end metric with each site alone in low precision."""
    rows: list[Spec] = [
        {"site": site.name, "change": 100 * c.value, "low": 100 * c.low, "high": 100 * c.high}
        for site in probe.sites
        if (c := site.metric_change) is not None
    ]
    if not rows:
        return None
    many = len(rows) > 60
    if many:
        rows = sorted(rows, key=lambda row: -abs(row["change"]))[:60]
    x = {"type": "quantitative", "axis": {"tickCount": 8}}
    y = {"field": "site", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 240, "grid": True}}
    return _chart(
        "Change of the loss when each site alone runs in low precision" + (", the 60 largest" if many else ""),
        height=max(22 * len(rows), 96),
        data={"values": rows},
        layer=[
            {
                "data": {"values": [{"at": 0}]},
                "mark": {"type": "rule", "stroke": {"expr": "ink"}, "opacity": 0.5},
                "encoding": {"x": {**x, "field": "at"}},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2, "opacity": 0.6, "stroke": {"expr": "second"}},
                "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y},
            },
            {
                "mark": {
                    "type": "point",
                    "filled": True,
                    "size": 60,
                    "opacity": 1,
                    "fill": {"expr": "second"},
                    "cursor": "pointer",
                },
                "encoding": {
                    "x": {**x, "field": "change", "title": "change of the loss, %"},
                    "y": y,
                    "tooltip": [
                        {"field": "site"},
                        *({"field": f, "format": "+.4f"} for f in ("change", "low", "high")),
                    ],
                },
            },
        ],
    )


def draw_histogram() -> Spec:
    """log2 |x| of one operand over the bands of a format scaled to its largest value. page.js fills the two data sets in."""
    x = {"type": "quantitative", "title": "log2 of the magnitude", "scale": {"zero": False, "nice": False}}
    bands = {
        "domain": ["full precision", "losing bits", "becomes zero"],
        "range": [{"expr": c} for c in (ACCENT, THIRD, "alarm")],
    }
    return _chart(
        "Histogram of magnitudes in powers of two, against the range of the format",
        height=150,
        layer=[
            {
                "data": {"name": "bands", "values": []},
                "mark": {"type": "rect", "opacity": 0.13},
                "encoding": {
                    "x": {**x, "field": "from"},
                    "x2": {"field": "to"},
                    "color": {"field": "band", "type": "nominal", "scale": bands, "legend": None},
                },
            },
            {
                "data": {"name": "bins", "values": []},
                "mark": {"type": "bar", "fill": {"expr": "ink"}, "opacity": 0.75, "binSpacing": 1},
                "encoding": {
                    "x": {**x, "field": "from", "bin": "binned"},
                    "x2": {"field": "to"},
                    "y": {"field": "share", "type": "quantitative", "title": "share", "axis": {"format": "%"}},
                    "tooltip": [
                        {"field": "from", "title": "from 2^"},
                        {"field": "share", "format": ".3%"},
                    ],
                },
            },
        ],
    )
