"""Charts of sites: error by position or speed-up, sensitivity, histograms, drift. page.js fills in some of the data."""

from loka.records import DriftReport, ProbeReport
from loka.report.vega import (
    ACCENT,
    LIMIT,
    QUIET,
    RECIPE_COLOURS,
    SECOND,
    SITES,
    THIRD,
    Spec,
    colour_by,
    draw,
    make_chart,
    number,
    point,
    shape_by,
    tooltip,
    zero_line,
)

MANY = 60  # with more sites than this, the chart does not give each its own row

_ERROR = number(log=12, ticks=5)
_AT = {**_ERROR, "field": "at", "title": "error of the product"}
_FROM = {**_ERROR, "field": "from"}
_TOOLTIP = tooltip("site", "recipe", "backend", error=".4f", low=".4f", high=".4f")


def _style_recipes(recipes: list[str]) -> Spec:
    """Return color and shape by recipe; the shape helps readers who cannot tell the colors apart."""
    colours = [RECIPE_COLOURS.get(r, QUIET) for r in recipes]
    return {"color": colour_by("recipe", recipes, colours), "shape": shape_by("recipe", recipes)}


def _limit_line() -> list[Spec]:
    x = {**_ERROR, "aggregate": "min", "field": "limit"}
    text = {"type": "text", "align": "left", "dx": 5, "y": -8, "fill": {"expr": "alarm"}, "text": "limit"}
    return [draw(LIMIT, x=x), draw(text, x=x)]


def draw_sites(recipes: list[str], sites: int) -> Spec:
    """Draw the error by position in the model: one row per site, or a continuous axis above `MANY` sites."""
    style, many, y = _style_recipes(recipes), sites > MANY, SITES
    if many:
        y = number("index", "site, in model order", scale={"reverse": True, "nice": False, "domain": [0, sites]})
    rule = {"type": "rule", "strokeWidth": 1 if many else 2, "opacity": 0.25 if many else 0.6}
    dot = point(24, 0.55, cursor="pointer") if many else point(70, 0.95, cursor="pointer")
    return make_chart(
        "Error of every linear with every recipe, and the limit; click a point to open the site's page",
        height=460 if many else max(24 * sites, 96),
        data={"values": []},
        layer=[
            *_limit_line(),
            draw(rule, x=_FROM, x2="to", y=y, color=style["color"]),
            draw(dot, x=_AT, y=y, **style, tooltip=_TOOLTIP),
        ],
    )


def _add_room(y: Spec, least: float) -> list[Spec]:
    """Return invisible points that keep both limits away from the edges, so that all four corners are visible."""
    hidden = {"type": "point", "opacity": 0, "tooltip": False}
    beyond = {"calculate": "datum.limit * 1.15", "as": "beyond"}
    return [
        {"transform": [beyond], **draw(hidden, x={**_ERROR, "aggregate": "max", "field": "beyond"})},
        draw(hidden, [{"at": 1.35 * least}, {"at": 0.85 * least}], y={**y, "field": "at"}),
    ]


def draw_speeds(recipes: list[str], where: str, least: float) -> Spec:
    """Draw error against speed-up, with both intervals.

    Safe is left of the error limit, fast is above the minimum speed-up `least`.
    """
    style, y = _style_recipes(recipes), number(log=14, ticks=6)
    named = {**y, "field": "speedup", "title": f"speed-up over bf16 on {where}"}
    rule, colour = {"type": "rule", "strokeWidth": 1.5, "opacity": 0.45}, style["color"]
    said = [*_TOOLTIP, *tooltip(speedup=".2f", slow=".2f", fast=".2f")]
    corner = {"type": "text", "fontSize": 11, "fill": {"expr": "soft"}, "text": {"expr": "datum.word"}}
    corners = (
        ("safe and fast", "left", "top", "6", "6"),
        ("unsafe, fast", "right", "top", "width - 6", "6"),
        ("safe, slow", "left", "bottom", "6", "height - 6"),
        ("unsafe, slow", "right", "bottom", "width - 6", "height - 6"),
    )
    return make_chart(
        ("Error against speed-up of every linear with every recipe and kernel: safe is left of the limit, " "fast is above the minimum speed-up"),
        height=440,
        data={"values": []},
        layer=[
            *_limit_line(),
            *_add_room(y, least),
            draw(LIMIT, [{"at": least}], y={**y, "field": "at"}),
            draw(rule, x=_FROM, x2="to", y=named, color=colour),
            draw(rule, x=_AT, y={**y, "field": "slow"}, y2="fast", color=colour),
            draw(point(60, 0.85, cursor="pointer"), x=_AT, y=named, **style, tooltip=said),
            *(
                {"data": {"values": [{"word": word}]}, "mark": {**corner, "align": align, "baseline": base, "x": {"expr": x}, "y": {"expr": y}}}
                for word, align, base, x, y in corners
            ),
        ],
    )  # fmt: skip


def draw_drift(drift: DriftReport) -> Spec | None:
    """Draw every move by the step in which it was seen and its size, one color per feature."""
    moves = drift.moves[:2000]
    if not moves:
        return None
    rows = [
        {"site": m.site, "role": m.role, "feature": m.feature, "step": m.step, "change": m.after - m.before, "sigmas": m.sigmas}
        for m in moves
    ]  # fmt: skip
    names: list[str] = list(dict.fromkeys(m.feature for m in moves))
    colours = [[ACCENT, SECOND, THIRD, QUIET, "alarm", "ink"][i % 6] for i in range(len(names))]
    shown = draw(
        point(60, 0.8, cursor="pointer"),
        rows,
        x=number("step", "training step", scale={"zero": False}),
        y=number("change", "change (log2; zeros: share)"),
        color=colour_by("feature", names, colours),
        tooltip=tooltip("site", "role", "feature", "step", change=".2f", sigmas=".2f"),
    )
    return make_chart("Moves of the operands' statistics by training step", height=230, layer=[zero_line("y"), shown])


def draw_sensitivity(probe: ProbeReport) -> Spec | None:
    """Draw the change of the end metric when each site alone runs in low precision."""
    rows: list[Spec] = [
        {"site": site.name, "change": 100 * c.value, "low": 100 * c.low, "high": 100 * c.high}
        for site in probe.sites
        if (c := site.metric_change) is not None
    ]
    if not rows:
        return None
    many = len(rows) > MANY
    if many:
        rows = sorted(rows, key=lambda row: -abs(row["change"]))[:MANY]
    x = number(ticks=8)
    rule = {"type": "rule", "strokeWidth": 2, "opacity": 0.6, "stroke": {"expr": "second"}}
    dot = point(60, 1, fill={"expr": "second"}, cursor="pointer")
    said = tooltip("site", change="+.4f", low="+.4f", high="+.4f")
    ink = {"type": "rule", "stroke": {"expr": "ink"}, "opacity": 0.5}
    return make_chart(
        "Change of the loss when each site alone runs in low precision" + (f", the {MANY} largest" if many else ""),
        height=max(22 * len(rows), 96),
        data={"values": rows},
        layer=[
            draw(ink, [{"at": 0}], x={**x, "field": "at"}),
            draw(rule, x={**x, "field": "low"}, x2="high", y=SITES),
            draw(dot, x={**x, "field": "change", "title": "change of the loss, %"}, y=SITES, tooltip=said),
        ],
    )


def draw_histogram() -> Spec:
    """Draw log2 |x| of one operand over the bands of a format scaled to its amax. page.js fills in both data sets."""
    x = number(title="log2 of the magnitude", scale={"zero": False, "nice": False}, field="from")
    bands = {"domain": ["full precision", "losing bits", "becomes zero"], "range": [{"expr": c} for c in (ACCENT, THIRD, "alarm")]}  # fmt: skip
    colour = {"field": "band", "type": "nominal", "scale": bands, "legend": None}
    bar = {"type": "bar", "fill": {"expr": "ink"}, "opacity": 0.75, "binSpacing": 1}
    said = [{"field": "from", "title": "from 2^"}, {"field": "share", "format": ".3%"}]
    filled = [
        ("bands", draw({"type": "rect", "opacity": 0.13}, x=x, x2="to", color=colour)),
        ("bins", draw(bar, x={**x, "bin": "binned"}, x2="to", y=number("share", "share", format="%"), tooltip=said)),
    ]
    return make_chart(
        "Histogram of magnitudes in powers of two, against the range of the format",
        height=150,
        layer=[{"data": {"name": name, "values": []}, **each} for name, each in filled],
    )
