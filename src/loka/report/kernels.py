"""Kernels: times compared with bf16 and the roofline, and rows of the performance database."""

from loka.records.performance import KernelBench, KernelRow, PerformanceRows
from loka.report.markup import about, capitalise, chart, chip, escape, mono, table, times
from loka.report.results import Results

SHOWN = 60  # rows of a benchmark


def write_kernels(results: Results) -> str:
    """Return the benchmarks with their rooflines, then the database rows by size."""
    text = "".join(_write_bench(bench, number) for number, bench in enumerate(results.benches))
    return text + "".join(_write_rows(rows, number) for number, rows in enumerate(results.rows))


def _write_bench(bench: KernelBench, number: int) -> str:
    here = bench.environment
    ops = ", ".join(dict.fromkeys(r.op for r in bench.rows))
    timed = [r for r in bench.rows if r.microseconds is not None]
    wrong = "; the others were refused or gave wrong results, for the reason in their row"
    others = wrong if len(timed) < len(bench.rows) else ""
    text = f"<h3>{escape(ops)} on {escape(here.device)}</h3>" + about(
        f"{len(timed)} of {len(bench.rows)} rows were timed ({escape(bench.method)}, {escape(here.date[:10])}, "
        f"torch {escape(here.torch)}){others}.{_say_peaks(bench)}"
    )
    if bench.peaks is not None and any(r.op in ("scaled_mm", "fused_linear") for r in timed):
        label = "Achieved FLOP rate by arithmetic intensity, with the roofs measured on the same device"
        text += chart(f"roofline-{number}", label)
    rows = [_bench_row(r) for r in bench.rows[:SHOWN]]
    more = f"<p>{len(bench.rows) - SHOWN} more rows are in the record.</p>" if len(bench.rows) > SHOWN else ""
    head = ("call", "backend", "µs", "roofline µs", "of roofline", "over bf16", "")
    return text + (
        f"<details><summary>{len(bench.rows)} "
        f"rows</summary>{table(head, rows, numeric=range(2, 6), caption=ops)}{more}{_list_notes(bench.notes)}</details>"
    )


def _list_notes(notes: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(capitalise(note))}</li>' for note in notes)}</ul>" if notes else ""


def _say_peaks(bench: KernelBench) -> str:
    peaks = bench.peaks
    if peaks is None:
        return ""
    said = [f"copies {peaks.copy_bytes_per_second / 1e12:.2f} TB/s"]
    said += [f"bf16 {peaks.bf16_flops / 1e12:.0f} TFLOP/s"] if peaks.bf16_flops else []
    said += [f"FP8 {peaks.fp8_flops / 1e12:.0f} TFLOP/s"] if peaks.fp8_flops else []
    return f" Peaks measured on the same device: {', '.join(said)}."


def _bench_row(r: KernelRow) -> list[str]:
    roof = r.roofline_microseconds
    time = r.microseconds.value if r.microseconds else None
    why = r.refusal or ""
    return [
        mono(r.call),
        escape(r.backend),
        "–" if time is None else f"{time:.1f}",
        "–" if roof is None else f"{roof:.1f}",
        "–" if time is None or roof is None else f"{100 * roof / time:.0f} %",
        "–" if r.speedup is None else times(r.speedup),
        chip("wrong", "bad") + " " + escape(why) if r.red else escape(why),
    ]


def _write_rows(rows: PerformanceRows, number: int) -> str:
    origins = {(g.origin.device, g.origin.date[:10], g.origin.torch) for g in rows.groups}
    where = "; ".join(f"{device}, {date}, torch {torch}" for device, date, torch in sorted(origins))
    linear = [r for g in rows.groups for r in g.rows if r.op == "linear" and r.speedup]
    if not linear:
        return ""
    shapes = {(r.variant.split()[0], r.m, r.k, r.n) for r in linear}
    best = [
        max(r.speedup.value for r in linear if r.speedup and (r.variant.split()[0], r.m, r.k, r.n) == s) for s in shapes
    ]
    faster = sum(value > 1.05 for value in best)
    return (
        "<h3>When FP8 pays: size decides</h3>"
        + about(
            f"Speed-up of one linear's GEMM over bf16, including quantization of both operands, by its FLOPs; measured on {escape(where)}, "
            f"{len(linear)} rows. The best FP8 kernel is more than 5 % faster for {faster} of {len(shapes)} products; "
            "below the line FP8 costs time. Plans for that device are made from these rows."
        )
        + chart(f"rows-{number}", "Speed-up over bf16 by the FLOPs of the product, one point per kernel and shape")
    )
