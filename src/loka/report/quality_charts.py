"""Charts of quality: comparisons, loss curves, and the gaps between them."""

from loka.records import Comparison, Run
from loka.report.vega import PERCENT, SERIES, Spec, colour_by, draw, make_chart, number, point, tooltip, zero_line


def draw_comparisons(comparisons: tuple[Comparison, ...]) -> Spec:
    """Draw one row per run: the change of the metric with its interval, over the band of the margin."""
    changes = [(c, c.relative_change) for c in comparisons]
    rows = [
        {"run": c.candidate, "change": 100 * r.value, "low": 100 * r.low, "high": 100 * r.high, "outcome": c.outcome}
        for c, r in changes
    ]
    margin = 100 * comparisons[0].margin
    span = max([1.6 * margin, *(115 * abs(end) for _, r in changes for end in (r.low, r.high))])
    x = number(scale={"domain": [-span, span]}, ticks=7)
    y = {"field": "run", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 160}}
    band = {"type": "rect", "opacity": 0.14, "fill": {"expr": "accent"}}
    ink = {"type": "rule", "stroke": {"expr": "ink"}}
    said = tooltip(change=f"{PERCENT}:change, %", low=f"{PERCENT}:low, %", high=f"{PERCENT}:high, %")
    title = {"field": "from", "title": "change of log loss, %"}
    return make_chart(
        f"Relative change of {comparisons[0].metric} against {comparisons[0].baseline}, with 95 % intervals and the margin",
        height=44 * len(rows),
        layer=[
            draw(band, [{"from": -margin, "to": margin}], x={**x, **title}, x2="to"),
            draw({**ink, "opacity": 0.5}, [{"at": 0}], x={**x, "field": "at"}),
            draw({**ink, "strokeWidth": 2}, rows, x={**x, "field": "low"}, x2="high", y=y),
            draw(point(110, 1, fill={"expr": "accent"}), rows, x={**x, "field": "change"}, y=y, tooltip=said),
        ],
    )


def draw_curves(runs: tuple[Run, ...]) -> Spec:
    """Draw the training loss by step."""
    rows = [{"run": run.name, "step": p.step, "loss": p.loss} for run in runs for p in run.curve]
    shown = draw(
        {"type": "line", "strokeWidth": 1.8},
        rows,
        x=number("step", scale={"zero": False}, axis={"tickMinStep": 1}),
        y=number("loss", "training loss", scale={"zero": False}),
        color=_colour_runs(runs),
        tooltip=tooltip("run", "step", loss=".5f"),
    )
    return make_chart("Training loss by step, one line per run", height=230, **shown)


def draw_gaps(runs: tuple[Run, ...]) -> Spec | None:
    """Draw the loss relative to the first run on the same batches: the curves themselves are too close to compare."""
    if len(runs) < 2:
        return None
    base = {p.step: p.loss for p in runs[0].curve}
    rows = [
        {"run": run.name, "step": p.step, "gap": 100 * (p.loss / base[p.step] - 1)}
        for run in runs[1:]
        for p in run.curve
        if base.get(p.step)
    ]
    shown = draw(
        {"type": "line", "strokeWidth": 1.8},
        rows,
        x=number("step", scale={"zero": False}),
        y=number("gap", f"against {runs[0].name}, %"),
        color={**_colour_runs(runs), "legend": None},
        tooltip=tooltip("run", "step", gap="+.3f"),
    )
    text = f"Training loss relative to {runs[0].name} on the same batches, in percent, by step"
    return make_chart(text, height=230, layer=[zero_line("y"), shown])


def _colour_runs(runs: tuple[Run, ...]) -> Spec:
    return colour_by("run", [run.name for run in runs], SERIES[:4][: len(runs)])
