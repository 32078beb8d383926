"""The analysis as a Vega-Lite chart: four statistics by layer, one colour per model, published values as labelled lines. Plain dictionaries."""

from typing import Any

from loka.records import Analysis

STATISTICS = (("variance", "variance"), ("absmax", "largest magnitude"), ("abs_p99", "99th percentile of magnitude"))


def draw_analysis(analysis: Analysis) -> dict[str, Any]:
    """Four charts for each kind (weights, activations), two in a row, data inline.

    Args:
        analysis: models side by side.

    Returns:
        A Vega-Lite specification.

    Example:
        >>> json.dumps(draw_analysis(analysis))
    """
    rows: list[dict[str, Any]] = []
    for model in analysis.models:
        counts = {"weight": 0, "activation": 0}
        for layer in model.layers:
            base = {"model": model.name, "layer": layer.name, "kind": layer.kind, "place": counts[layer.kind]}
            counts[layer.kind] += 1
            rows.append(
                base
                | {"variance": layer.variance, "absmax": layer.absmax, "abs_p99": layer.abs_p99}
                | {
                    "kurtosis": layer.kurtosis,
                    "crest": next(g.crest_bits for g in layer.groups if g.spec == "e4m3:row"),
                }
            )
    kinds = [kind for kind in ("weight", "activation") if any(row["kind"] == kind for row in rows)]
    charts = [
        {"columns": 2, "concat": [_panel(analysis, kind, field, title) for field, title in (*STATISTICS, ("crest", "crest inside a row, bits"))]}
        for kind in kinds
    ]  # fmt: skip
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": "Distribution of weights and activations by layer, models side by side",
        "data": {"values": rows},
        "vconcat": charts,
    }


def _panel(analysis: Analysis, kind: str, field: str, title: str) -> dict[str, Any]:
    scale = {"type": "linear"} if field == "crest" else {"type": "log"}
    y = {"field": field, "type": "quantitative", "scale": scale, "title": title}
    tooltip = [{"field": name} for name in ("model", "layer", "variance", "absmax", "abs_p99", "kurtosis")]
    layers: list[dict[str, Any]] = [
        {
            "transform": [{"filter": f"datum.kind == '{kind}' && (datum.{field} > 0 || '{field}' == 'crest')"}],
            "mark": {"type": "point", "filled": True, "size": 28, "opacity": 0.7},
            "encoding": {
                "x": {"field": "place", "type": "quantitative", "title": f"{kind}, in model order"},
                "y": y,
                "color": {"field": "model", "type": "nominal", "legend": {"orient": "top", "title": None}},
                "tooltip": tooltip,
            },
        }
    ]
    for line in analysis.references if kind == "weight" else []:
        if line.statistic == field:
            here = {"data": {"values": [{"at": line.value, "label": line.label}]}}
            at = {"field": "at", "type": "quantitative", "scale": scale}
            layers.append({**here, "mark": {"type": "rule", "strokeDash": [5, 4]}, "encoding": {"y": at}})
            text = {"type": "text", "align": "left", "dy": -5, "x": 4, "fontSize": 9}
            layers.append({**here, "mark": text, "encoding": {"y": at, "text": {"field": "label"}}})
    return {"width": 280, "height": 200, "layer": layers}
