"""Generative recommenders: the quantized model, the paired test, the overlap of lists, and distributions of layers."""

from loka.records import Analysis, PairedTest, Quantized
from loka.report.markup import about, capitalise, chart, chip, escape, mono, notice, percent, size, span_of, table
from loka.report.quality import GOOD
from loka.report.results import Results


def write_generative(results: Results) -> str:
    """Return the sections on quantized models, paired tests and distributions; empty without such records."""
    parts = [_write_quantized(q, i) for i, q in enumerate(results.quantized)]
    parts += [_write_test(test) for test in results.tests]
    parts += [_write_analysis(analysis, i) for i, analysis in enumerate(results.analyses)]
    return "".join(parts)


def _write_quantized(done: Quantized, number: int) -> str:
    low = [site for site in done.sites if site.weight is not None]
    metric = ""
    if done.change is not None and done.metric is not None:
        bound = "" if done.bound is None else f", of {percent(done.bound, 2)} accepted"
        metric = f" {escape(capitalise(done.metric))} changes by {span_of(done.change)}{bound}."
    rows = [
        [
            mono(site.name),
            escape(site.type),
            " × ".join(map(str, site.shape)),
            mono(site.weight or "16-bit"),
            escape(site.reason),
            "–" if site.weight_error is None else f"{site.weight_error:.4f}",
        ]
        for site in done.sites[:200]
    ]
    drawn = ""
    if any(site.metric_change is not None for site in done.sites):
        drawn = chart(f"waterfall-{number}", "Change of the end metric when each site alone is quantized")
    head = ("site", "kind", "shape", "weight", "why", "weight error")
    return (
        f"<h3>{escape(done.model)}, quantized for serving</h3>"
        + about(
            f"{len(low)} of {len(done.sites)} sites in low precision by the recipe {escape(done.recipe)}; "
            f"{size(done.bytes_before)} become {size(done.bytes_after)} ({percent(done.ratio, 0)}).{metric}"
        )
        + drawn
        + f"<details><summary>{len(done.sites)} sites</summary>{table(head, rows, numeric=(2, 5), caption='Quantized sites')}</details>"
    )


def _write_test(test: PairedTest) -> str:
    rows = [
        [
            escape(m.metric),
            chip(m.outcome, GOOD[m.outcome]),
            f"{m.baseline:.5f}",
            f"{m.candidate:.5f}",
            span_of(m.change),
            percent(m.minimum_detectable, 2),
            percent(m.margin, 2),
            f"{m.users:,}",
        ]
        for m in test.metrics
    ]
    head = ("metric", "verdict", "baseline", "candidate", "change, 95 %", "smallest detectable", "margin", "users")
    ratio = "".join(notice(escape(note)) for note in test.notes)
    if test.split.mismatch:
        ratio += notice(
            f"The users are not split between the arms as configured (p = {test.split.p_value:.2g}): do not trust this test."
        )
    overlap = ""
    if test.overlap:
        shared = ", ".join(f"{percent(part.share)} of the top {part.n}" for part in test.overlap)
        overlap = about(f"The lists of both arms share {escape(shared)}.")
    return (
        f"<h3>{escape(test.candidate)} against {escape(test.baseline)}, {escape(test.data)}</h3>{ratio}"
        + table(head, rows, numeric=range(2, 8), caption="Paired test by user")
        + overlap
    )


def _say_lines(analysis: Analysis) -> str:
    """Name the published values that the chart draws as lines."""
    named = "; ".join(f"{r.label.replace(' (published)', '')}: {r.statistic} {r.value:g}" for r in analysis.references)
    return f" The lines are published values, which were not measured here ({escape(named)})." if named else ""


def _write_analysis(analysis: Analysis, number: int) -> str:
    rows = [
        [escape(m.name), chip(m.likeness), escape("; ".join(m.reasons)), escape(m.activations_of or "weights only")]
        for m in analysis.models
    ]
    return (
        "<h3>Distributions of layers</h3>"
        + about(f"Variance and largest absolute value of every layer.{_say_lines(analysis)}")
        + chart(f"layers-{number}", "Variance against largest magnitude, one point per layer")
        + table(("model", "resembles", "because", "activations of"), rows, caption="Models")
    )
