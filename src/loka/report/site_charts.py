"""Charts of sites: error by place or by speed-up, the model's sensitivity, histograms, drift. page.js fills data in that the page has already."""

from loka.records import DriftReport, ProbeReport
from loka.report.vega import ACCENT, QUIET, RECIPE_COLOURS, SECOND, THIRD, Spec, colour_by, make_chart, zero_line

__all__ = ["draw_drift", "draw_histogram", "draw_sensitivity", "draw_sites", "draw_speeds"]

MANY = 60  # sites; above, one line each would be a wall


_ERROR = {"type": "quantitative", "scale": {"type": "log", "nice": False, "padding": 12}, "axis": {"tickCount": 5}}
_TOOLTIP: list[Spec] = [
    {"field": "site"},
    {"field": "recipe"},
    {"field": "backend"},
    *({"field": name, "format": ".4f"} for name in ("error", "low", "high")),
]


def _style_recipes(recipes: list[str]) -> tuple[Spec, Spec]:
    """Colour and shape: the shape tells recipes apart where colours do not."""
    colour = colour_by("recipe", recipes, [RECIPE_COLOURS.get(r, QUIET) for r in recipes])
    shape = {"field": "recipe", "type": "nominal", "scale": {"domain": recipes}, "legend": colour["legend"]}
    return colour, shape


def _limit_line() -> list[Spec]:
    x = {**_ERROR, "aggregate": "min", "field": "limit"}
    rule = {"type": "rule", "stroke": {"expr": "alarm"}, "strokeDash": [5, 4], "strokeWidth": 1.5}
    text = {"type": "text", "align": "left", "dx": 5, "y": -8, "fill": {"expr": "alarm"}, "text": "limit"}
    return [{"mark": rule, "encoding": {"x": x}}, {"mark": text, "encoding": {"x": x}}]


def draw_sites(recipes: list[str], sites: int) -> Spec:
    """Error by place in the model, one row per site; above `MANY` sites, one height each."""
    colour, shape = _style_recipes(recipes)
    y: Spec = {
        "field": "site",
        "type": "nominal",
        "sort": None,
        "title": None,
        "axis": {"labelLimit": 240, "grid": True},
    }
    many = sites > MANY
    if many:
        scale = {"reverse": True, "nice": False, "domain": [0, sites]}
        y = {"field": "index", "type": "quantitative", "scale": scale, "title": "site, in model order"}
    x = {**_ERROR, "field": "at", "title": "error of the product"}
    rule = {"type": "rule", "strokeWidth": 1 if many else 2, "opacity": 0.25 if many else 0.6}
    point = {
        "type": "point",
        "filled": True,
        "size": 24 if many else 70,
        "opacity": 0.55 if many else 0.95,
        "cursor": "pointer",
    }
    return make_chart(
        "Error of every linear under every recipe, with the limit; choose a point for the site's page",
        height=460 if many else max(24 * sites, 96),
        data={"values": []},
        layer=[
            *_limit_line(),
            {
                "mark": rule,
                "encoding": {"x": {**_ERROR, "field": "from"}, "x2": {"field": "to"}, "y": y, "color": colour},
            },
            {"mark": point, "encoding": {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": _TOOLTIP}},
        ],
    )


def _room(y: Spec, least: float) -> list[Spec]:
    """Invisible points that keep both limits away from the edges, so that all four corners exist."""
    hidden = {"type": "point", "opacity": 0, "tooltip": False}
    beyond = {"calculate": "datum.limit * 1.15", "as": "beyond"}
    return [
        {"transform": [beyond], "mark": hidden, "encoding": {"x": {**_ERROR, "aggregate": "max", "field": "beyond"}}},
        {
            "data": {"values": [{"at": 1.35 * least}, {"at": 0.85 * least}]},
            "mark": hidden,
            "encoding": {"y": {**y, "field": "at"}},
        },
    ]


def draw_speeds(recipes: list[str], where: str, least: float) -> Spec:
    """The map: safe or unsafe (left or right of the limit) by fast or slow (above or below the least speed-up), with both intervals."""
    colour, shape = _style_recipes(recipes)
    y: Spec = {"type": "quantitative", "scale": {"type": "log", "nice": False, "padding": 14}, "axis": {"tickCount": 6}}
    x = {**_ERROR, "field": "at", "title": "error of the product"}
    named = {**y, "field": "speedup", "title": f"speed-up over bf16 on {where}"}
    rule = {"type": "rule", "strokeWidth": 1.5, "opacity": 0.45}
    point = {"type": "point", "filled": True, "size": 60, "opacity": 0.85, "cursor": "pointer"}
    faster = {"type": "rule", "stroke": {"expr": "alarm"}, "strokeDash": [5, 4], "strokeWidth": 1.5}
    corner = {"type": "text", "fontSize": 11, "fill": {"expr": "soft"}, "text": {"expr": "datum.word"}}
    return make_chart(
        "Error against speed-up of every linear under every recipe and kernel: safe is left of the limit, fast is above the least speed-up",
        height=440,
        data={"values": []},
        layer=[
            *_limit_line(),
            *_room(y, least),
            {"data": {"values": [{"at": least}]}, "mark": faster, "encoding": {"y": {**y, "field": "at"}}},
            {
                "mark": rule,
                "encoding": {"x": {**_ERROR, "field": "from"}, "x2": {"field": "to"}, "y": named, "color": colour},
            },
            {"mark": rule, "encoding": {"x": x, "y": {**y, "field": "slow"}, "y2": {"field": "fast"}, "color": colour}},
            {
                "mark": point,
                "encoding": {
                    "x": x,
                    "y": named,
                    "color": colour,
                    "shape": shape,
                    "tooltip": [*_TOOLTIP, *({"field": f, "format": ".2f"} for f in ("speedup", "slow", "fast"))],
                },
            },
            *(
                {
                    "data": {"values": [{"word": word}]},
                    "mark": {**corner, "align": align, "baseline": base, "x": {"expr": x_}, "y": {"expr": y_}},
                }
                for word, align, base, x_, y_ in (
                    ("safe and fast", "left", "top", "6", "6"),
                    ("unsafe, fast", "right", "top", "width - 6", "6"),
                    ("safe, slow", "left", "bottom", "6", "height - 6"),
                    ("unsafe, slow", "right", "bottom", "width - 6", "height - 6"),
                )
            ),
        ],
    )


def draw_drift(drift: DriftReport) -> Spec | None:
    """Every move at the step it was seen, by how much, one colour per feature."""
    rows = [
        {
            "site": m.site,
            "role": m.role,
            "feature": m.feature,
            "step": m.step,
            "change": m.after - m.before,
            "sigmas": m.sigmas,
        }
        for m in drift.moves[:2000]
    ]
    if not rows:
        return None
    names: list[str] = list(dict.fromkeys(m.feature for m in drift.moves[:2000]))
    colours = [[ACCENT, SECOND, THIRD, QUIET, "alarm", "ink"][i % 6] for i in range(len(names))]
    return make_chart(
        "Moves of the operands' statistics by training step",
        height=230,
        layer=[
            zero_line("y"),
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.8, "cursor": "pointer"},
                "encoding": {
                    "x": {"field": "step", "type": "quantitative", "title": "training step", "scale": {"zero": False}},
                    "y": {"field": "change", "type": "quantitative", "title": "change (log2; zeros: share)"},
                    "color": colour_by("feature", names, colours),
                    "tooltip": [{"field": f} for f in ("site", "role", "feature", "step")]
                    + [{"field": f, "format": ".2f"} for f in ("change", "sigmas")],
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
    return make_chart(
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
    return make_chart(
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
