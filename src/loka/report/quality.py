"""Quality: comparisons with intervals, loss curves, and the effects of mods."""

from loka.records import Comparison, ModSummary, Recovery
from loka.report.markup import about, capitalise, chart, chip, escape, mono, notice, percent, signed, span_of, table
from loka.report.results import Results

GOOD = {"equivalent": "good", "better": "good", "worse": "bad", "inconclusive": ""}


def write_quality(results: Results) -> str:
    """Return the comparisons with intervals, and the loss curves."""
    if not results.runs and not results.comparisons:
        return ""
    text = []
    if results.comparisons:
        first = results.ordered_comparisons[0]
        text.append(
            about(
                f"All runs continue the same checkpoint on the same batches.{_say_swapped(results)} The shaded band "
                f"is the margin of ±{percent(first.margin)}: an interval inside it is equivalent; one that leaves it and contains "
                f"zero is inconclusive. Smallest change that this test can detect (80 % power): "
                f"{percent(first.minimum_detectable, 3)}.{_say_noise(results)} Pairs: test examples, each compared with itself. "
                "Clusters: the independent groups that the interval is over, e.g. households."
            )
        )
        text.append(chart("comparisons", "Change of the log loss by run, with 95 % intervals and the margin"))
        text.append(_table_comparisons(results))
    if results.runs:
        text.append('<div class="pair">')
        text.append(f"<div><h3>Training loss</h3>{chart('curves', 'Training loss by step')}</div>")
        if len(results.runs) > 1:
            text.append(f"<div><h3>Difference</h3>{chart('gaps', 'Training loss relative to the first run')}</div>")
        text.append("</div>")
    return "\n".join(text)


def _say_swapped(results: Results) -> str:
    """Explain comparisons that have no training run of their own."""
    if {c.candidate for c in results.comparisons} <= {run.name for run in results.runs}:
        return ""
    return ' "Swapped in" is the baseline with its final weights, converted but not trained further: it has no training noise.'


def _say_noise(results: Results) -> str:
    """Explain the noise of training that a control run in high precision shows."""
    same = [c.candidate for c in results.ordered_comparisons if _is_baseline(c)]
    verb = "is" if len(same) == 1 else "are"
    nothing = f" Nothing was converted: {escape(' and '.join(same))} {verb} the baseline itself." if same else ""
    return nothing + "".join(
        f" The {escape(c.candidate)} is in high precision too, from slightly perturbed weights: its "
        f"{signed(c.relative_change.value)} is training noise, which the intervals (over test examples) do not include."
        for c in results.ordered_comparisons
        if c.low_precision_flops_share == 0 and not _is_baseline(c)
    )


def _is_baseline(c: Comparison) -> bool:
    """Return True for a comparison in which nothing was converted and nothing changed."""
    return c.low_precision_flops_share == 0 and c.relative_change.low == c.relative_change.high == 0


def _table_comparisons(results: Results) -> str:
    head = ("run", "verdict", "change", "95 % interval", "log loss", "AUC", "in FP8", "pairs", "clusters")
    runs = {run.name: run for run in results.runs}
    rows = []
    baseline = runs.get(results.ordered_comparisons[0].baseline)
    if baseline is not None:
        rows.append([escape(baseline.name), "baseline", "", "", *_metrics(baseline.metrics), percent(0, 0), "", ""])
    for c in results.ordered_comparisons:
        run = runs.get(c.candidate)
        cells = [
            escape(c.candidate),
            chip(c.outcome, GOOD[c.outcome]),
            signed(c.relative_change.value),
            span_of(c.relative_change),
            *_metrics(run.metrics if run else {}),
            percent(c.low_precision_flops_share),
            f"{c.pairs:,}",
            f"{c.clusters:,}",
        ]
        rows.append(cells)
    return table(head, rows, numeric=range(2, 9))


def _metrics(metrics: dict[str, float]) -> list[str]:
    return [f"{metrics[name]:.5f}" if name in metrics else "–" for name in ("log_loss", "auc")]


def write_mods(results: Results) -> str:
    """Return what mods changed, what they left and why, and how much quality training recovered."""
    return "".join(_write_mod(summary) for summary in results.mods)


_EFFECT = {"exact": "good", "rounding": "good", "architecture": ""}


def _write_mod(summary: ModSummary) -> str:
    head = about(
        f"{escape(', '.join(summary.mods)) or 'No mod'}: {len(summary.changed)} sites changed, {len(summary.left)} left unchanged. "
        "An exact mod computes the same function; an architecture change computes another one and needs training."
    )
    rows = [
        [escape(c.mod), mono(c.site), chip(c.effect, _EFFECT[c.effect]), escape(c.what)] for c in summary.changed[:60]
    ]
    rows += [[escape(c.mod), mono(c.site), chip("left"), escape(c.why)] for c in summary.left[:20]]
    notes = "".join(notice(escape(capitalise(note))) for note in summary.notes)
    return (
        head
        + notes
        + _table_recovery(summary.recovery)
        + table(("mod", "site", "effect", "what, or why not"), rows, caption="Mods")
    )


def _table_recovery(found: list[Recovery]) -> str:
    if not found:
        return ""
    rows = [
        [
            escape(r.metric),
            f"{r.before:.5f}",
            f"{r.after_mods:.5f}",
            "not measured" if r.after_training is None else f"{r.after_training:.5f}",
            f"{r.steps:,}",
        ]
        for r in found
    ]
    head = ("metric", "before", "right after the mods", "after training", "steps")
    return table(head, rows, numeric=range(1, 5), caption="What the mods cost, and what training recovered")
