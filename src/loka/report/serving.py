"""Served models: load tests and experiments on live traffic."""

from loka.records import LoadTest, OnlineTest
from loka.report.markup import about, chart, chip, escape, notice, percent, span_of, table
from loka.report.quality import GOOD
from loka.report.results import Results
from loka.report.vega import ACCENT, SECOND, Spec, colour_by, draw, make_chart, number, tooltip, zero_line


def write_serving(results: Results) -> str:
    """Return the load tests, then the experiments."""
    parts = [_write_loads(results.loads)] if results.loads else []
    parts += [_write_load(test, number) for number, test in enumerate(results.loads)]
    parts += [_write_experiment(test) for test in results.experiments]
    return "".join(parts)


def _write_loads(tests: tuple[LoadTest, ...]) -> str:
    rows = [
        [
            escape(t.model), f"{t.rate:g}", f"{t.sla_ms:g}", f"{t.goodput:.1f}", percent(t.late_share, 2),
            f"{t.codes.get('429', 0):,}", _of(t.latency_ms, "p50"), _of(t.latency_ms, "p99"), _of(t.shed_ms, "p99"),
            f"{sum(n for code, n in t.codes.items() if code not in ('200', '429')):,}",
        ]
        for t in tests
    ]  # fmt: skip
    head = (
        "model", "offered / s", "SLA, ms", "good / s", "late", "rejected", "p50, ms", "p99, ms", "rejected in, p99, ms",
        "other codes",
    )  # fmt: skip
    return "<h3>Load tests</h3>" + about(
        "Open-loop traffic: requests are sent when they are due, and latency counts from then. "
        "A good answer is within the SLA. Late: share of the accepted requests. "
        "Rejected: answered with 429 at once, because the answer would have been late; how long that took is in the column after p99."
    ) + table(head, rows, numeric=range(1, 10), caption="Load tests")  # fmt: skip


def _write_load(test: LoadTest, number: int) -> str:
    notes = "".join(notice(escape(note)) for note in test.notes)
    title = f"{test.model}, {test.rate:g} requests a second"
    return f"<h4>{escape(title)}</h4>{notes}" + chart(f"load-{number}", f"Latency over time, {title}")


def _of(quantiles: dict[str, float], name: str) -> str:
    return f"{quantiles[name]:.1f}" if name in quantiles else "–"


def _write_experiment(test: OnlineTest) -> str:
    rows = [
        [
            escape(m.metric), chip(m.outcome, GOOD[m.outcome]), f"{m.baseline:.5g}", f"{m.candidate:.5g}",
            "too few users" if m.change is None else span_of(m.change), percent(m.margin, 2), " / ".join(f"{n:,}" for n in m.users),
        ]
        for m in test.metrics
    ]  # fmt: skip
    guards = [
        [escape(g.name), f"{g.baseline:.4g}", f"{g.candidate:.4g}", escape(g.limit), chip(g.verdict, "bad" if g.broken else "" if g.doubtful else "good")]
        for g in test.guardrails
    ]  # fmt: skip
    text = f"<h3>{escape(test.candidate)} against {escape(test.baseline)} on live traffic, experiment {escape(test.salt)}</h3>"
    if test.split.mismatch:
        text += notice(
            f"The users are not split between the arms as configured (p = {test.split.p_value:.2g}): do not trust this experiment."
        )
    text += "".join(notice(escape(note)) for note in test.notes)
    head = ("metric", "verdict", "baseline", "candidate", "change, valid at any time", "margin", "users")
    nothing = about("No metric: no outcome of an answered request was recorded.")
    return (
        text
        + (table(head, rows, numeric=range(2, 7), caption="Metrics by user") if rows else nothing)
        + table(
            ("guardrail", "baseline", "candidate", "limit", "verdict"), guards, numeric=(1, 2), caption="Guardrails"
        )
    )


def draw_load(test: LoadTest) -> Spec | None:
    """Draw p50 and p99 of the answered requests, by the second in which they were due."""
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
