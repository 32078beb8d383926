"""Charts of quality: comparisons, loss curves, and the gaps between them."""

from loka.records import Comparison, Run
from loka.report.vega import ACCENT, PERCENT, QUIET, SECOND, THIRD, Spec, make_chart

__all__ = ["draw_comparisons", "draw_curves", "draw_gaps"]


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
    return make_chart(
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
    return make_chart(
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
    return make_chart(
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
