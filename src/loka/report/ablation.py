"""Ablation: what the plan is worth on this job, and what mods and precisions are worth on a grid of trained models, with their latency.

A grid is read against one cell, the unmodified model in bf16. Where a cell has no comparison (one seed, every run diverged) the table says so
and the chart has no point.
"""

from collections.abc import Sequence

from loka.records import Ablation, AblationCell, AblationLatency, Interval, PairedChange, TowerLatency
from loka.records.ablation import BASELINE, ORIGINAL
from loka.report.markup import about, chart, chip, count, escape, notice, percent, row, signed, span_of, table, times
from loka.report.quality import GOOD, write_worth
from loka.report.results import Results

__all__ = ["say_grid", "say_latency", "write_ablation"]

ALL, PLANNED, NAIVE, FUSED = "all", "planned", "naive", "fused"
_CELLS = range(4, 12)
_TIMES = range(4, 7)


def write_ablation(results: Results) -> str:
    """The parts that there are records for."""
    worth = write_worth(results)
    text = [f"<h3>What the plan is worth</h3>{worth}"] if worth else []
    text += [_write_grid(found, number) for number, found in enumerate(results.ablations)]
    text += [_write_latency(found, number) for number, found in enumerate(results.latencies)]
    return "\n".join(text)


def say_grid(found: Ablation) -> str:
    """The bar in one sentence: all mods in planned FP8 against the original in bf16."""
    cells = [found.find(data, ALL, PLANNED) for data in found.data]
    judged = [cell.against_original for cell in cells if cell is not None and cell.against_original is not None]
    if not judged:
        return f"{found.model} with mods and in other precisions: too few runs to compare"
    counts = {outcome: sum(change.outcome == outcome for change in judged) for outcome in GOOD}
    said = ", ".join(f"{outcome} on {number}" for outcome, number in counts.items() if number)
    of = f" of {len(judged)}" if len(judged) > max(counts.values()) else ""
    sets = "data set" if len(judged) == 1 else "data sets"
    return f"All mods in planned FP8 against the original in bf16: {said}{of} {sets}"


def say_latency(found: AblationLatency) -> str:
    """The speed-up of all mods in fused FP8 at every batch."""
    rows = [r for r in found.rows if (r.mode, r.variant, r.precision) == ("infer", ALL, FUSED)]
    if not rows:
        return "The latency of mods and precisions, measured"
    if found.environment.device == "cpu":
        return "The latency of the grid was taken on a CPU, where FP8 is emulated: it says nothing about speed"
    said = ", ".join(f"{r.speedup.value:.2f}× at batch {r.batch:,}" for r in rows)
    return f"All mods in fused FP8 over the unmodified tower in bf16: {said}"


def _write_grid(found: Ablation, number: int) -> str:
    precisions = ", ".join(dict.fromkeys(cell.precision for cell in found.cells))
    seeds = sorted({cell.seeds for cell in found.cells})
    spread = "–".join(map(str, dict.fromkeys((seeds[0], seeds[-1])))) if seeds else "0"
    text = "<h3>What the mods are worth</h3>" + about(
        f"{escape(found.model)}, as it is and with mods, trained in {escape(precisions)}, {spread} seeds a cell on {escape(found.environment.device)}. "
        "All cells of a seed start from the same weights and see the same batches. Shown: the test log loss relative to the unmodified model in bf16 (zero), 95 % "
        f"Student intervals over seeds, and the band of ±{percent(found.margin)} that is taken not to matter."
    )
    said = "".join(f"<li>{line}</li>" for data in found.data if (line := _say_data(found, data)))
    text += f"<ul>{said}</ul>" if said else ""
    missing = [f"{count(len(runs), 'run')} {word}" for runs, word in ((found.skipped, "left out for lack of time"), (found.failed, "failed")) if runs]  # fmt: skip
    text += notice(f"The grid is not complete: {', '.join(missing)}.") if missing else ""
    same = "; ".join(f"{data} ({', '.join(variants)})" for data, variants in found.list_equal_plans().items())
    text += (
        notice(
            f"The plan chose the naive recipe for every GEMM: planned and naive FP8 are two runs of one recipe, and their difference is noise: {escape(same)}."
        )
        if same
        else ""
    )
    charts = "".join(
        f"<div><h4>{escape(data)}</h4>{chart(f'ablation-{number}-{place}', f'Change of the log loss on {data} by mods and precision, with 95 % intervals and the margin')}</div>"
        for place, data in enumerate(found.data)
        if any(cell.data == data and cell.against_original for cell in found.cells)
    )
    head = ("data", "mods", "precision", "verdict", "against the original in bf16", "smallest detectable", "against its own bf16", "against naive", "log loss",
            "AUC", "in FP8", "seeds")  # fmt: skip
    body = table(head, [_row_of(cell) for cell in found.cells], numeric=_CELLS, caption="Cells of the ablation")
    return f'{text}<div class="trio">{charts}</div><details><summary>{count(len(found.cells), "cell")}</summary>{body}</details>'


def _say_data(found: Ablation, data: str) -> str:
    """What a reader asks first of one data set."""
    asked = (
        ("all mods, planned FP8", found.find(data, ALL, PLANNED)),
        ("no mods, planned FP8", found.find(data, ORIGINAL, PLANNED)),
        ("no mods, naive FP8", found.find(data, ORIGINAL, NAIVE)),
    )
    said = [f"{name} {_say_change(cell.against_original)}" for name, cell in asked if cell and cell.against_original]
    return f"{escape(data)}: {'; '.join(said)}." if said else ""


def _say_change(found: PairedChange) -> str:
    return f"{signed(found.change.value)} [{signed(found.change.low)}, {signed(found.change.high)}], {found.outcome}"


def _row_of(cell: AblationCell) -> str:
    original = (cell.variant, cell.precision) == (ORIGINAL, BASELINE)
    found = cell.against_original
    lost = f", {cell.diverged} diverged" if cell.diverged else ""
    cells = [
        escape(cell.data),
        escape(cell.variant),
        escape(cell.precision),
        chip(found.outcome, GOOD[found.outcome]) if found else "baseline" if original else "not compared",
        _change(found),
        "–" if found is None else percent(found.minimum_detectable, 3),
        _change(cell.against_bf16),
        _change(cell.against_naive),
        "–" if cell.log_loss is None else f"{cell.log_loss:.5f}",
        "–" if cell.auc is None else f"{cell.auc:.5f}",
        percent(cell.fp8_share),
        f"{cell.seeds}{lost}",
    ]
    return row(cells, numeric=_CELLS)


def _change(found: PairedChange | None) -> str:
    return "–" if found is None else f"{signed(found.change.value)}<br>{span_of(found.change)}"


def _write_latency(found: AblationLatency, number: int) -> str:
    here = found.environment
    text = "<h3>What they cost in time</h3>" + about(
        f"{escape(found.tower)}; {escape(found.method)}; {escape(here.device)}, {escape(here.date[:10])}. Speed-up over the unmodified tower in bf16. Naive FP8 is "
        "tensorwise; a plan runs tensorwise or rowwise GEMM by GEMM, or the whole tower fused, which needs BlockNorm."
    )
    said = say_latency(found)
    text += f"<p>{escape(said)}.</p>" if found.rows else ""
    charts = "".join(
        f"<div><h4>{_name_panel(mode, batch)}</h4>"
        + chart(
            f"latency-{number}-{mode}-{batch}",
            f"Speed-up over the unmodified tower in bf16, {_name_panel(mode, batch)}",
        )
        + "</div>"
        for mode, batch in dict.fromkeys((r.mode, r.batch) for r in found.rows)
    )
    head = ("step", "batch", "mods", "precision", "µs, 95 %", "over unmodified bf16", "error")
    body = table(head, [_row_of_time(r) for r in found.rows], numeric=(1, *_TIMES), caption="Latency of the towers")
    return f'{text}<div class="pair">{charts}</div><details><summary>{count(len(found.rows), "row")}</summary>{body}{_list_refused(found)}</details>'


def _name_panel(mode: str, batch: int) -> str:
    return f"{'inference' if mode == 'infer' else 'training step'}, batch {batch:,}"


def _row_of_time(r: TowerLatency) -> str:
    name = "inference" if r.mode == "infer" else "training step"
    cells = [
        name,
        f"{r.batch:,}",
        escape(r.variant),
        escape(r.precision),
        _spell_time(r.microseconds),
        times(r.speedup),
        f"{r.error:.3f}",
    ]
    return row(cells, numeric=(1, *_TIMES))


def _spell_time(time: Interval) -> str:
    return f"{time.value:,.1f} [{time.low:,.1f}, {time.high:,.1f}]"


def _list_refused(found: AblationLatency) -> str:
    """Refusals by reason: most of a grid's are one."""
    reasons: dict[str, list[str]] = {}
    for r in found.refused:
        reasons.setdefault(r.why, []).append(f"{r.variant} {r.precision} ({_name_panel(r.mode, r.batch)})")
    lines: Sequence[str] = [f"<li>{escape(', '.join(who))}: {escape(why)}</li>" for why, who in reasons.items()]
    return f"<p>Not timed:</p><ul>{''.join(lines)}</ul>" if lines else ""
