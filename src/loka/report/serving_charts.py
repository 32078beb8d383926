"""Charts of served models: latency over the time of a load test, with the SLA."""

from loka.records import LoadTest
from loka.report.vega import ACCENT, SECOND, Spec, colour_by, draw, make_chart, number, tooltip, zero_line


def draw_load(test: LoadTest) -> Spec | None:
    """p50 and p99 of what was answered, by when it was due."""
    rows = [
        {"second": b.second, "quantile": name, "ms": value, "answered": b.answered, "offered": b.offered}
        for b in test.bins
        for name, value in (("p50", b.p50_ms), ("p99", b.p99_ms))
        if value is not None
    ]
    if not rows:
        return None
    shown = draw(
        {"type": "line", "point": True},
        rows,
        x=number("second", "second in which the request was due"),
        y=number("ms", "milliseconds"),
        color=colour_by("quantile", ["p50", "p99"], [ACCENT, SECOND]),
        tooltip=tooltip("second", "quantile", "ms", "answered", "offered"),
    )
    text = f"Latency over time at {test.rate:g} requests a second"
    return make_chart(text, height=180, layer=[shown, zero_line("y", test.sla_ms, strokeDash=[6, 4])])
