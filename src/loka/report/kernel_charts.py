"""Charts of kernels and of quantised models: rooflines, speed by size, waterfalls of sensitivity, layers beside published values."""

from loka.records import Analysis, Quantized
from loka.records.bench import KernelBench, KernelRow
from loka.records.performance import PerformanceRows
from loka.report.vega import ACCENT, QUIET, RECIPE_COLOURS, SECOND, THIRD, Spec, colour_by, make_chart, zero_line

__all__ = ["draw_layers", "draw_roofline", "draw_rows", "draw_waterfall"]

_COLOURS = [QUIET, ACCENT, SECOND, THIRD, "alarm", "ink"]


def draw_roofline(bench: KernelBench) -> Spec | None:
    """FLOP rate against FLOPs per byte, under the roofs measured on the same device. Bytes are those of operands and result, once each."""
    peaks = bench.peaks
    points = [p for row in bench.rows if (p := _place(row)) is not None]
    if peaks is None or not points:
        return None
    first, last = 0.7 * min(p["intensity"] for p in points), 1.5 * max(p["intensity"] for p in points)
    roofs = [
        {"roof": name, "intensity": at, "rate": min(flops, at * peaks.copy_bytes_per_second) / 1e12}
        for name, flops in (("bf16 roof", peaks.bf16_flops), ("FP8 roof", peaks.fp8_flops))
        if flops is not None
        for at in sorted({first, last, min(max(flops / peaks.copy_bytes_per_second, first), last)})
    ]
    names = list(dict.fromkeys(p["backend"] for p in points))
    scale = {"type": "log", "nice": False, "padding": 10}
    x = {
        "field": "intensity",
        "type": "quantitative",
        "scale": scale,
        "title": "FLOPs per byte",
        "axis": {"tickCount": 6},
    }
    y = {"field": "rate", "type": "quantitative", "scale": scale, "title": "TFLOP/s", "axis": {"tickCount": 6}}
    return make_chart(
        "Achieved FLOP rate by arithmetic intensity",
        height=320,
        layer=[
            {
                "data": {"values": roofs},
                "mark": {"type": "line", "strokeDash": [5, 4], "strokeWidth": 1.5},
                "encoding": {"x": x, "y": y, "detail": {"field": "roof"}, "color": {"value": {"expr": "alarm"}}},
            },
            {
                "data": {"values": [r for r in roofs if r["intensity"] == last]},
                "mark": {"type": "text", "align": "right", "dy": -8, "fill": {"expr": "alarm"}},
                "encoding": {"x": x, "y": y, "text": {"field": "roof"}},
            },
            {
                "data": {"values": points},
                "mark": {"type": "point", "filled": True, "size": 60, "opacity": 0.85},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": colour_by("backend", names, [_COLOURS[i % 6] for i in range(len(names))]),
                    "shape": {
                        "field": "backend",
                        "type": "nominal",
                        "legend": {"title": None, "orient": "top"},
                        "scale": {"domain": names},
                    },
                    "tooltip": [
                        {"field": "call"},
                        {"field": "backend"},
                        {"field": "rate", "format": ".0f", "title": "TFLOP/s"},
                        {"field": "microseconds", "format": ".1f", "title": "µs"},
                    ],
                },
            },
        ],
    )


def _place(row: KernelRow) -> Spec | None:
    """Where a GEMM lies under the roof; None for what is no GEMM or was not timed."""
    if (
        row.microseconds is None
        or row.op not in ("scaled_mm", "fused_linear")
        or not {"m", "k", "n"} <= row.shape.keys()
    ):
        return None
    if "backward" in row.call:
        return None
    m, k, n = (row.shape[name] for name in "mkn")
    operand = 2 if row.backend == "bf16" else 1
    result = 1 if row.op == "fused_linear" and row.backend != "bf16" else 2
    flops, moved = 2 * m * k * n, operand * (m * k + k * n) + result * m * n
    time = row.microseconds.value
    return {
        "call": row.call,
        "backend": row.backend,
        "intensity": flops / moved,
        "rate": flops / time / 1e6,
        "microseconds": time,
    }


def draw_rows(record: PerformanceRows) -> Spec:
    """Speed-up of linear GEMMs by the work in them, with intervals: small products lose, large ones win."""
    rows = [
        {
            "flops": 2 * r.m * r.k * r.n,
            "speedup": r.speedup.value,
            "low": r.speedup.low,
            "high": r.speedup.high,
            "recipe": _recipe_of(r.variant),
            "call": f"{r.m} × {r.k} × {r.n}, {r.variant}",
            "backend": r.backend,
        }
        for group in record.groups
        for r in group.rows
        if r.op == "linear" and r.speedup is not None
    ]
    names = [name for name in RECIPE_COLOURS if any(row["recipe"] == name for row in rows)]
    x = {
        "field": "flops",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False, "padding": 12},
        "title": "FLOPs of the product",
    }
    y: Spec = {
        "field": "speedup",
        "type": "quantitative",
        "scale": {"type": "log", "nice": False},
        "title": "speed-up over bf16",
    }
    colour = colour_by("recipe", names, [RECIPE_COLOURS[n] for n in names])
    return make_chart(
        "Speed-up over bf16 by the FLOPs of the product",
        height=340,
        layer=[
            zero_line("y", 1.0),
            {
                "data": {"values": rows},
                "mark": {"type": "rule", "opacity": 0.4},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": colour},
            },
            {
                "data": {"values": rows},
                "mark": {"type": "point", "filled": True, "size": 34, "opacity": 0.75},
                "encoding": {
                    "x": {**x, "axis": {"format": ".0e", "tickCount": 6}},
                    "y": y,
                    "color": colour,
                    "shape": {
                        "field": "recipe",
                        "type": "nominal",
                        "scale": {"domain": names},
                        "legend": colour["legend"],
                    },
                    "tooltip": [{"field": "call"}, {"field": "backend"}, {"field": "speedup", "format": ".2f"}],
                },
            },
        ],
    )


def _recipe_of(variant: str) -> str:
    """The recipe a row belongs to, by the scales of its left operand."""
    left = variant.split()[1]
    return "blockwise" if "1x128" in left else "rowwise" if ":row" in left else "tensorwise"


def draw_waterfall(done: Quantized) -> Spec | None:
    """Change of the end metric with each site alone quantised, the largest first; the whole model last."""
    rows: list[Spec] = [
        {"site": s.name, "change": 100 * c.value, "low": 100 * c.low, "high": 100 * c.high, "what": "one site"}
        for s in done.sites
        if (c := s.metric_change) is not None
    ]
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: -abs(row["change"]))[:40]
    if done.change is not None:
        c = done.change
        rows.append(
            {"site": "all together", "change": 100 * c.value, "low": 100 * c.low, "high": 100 * c.high, "what": "model"}
        )
    y = {"field": "site", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 240, "grid": True}}
    x = {"type": "quantitative", "title": f"change of {done.metric or 'the metric'}, %", "axis": {"tickCount": 8}}
    return make_chart(
        "Change of the end metric with each site alone quantised",
        height=22 * len(rows),
        layer=[
            zero_line("x"),
            {
                "data": {"values": rows},
                "mark": {"type": "bar", "opacity": 0.75, "height": 10},
                "encoding": {
                    "x": {**x, "field": "change"},
                    "y": y,
                    "color": {**colour_by("what", ["one site", "model"], [SECOND, ACCENT]), "legend": None},
                    "tooltip": [
                        {"field": "site"},
                        *({"field": f, "format": "+.4f"} for f in ("change", "low", "high")),
                    ],
                },
            },
            {
                "data": {"values": rows},
                "mark": {"type": "rule", "stroke": {"expr": "ink"}},
                "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}, "y": y},
            },
        ],
    )


def draw_layers(analysis: Analysis) -> Spec:
    """Variance against the largest magnitude, one point per layer, with published values as lines."""
    rows = [
        {"model": m.name, "layer": layer.name, "kind": layer.kind, "variance": layer.variance, "absmax": layer.absmax}
        for m in analysis.models
        for layer in m.layers
        if layer.variance > 0 and layer.absmax > 0
    ]
    names = [m.name for m in analysis.models]
    log: Spec = {"type": "log", "nice": False, "padding": 10}
    x: Spec = {"type": "quantitative", "scale": log, "title": "variance", "axis": {"format": ".0e", "tickCount": 6}}
    y: Spec = {
        "type": "quantitative",
        "scale": log,
        "title": "largest magnitude",
        "axis": {"format": ".0e", "tickCount": 6},
    }
    lines: list[Spec] = [
        {
            "data": {"values": [{"at": r.value, "label": r.label}]},
            "mark": {"type": "rule", "strokeDash": [5, 4], "stroke": {"expr": "quiet"}},
            "encoding": {
                **({"x": {**x, "field": "at"}} if r.statistic == "variance" else {"y": {**y, "field": "at"}}),
                "tooltip": [{"field": "label"}],
            },
        }
        for r in analysis.references
        if r.value > 0
    ]
    point = {
        "data": {"values": rows},
        "mark": {"type": "point", "filled": True, "size": 45, "opacity": 0.75},
        "encoding": {
            "x": {**x, "field": "variance"},
            "y": {**y, "field": "absmax"},
            "color": colour_by("model", names, [_COLOURS[(i + 1) % 6] for i in range(len(names))]),
            "shape": {"field": "kind", "type": "nominal", "legend": {"title": None, "orient": "top"}},
            "tooltip": [
                {"field": "model"},
                {"field": "layer"},
                {"field": "kind"},
                *({"field": f, "format": ".3g"} for f in ("variance", "absmax")),
            ],
        },
    }
    return make_chart("Variance against largest magnitude, one point per layer", height=320, layer=[*lines, point])
