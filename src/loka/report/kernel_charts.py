"""Charts of kernels and quantized models: rooflines, speed by size, sensitivity by site, statistics of layers."""

from loka.records import Analysis, Quantized
from loka.records.performance import KernelBench, KernelRow, PerformanceRows
from loka.report.vega import (
    ACCENT,
    DASHED,
    RECIPE_COLOURS,
    SECOND,
    SITES,
    Spec,
    colour_by,
    cycle,
    draw,
    make_chart,
    number,
    point,
    shape_by,
    tooltip,
    zero_line,
)


def draw_roofline(bench: KernelBench) -> Spec | None:
    """Draw the FLOP rate against FLOPs per byte, with the roofs measured on the same device.

    Bytes count each operand and the result once.
    """
    peaks = bench.peaks
    points = [p for row in bench.rows if (p := _make_point(row)) is not None]
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
    x, y = number("intensity", "FLOPs per byte", log=10, ticks=6), number("rate", "TFLOP/s", log=10, ticks=6)
    line = {"type": "line", **DASHED, "strokeWidth": 1.5}
    label = {"type": "text", "align": "right", "dy": -8, "fill": {"expr": "alarm"}}
    said = tooltip("call", "backend", rate=".0f:TFLOP/s", microseconds=".1f:µs")
    colour = colour_by("backend", names, cycle(names))
    return make_chart(
        "Achieved FLOP rate by arithmetic intensity",
        height=320,
        layer=[
            draw(line, roofs, x=x, y=y, detail="roof", color={"value": {"expr": "alarm"}}),
            draw(label, [r for r in roofs if r["intensity"] == last], x=x, y=y, text="roof"),
            draw(point(60, 0.85), points, x=x, y=y, color=colour, shape=shape_by("backend", names), tooltip=said),
        ],
    )


def _make_point(row: KernelRow) -> Spec | None:
    """Return a GEMM's point in the roofline chart; None for other kernels and for rows without a time."""
    gemm = row.op in ("scaled_mm", "fused_linear") and {"m", "k", "n"} <= row.shape.keys()
    if row.microseconds is None or not gemm or "backward" in row.call:
        return None
    m, k, n = (row.shape[name] for name in "mkn")
    operand = 2 if row.backend == "bf16" else 1
    result = 1 if row.op == "fused_linear" and row.backend != "bf16" else 2
    flops, moved = 2 * m * k * n, operand * (m * k + k * n) + result * m * n
    time = row.microseconds.value
    at = {"intensity": flops / moved, "rate": flops / time / 1e6}
    return {"call": row.call, "backend": row.backend, "microseconds": time, **at}


def draw_rows(record: PerformanceRows) -> Spec:
    """Draw the speed-up of linear GEMMs, with intervals, by their FLOPs: small products lose, large ones win."""
    rows = [
        {
            "flops": 2 * r.m * r.k * r.n, "speedup": r.speedup.value, "low": r.speedup.low, "high": r.speedup.high,
            "recipe": _recipe_of(r.variant), "call": f"{r.m} × {r.k} × {r.n}, {r.variant}", "backend": r.backend,
        }
        for group in record.groups
        for r in group.rows
        if r.op == "linear" and r.speedup is not None
    ]  # fmt: skip
    names = [name for name in RECIPE_COLOURS if any(row["recipe"] == name for row in rows)]
    colour = colour_by("recipe", names, [RECIPE_COLOURS[n] for n in names])
    x, y = number("flops", "FLOPs of the product", log=12), number("speedup", "speed-up over bf16", log=0)
    plain = {**x, "axis": {"format": ".0e", "tickCount": 6}}
    said = tooltip("call", "backend", speedup=".2f")
    return make_chart(
        "Speed-up over bf16 by the FLOPs of the product",
        height=340,
        layer=[
            zero_line("y", 1.0),
            draw({"type": "rule", "opacity": 0.4}, rows, x=x, y={**y, "field": "low"}, y2="high", color=colour),
            draw(point(34, 0.75), rows, x=plain, y=y, color=colour, shape=shape_by("recipe", names), tooltip=said),
        ],
    )


def _recipe_of(variant: str) -> str:
    """Return a row's recipe, read from the scales of its left operand."""
    left = variant.split()[1]
    if "1x128" in left:
        return "blockwise"
    return "rowwise" if ":row" in left else "tensorwise"


def draw_waterfall(done: Quantized) -> Spec | None:
    """Draw the change of the end metric when each site alone is quantized, the largest first; the whole model last."""
    changes = [(s.name, s.metric_change, "one site") for s in done.sites if s.metric_change is not None]
    if not changes:
        return None
    changes = sorted(changes, key=lambda each: -abs(each[1].value))[:40]
    if done.change is not None:
        changes.append(("all together", done.change, "model"))
    rows = [
        {"site": site, "change": 100 * c.value, "low": 100 * c.low, "high": 100 * c.high, "what": what}
        for site, c, what in changes
    ]
    x = number(title=f"change of {done.metric or 'the metric'}, %", ticks=8)
    colour = {**colour_by("what", ["one site", "model"], [SECOND, ACCENT]), "legend": None}
    bar, rule = {"type": "bar", "opacity": 0.75, "height": 10}, {"type": "rule", "stroke": {"expr": "ink"}}
    said = tooltip("site", change="+.4f", low="+.4f", high="+.4f")
    return make_chart(
        "Change of the end metric when each site alone is quantized",
        height=22 * len(rows),
        layer=[
            zero_line("x"),
            draw(bar, rows, x={**x, "field": "change"}, y=SITES, color=colour, tooltip=said),
            draw(rule, rows, x={**x, "field": "low"}, x2="high", y=SITES),
        ],
    )


def draw_layers(analysis: Analysis) -> Spec:
    """Draw the variance against the largest absolute value, one point per layer, with published values as lines."""
    rows = [
        {"model": m.name, "layer": layer.name, "kind": layer.kind, "variance": layer.variance, "absmax": layer.absmax}
        for m in analysis.models
        for layer in m.layers
        if layer.variance > 0 and layer.absmax > 0
    ]
    names = [m.name for m in analysis.models]
    axes = {
        "x": number("variance", "variance", log=10, format=".0e", ticks=6),
        "y": number("absmax", "largest magnitude", log=10, format=".0e", ticks=6),
    }
    rule = {"type": "rule", **DASHED, "stroke": {"expr": "quiet"}}
    lines = []
    for r in analysis.references:
        if r.value > 0:
            side = "x" if r.statistic == "variance" else "y"
            at = {side: {**axes[side], "field": "at"}}
            lines.append(draw(rule, [{"at": r.value, "label": r.label}], **at, tooltip=tooltip("label")))
    said = tooltip("model", "layer", "kind", variance=".3g", absmax=".3g")
    colour = colour_by("model", names, cycle(names, 1))
    shown = draw(point(45, 0.75), rows, **axes, color=colour, shape=shape_by("kind"), tooltip=said)
    return make_chart("Variance against largest magnitude, one point per layer", height=320, layer=[*lines, shown])
