"""Charts of an ablation: the change of the loss by mods and precision against the margin, and the speed-up of the same grid."""

from typing import Any

from loka.records import Ablation, AblationLatency
from loka.report.vega import ACCENT, PERCENT, QUIET, SECOND, THIRD, Spec, colour_by, make_chart, zero_line

__all__ = ["draw_cells", "draw_latency"]

_COLOURS = {"bf16": QUIET, "naive": SECOND, "tensorwise": SECOND, "rowwise": THIRD, "planned": ACCENT, "fused": ACCENT}
_STEP = 15  # pixels of a point
_FAR = 8  # margins; beyond, the axis is logarithmic outside of the margin


def draw_cells(found: Ablation, data: str) -> Spec | None:
    """One row per variant, one point per precision: the change of the log loss in percent with its interval, over the band that does not matter."""
    rows: list[Spec] = [
        {
            "mods": cell.variant,
            "precision": cell.precision,
            "change": 100 * cell.against_original.change.value,
            "low": 100 * cell.against_original.change.low,
            "high": 100 * cell.against_original.change.high,
            "verdict": cell.against_original.outcome,
            "seeds": cell.against_original.seeds,
        }
        for cell in found.cells
        if cell.data == data and cell.against_original is not None
    ]
    if not rows:
        return None
    margin = 100 * found.margin
    x = _scale_changes(margin, max(abs(row[end]) for row in rows for end in ("low", "high")))
    band = {
        "data": {"values": [{"from": -margin, "to": margin}]},
        "mark": {"type": "rect", "opacity": 0.14, "fill": {"expr": "accent"}},
        "encoding": {"x": {**x, "field": "from"}, "x2": {"field": "to"}},
    }
    tooltip = [
        {"field": "mods"},
        {"field": "precision"},
        *({"field": f, "format": PERCENT, "title": f"{f}, %"} for f in ("change", "low", "high")),
        {"field": "verdict"},
        {"field": "seeds"},
    ]
    return _draw_grid(
        f"Change of the log loss on {data}, with 95 % intervals and the margin",
        rows,
        "change",
        x,
        [band, _line(x, 0.0)],
        tooltip,
    )


def _scale_changes(margin: float, farthest: float) -> Spec:
    """A symmetric axis; where one cell is far off, logarithmic beyond the margin, so that the others can still be read."""
    span = max(1.6 * margin, 1.1 * farthest)
    x: Spec = {
        "type": "quantitative",
        "title": "change of log loss, %",
        "scale": {"domain": [-span, span]},
        "axis": {"tickCount": 5, "format": "+.2~r"},
    }
    if farthest > _FAR * margin:
        x["scale"] |= {"type": "symlog", "constant": margin}
        ticks = [margin * 10**power for power in range(6) if margin * 10**power <= span]
        x["axis"] = {"values": [*(-t for t in reversed(ticks)), *ticks], "format": "+.2~r", "labelOverlap": True}
        x["title"] = "change of log loss, % (log)"
    return x


def draw_latency(found: AblationLatency, mode: str, batch: int) -> Spec | None:
    """The speed-up over the unmodified tower in bf16 by variant and precision, with lines at one and at two."""
    rows: list[Spec] = [
        {
            "mods": r.variant,
            "precision": r.precision,
            "speedup": r.speedup.value,
            "low": r.speedup.low,
            "high": r.speedup.high,
            "microseconds": r.microseconds.value,
        }
        for r in found.rows
        if (r.mode, r.batch) == (mode, batch)
    ]
    if not rows:
        return None
    most = max(2.1, 1.05 * max(row["high"] for row in rows))
    x: Spec = {
        "type": "quantitative",
        "title": "times as fast as the unmodified tower in bf16",
        "scale": {"domain": [0, most]},
        "axis": {"tickCount": 5},
    }
    lines = [_line(x, 1.0), _line(x, 2.0, strokeDash=[4, 4])]
    tooltip = [
        {"field": "mods"},
        {"field": "precision"},
        {"field": "speedup", "format": ".2f", "title": "speed-up"},
        {"field": "microseconds", "format": ",.1f", "title": "µs"},
    ]
    return _draw_grid(f"Speed-up, {mode}, batch {batch}", rows, "speedup", x, lines, tooltip)


def _line(x: Spec, at: float, **mark: Any) -> Spec:
    line = zero_line("x", at, **mark)
    line["encoding"]["x"] |= x
    return line


def _draw_grid(title: str, rows: list[Spec], field: str, x: Spec, behind: list[Spec], tooltip: list[Spec]) -> Spec:
    """Points with their intervals, variants below each other, precisions side by side within one."""
    variants = list(dict.fromkeys(row["mods"] for row in rows))
    seen = {row["precision"] for row in rows}
    precisions = [*(p for p in _COLOURS if p in seen), *sorted(seen - _COLOURS.keys())]
    legend = {"title": None, "orient": "top", **({"columns": len(precisions)} if len(precisions) < 4 else {})}
    colour = {
        **colour_by("precision", precisions, [_COLOURS.get(p, "ink") for p in precisions]),
        "legend": legend,
    }
    place = {
        "y": {
            "field": "mods",
            "type": "nominal",
            "sort": variants,
            "title": None,
            "axis": {"labelLimit": 120, "grid": True, "bandPosition": 0},
        },
        "yOffset": {"field": "precision", "type": "nominal", "sort": precisions, "scale": {"domain": precisions}},
    }
    shape = {
        "field": "precision",
        "type": "nominal",
        "legend": legend,
        "scale": {"domain": precisions},
    }
    return make_chart(
        title,
        height=_STEP * len(precisions) * len(variants) + 10 * len(variants),
        layer=[
            *behind,
            {
                "data": {"values": rows},
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, **place, "color": colour},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1},
                "encoding": {"x": {**x, "field": field}, **place, "color": colour, "shape": shape, "tooltip": tooltip},
            },
        ],
    )  # fmt: skip
