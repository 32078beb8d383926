"""The ablation of mods by precision: quality over paired seeds, latency of the same grid, and a summary of both."""

from ablation_record import Ablation, AblationCell, AblationLatency, PairedChange, TowerLatency

from tables.results import load_record, table


def read_ablation() -> Ablation | None:
    """The quality of the grid of mods and precisions; None where it is not there."""
    return load_record("h200/ablation.json", Ablation)


def read_latency() -> AblationLatency | None:
    """The latency of the same grid; None where it is not there."""
    return load_record("h200/ablation_latency.json", AblationLatency)


def ablation_table() -> str | None:
    """Every cell: mods by precision by data set."""
    found = read_ablation()
    if found is None:
        return None
    head = ["data", "mods", "precision", "in FP8 (GEMM FLOPs)", "log loss", "compared with the original in bf16, 95 %", "smallest detectable", "verdict",
            "compared with naive, 95 %", "seeds"]  # fmt: skip
    return "\n\n".join([table(head, [list_cell(cell) for cell in found.cells]), *say_caveats(found)])


def list_cell(cell: AblationCell) -> list[str]:
    """A row of the table; what was not compared stays empty."""
    change = cell.against_original
    lost = f", {cell.diverged} diverged" if cell.diverged else ""
    return [
        cell.data,
        cell.variant,
        cell.precision,
        f"{100 * cell.fp8_share:.1f} %",
        "" if cell.log_loss is None else f"{cell.log_loss:.5f}",
        spell_change(change),
        f"{100 * change.minimum_detectable:.3f} %" if change else "",
        f"**{change.outcome}**" if change else "",
        spell_change(cell.against_naive),
        f"{cell.seeds}{lost}",
    ]


def say_caveats(found: Ablation) -> list[str]:
    """Return caveats: runs that are missing, plans that are the naive recipe."""
    kinds = ((found.skipped, "were skipped for lack of time"), (found.failed, "failed"))
    missing = ", ".join(f"{len(runs)} runs {word}" for runs, word in kinds if runs)
    same = "; ".join(f"{data} ({', '.join(variants)})" for data, variants in found.list_equal_plans().items())
    said = []
    if missing:
        said.append(f"Not complete: {missing}.")
    if same:
        said.append(
            "Here the plan chose the naive recipe for every GEMM, so planned and naive FP8 are two runs of the same recipe, and their difference is noise: "
            f"{same}."
        )
    return said


def spell_change(found: PairedChange | None) -> str:
    """A relative change with its interval, in percent."""
    if found is None:
        return ""
    value, low, high = (f"{100 * number:+.3f}" for number in (found.change.value, found.change.low, found.change.high))
    return f"{value} % [{low}, {high}]"


def latency_table() -> str | None:
    """The towers: one row per step, batch and variant, one column per precision."""
    found = read_latency()
    if found is None:
        return None
    precisions = list(dict.fromkeys(row.precision for row in (*found.rows, *found.refused)))
    late = "out of time"
    refused = {(r.mode, r.batch, r.variant, r.precision): late if r.why == late else "refused" for r in found.refused}
    rows = []
    for mode, batch, variant in dict.fromkeys((row.mode, row.batch, row.variant) for row in found.rows):
        cells = [{"infer": "inference", "train": "training step"}[mode], f"{batch:,}", variant]
        for precision in precisions:
            timed = found.find(mode, batch, variant, precision)
            cells.append(spell_time(timed) if timed else refused.get((mode, batch, variant, precision), ""))
        rows.append(cells)
    why = list(dict.fromkeys(row.why for row in found.refused if row.why != late))
    said = f"{found.tower}. {found.method[:1].upper()}{found.method[1:]}."
    return "\n\n".join(
        [table(["step", "batch", "mods", *precisions], rows), said, *([f"Refused: {'; '.join(why)}."] if why else [])]
    )


def spell_time(row: TowerLatency) -> str:
    """Microseconds and the speed-up with its interval."""
    s = row.speedup
    return f"{row.microseconds.value:.1f} us, {s.value:.2f}x [{s.low:.2f}, {s.high:.2f}]"


def ablation_summary() -> str | None:
    """Return the block for the page of mods: a line per data set, and one about latency."""
    found, latency = read_ablation(), read_latency()
    lines = [*(say_quality(found) if found else []), *(say_latency(latency) if latency else [])]
    return "\n".join(["## What the mods are worth\n", *lines]) if lines else None


def loss_table() -> str | None:
    """Return the cost of FP8 alone: the unmodified model, FP8 compared with bf16 over paired seeds."""
    found = read_ablation()
    if found is None:
        return None
    rows = []
    for data in found.data:
        for precision in ("planned", "naive"):
            cell = found.find(data, "none", precision)
            if cell is None or cell.against_bf16 is None:
                continue
            change = cell.against_bf16
            rows.append(
                [data, precision, f"{100 * cell.fp8_share:.1f} %", spell_change(change), f"{100 * change.minimum_detectable:.3f} %",
                 f"**{change.outcome}**", str(change.seeds)]
            )  # fmt: skip
    head = ["data", "FP8", "in FP8 (GEMM FLOPs)", "change of log loss, 95 %", "smallest detectable", f"verdict at {100 * found.margin:.1f} %", "paired seeds"]  # fmt: skip
    return table(head, rows) if rows else None


def say_quality(found: Ablation) -> list[str]:
    """Return what was measured and a line per data set; empty if no data set has results."""
    lines = [line for data in found.data if (line := say_data(found, data))]
    if not lines:
        return []
    seeds = max(cell.seeds for cell in found.cells)
    return [
        f"Test log loss of {found.model} compared with the unmodified model in bf16, up to {seeds} paired seeds, margin {100 * found.margin:.1f} %, "
        f"on {found.environment.device} ([all cells](MEASURED)):\n",
        *lines,
    ]


def say_data(found: Ablation, data: str) -> str | None:
    """Return the three main comparisons of one data set."""
    asked = {
        "all mods, planned FP8": ("all", "planned"),
        "no mods, planned FP8": ("none", "planned"),
        "no mods, naive FP8": ("none", "naive"),
    }
    said = []
    for name, (variant, precision) in asked.items():
        cell = found.find(data, variant, precision)
        if cell is not None and cell.against_original is not None:
            said.append(f"{name} {spell_change(cell.against_original)} **{cell.against_original.outcome}**")
        elif cell is not None and cell.diverged:
            said.append(f"{name}: {cell.diverged} of {cell.seeds} runs diverged")
    return f"- {data}: {'; '.join(said)}" if said else None


def say_latency(latency: AblationLatency) -> list[str]:
    """Return the line about latency: all mods and the fused tower, by batch size; empty if it was not timed."""
    timed = [r for r in latency.rows if (r.mode, r.variant, r.precision) == ("infer", "all", "fused")]
    if not timed:
        return []
    speeds = ", ".join(
        f"{r.speedup.value:.2f}x [{r.speedup.low:.2f}, {r.speedup.high:.2f}] at batch {r.batch:,}" for r in timed
    )
    return [
        f"- latency of an MLP tower of width {latency.settings['width']:,}, all mods with a fused FP8 tower (measured before chains existed), speed-up over the unmodified tower in compiled bf16: **{speeds}** "
        f"on {latency.environment.device}"
    ]
