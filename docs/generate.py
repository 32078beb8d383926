"""Pages and tables that are made from the code and from committed results, so that no number is typed by hand.

    python docs/generate.py            writes docs/measured.md, docs/reference/cli.md and the marked blocks of README.md and docs/mods.md
    python docs/generate.py --check    exit 1 when one of them is not what it would write

Needs loka and its command line (typer), no torch.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.records import Ablation, AblationLatency, PairedChange, TowerLatency

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DEMO = "<!-- demo: written by docs/generate.py from benchmarks/results/cpu/demo.json -->"
METRICS = {"auc": "AUC", "hr10": "HR@10"}
QUALITY = "<!-- quality: written by docs/generate.py from benchmarks/results/h200/quality.json -->"
ENGINE = "<!-- engine: written by docs/generate.py from benchmarks/results/h200/onerec_engine.json and onerec_quality.json -->"
ABLATION = "<!-- ablation: written by docs/generate.py from benchmarks/results/h200/ablation.json and ablation_latency.json -->"
BEGIN, END = "<!-- numbers: written by docs/generate.py from benchmarks/results/h200 -->", "<!-- end of numbers -->"
NAMES = {
    "wukong": "Wukong",
    "wukong8k": "Wukong, width 8,192",
    "dlrm": "DLRM",
    "elfm": "ELFM",
    "interformer": "InterFormer",
    "hstu": "HSTU",
}


def read(name: str) -> dict[str, Any] | None:
    """A result file; None where it is not there."""
    path = RESULTS / name
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def models_table() -> str | None:
    """Whole models: bf16, torchao and loka, step time with its interval."""
    found = read("h200/fp8_models.json")
    if found is None:
        return None
    rows = []
    for name, case in found["cases"].items():
        model, kind, *way = name.split("-")
        speed = found["speedup"].get(name)
        if speed is None or "ms" not in case:
            continue
        rows.append(
            [
                NAMES.get(model, model),
                {"train": "training step", "infer": "inference"}.get(kind, kind),
                f"{case['batch']:,}",
                " ".join(way),
                f"{case['ms']:.2f} ms [{case['ms_low']:.2f}, {case['ms_high']:.2f}]",
                f"{speed['speedup']:.2f}x",
                f"{speed['memory']:.2f}x" if "memory" in speed else "",
                f"{case['fp8_share']:.0%}" if case.get("fp8_share") else "",
            ]
        )
    order = {"bf16": 0, "fp32": -2, "tf32": -1}
    rows.sort(key=lambda row: (row[0], row[1], order.get(row[3], 1 if "torchao" in row[3] else 2)))
    return table(
        ["model", "what", "batch", "precision", "time, 95 %", "over bf16", "peak memory", "products in FP8"], rows
    )


def headline_table() -> str | None:
    """One line per model: what loka gains over compiled bf16."""
    found = read("h200/fp8_models.json")
    if found is None:
        return None
    rows = []
    for name, speed in found["speedup"].items():
        if not name.endswith("-loka"):
            continue
        model, kind, _ = name.split("-")
        base, case = found["cases"][f"{model}-{kind}-bf16"], found["cases"][name]
        rival = found["speedup"].get(f"{model}-{kind}-torchao-tensorwise")
        rows.append(
            [
                NAMES.get(model, model),
                {"train": "training step", "infer": "inference"}[kind],
                f"{base['ms']:.2f} ms",
                f"{case['ms']:.2f} ms",
                f"**{speed['speedup']:.2f}x**",
                f"{rival['speedup']:.2f}x" if rival else "not measured",
            ]
        )
    rows.sort(key=lambda row: (row[1], -float(row[4].strip("*x"))))
    return table(["model", "what", "compiled bf16", "loka FP8", "speed-up", "torchao tensorwise"], rows)


RUNS = {
    "planned": "trained on in planned FP8",
    "naive": "trained on in naive FP8 (tensorwise everywhere)",
    "swap-planned": "final float32 weights, planned FP8 swapped in",
    "swap-naive": "final float32 weights, naive FP8 swapped in",
    "control": "control: float32 again, weights nudged by a bf16 rounding",
}


def demo_table() -> str | None:
    """The demo's comparisons, as `loka demo --json` wrote them."""
    found = read("cpu/demo.json")
    if found is None:
        return None
    rows = []
    for name, text in RUNS.items():
        c = found["comparisons"][name]
        change = c["relative_change"]
        value, low, high = (f"{100 * change[key]:+.3f}" for key in ("value", "low", "high"))
        share = f"{100 * c['low_precision_flops_share']:.1f} %"
        rows.append([text, share, f"{value} % [{low}, {high}]", f"**{c['outcome']}**"])
    first = found["comparisons"]["planned"]
    head = [
        "run",
        "in FP8 (GEMM FLOPs)",
        f"change of {first['metric']}, 95 %",
        f"verdict at a margin of {100 * first['margin']:.1f} %",
    ]
    said = (
        f"{first['pairs']:,} test examples, {first['clusters']:,} households resampled; {found['converted']} of {found['linears']} linears converted; "
        f"threads: {found['environment']['threads']}, {found['environment']['date'][:10]}, commit {found['environment']['commit']}."
    )
    return f"{table(head, rows)}\n\n{said}"


def fused_table() -> str | None:
    """One fused layer against compiled bf16."""
    found, training = read("h200/fused_linear.json"), read("h200/fused_linear_training.json")
    if found is None:
        return None
    backward = {}
    for row in (training or {"rows": []})["rows"]:
        if row["backend"] == "triton" and row["speedup"]:
            backward[tuple(row["shape"][d] for d in "mkn")] = row["speedup"]["value"]
    calls: dict[tuple[int, ...], dict[str, Any]] = {}
    for row in found["rows"]:
        if row["microseconds"]:
            calls.setdefault(tuple(row["shape"][d] for d in "mkn"), {})[row["backend"]] = row
    rows = []
    for shape, ways in calls.items():
        if {"bf16", "triton"} <= ways.keys():
            bare = [way["microseconds"]["value"] for name, way in ways.items() if name.startswith("gemm ")]
            s = ways["triton"]["speedup"]
            rows.append(
                [
                    ", ".join(f"{d:,}" for d in shape),
                    f"{ways['bf16']['microseconds']['value']:.1f} us",
                    f"{min(bare):.1f} us" if bare else "",
                    f"{ways['triton']['microseconds']['value']:.1f} us",
                    f"{s['value']:.2f}x [{s['low']:.2f}, {s['high']:.2f}]",
                    f"{backward[shape]:.2f}x" if shape in backward else "",
                ]
            )
    return table(["M, K, N", "bf16", "best bare FP8 GEMM", "fused layer", "over bf16", "forward + backward"], rows)


def bench_table(name: str) -> str | None:
    """Every call of a kernel benchmark: the best backend beside bf16 and the roofline; refusals are counted."""
    found = read(name)
    if found is None:
        return None
    calls: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        calls.setdefault(row["call"], []).append(row)
    rows = []
    for call, ways in calls.items():
        timed = [w for w in ways if w["microseconds"] and w["backend"] != "bf16"]
        if not timed:
            continue
        best = min(timed, key=lambda w: w["microseconds"]["value"])
        base = next((w for w in ways if w["backend"] == "bf16" and w["microseconds"]), None)
        roof, time, speed = best["roofline_microseconds"], best["microseconds"]["value"], best["speedup"]
        rows.append(
            [
                f"`{call}`",
                best["backend"],
                f"{base['microseconds']['value']:.1f}" if base else "",
                f"{time:.1f}",
                f"{roof:.1f}" if roof else "",
                f"{speed['value']:.2f}x [{speed['low']:.2f}, {speed['high']:.2f}]" if speed else "",
                str(sum(w["refusal"] is not None for w in ways)),
            ]
        )
    return table(["call", "best backend", "bf16, us", "best, us", "roofline, us", "over bf16", "refused"], rows)


def quality_table() -> str | None:
    """Models against strong simple baselines, mean over seeds with its interval."""
    found = read("h200/quality.json")
    if found is None:
        return None
    rows = [
        [
            row["data"],
            row["model"],
            row["metric"],
            spell_mean(row),
            str(row["seeds"]),
            "; ".join(f"{name} {value:.4f}" for name, value in row["bar"].items()),
        ]
        for row in found["summary"]
        if row.get("mean") is not None
    ]
    return table(["data", "model", "metric", "mean, 95 % over seeds", "seeds", "baselines"], rows)


def spell_mean(row: dict[str, Any]) -> str:
    """A mean with its interval; one seed has none."""
    half = row.get("half_width")
    return (
        f"{row['mean']:.4f} ± {half:.4f}"
        if half is not None and math.isfinite(half)
        else f"{row['mean']:.4f}, one seed"
    )


def quality_headline() -> str | None:
    """For README: one row per model, one column per data set, the strongest baseline first."""
    found = read("h200/quality.json")
    if found is None:
        return None
    rows = [row for row in found["summary"] if row.get("mean") is not None]
    tasks = sorted({(row["metric"], row["data"]) for row in rows})
    cells = {(row["metric"], row["data"], row["model"]): spell_mean(row) for row in rows}
    bars = {(row["metric"], row["data"]): max(row["bar"].items(), key=lambda pair: pair[1]) for row in rows}
    names = list(dict.fromkeys(row["model"] for row in rows))
    head = ["", *(f"{data}, {METRICS[metric]}" for metric, data in tasks)]
    baseline = ["best simple baseline", *(f"{bars[task][1]:.4f} ({bars[task][0]})" for task in tasks)]
    return table(head, [baseline, *([name, *(cells.get((*task, name), "") for task in tasks)] for name in names)])


def probe_table() -> str | None:
    """What a probe costs a training step."""
    found = read("h200/probe_overhead.json")
    if found is None:
        return None
    rounds, memory = found["measure_rounds"], found["measure_memory"]
    low, high = rounds["overhead_percent_95"]
    rows = [
        ["step without a probe", f"{rounds['bare_step_ms']:.2f} ms"],
        ["step with a probe, amortised", f"{rounds['probed_step_ms']:.2f} ms"],
        ["overhead, median of paired rounds", f"{rounds['overhead_percent']:.2f} % [{low:.2f}, {high:.2f}]"],
        ["memory of the widest site", f"{memory['widest_site_mib']:.0f} MiB"],
        ["memory of all sites", f"{memory['planned_total_mib']:.0f} MiB"],
    ]
    return table(["compiled bf16 Wukong, 21 linears, batch 8,192", ""], rows)


def engine_table() -> str | None:
    """The generative engine: latency of a batch, and the bars it was measured against."""
    found = read("h200/onerec_engine.json")
    if found is None:
        return None
    rows = [
        [
            f"{row['variant']} (earlier run)" if "run" in row else row["variant"],
            str(row["batch"]),
            str(row["context"]),
            f"{row['ms']:.1f} [{row['ms_low']:.1f}, {row['ms_high']:.1f}]",
            f"{row['queries_per_s']:.0f}",
        ]
        for row in found["rows"]
        if "ms" in row and "ms_low" in row
    ]
    return "\n\n".join([table(["variant", "batch", "context", "ms, 95 %", "queries/s"], rows), *found.get("notes", [])])


def engine_headline() -> str | None:
    """For README: milliseconds of a batch from the plain model to FP8, and what FP8 did to trained models."""
    found, trained = read("h200/onerec_engine.json"), read("h200/onerec_quality.json")
    if found is None:
        return None
    steps = {"eager": "eager", "compiled": "compiled", "bf16": "engine, bf16", "fp8": "engine, FP8"}
    contexts = list(dict.fromkeys(row["context"] for row in found["rows"]))
    rows = []
    for context in contexts:
        ms = {r["variant"]: r["ms"] for r in found["rows"] if (r["context"], r["batch"]) == (context, 8)}
        ratio = f"**{ms['compiled'] / ms['fp8']:.2f}x**, {ms['bf16'] / ms['fp8']:.2f}x"
        rows.append([f"{context:,}", *(f"{ms[name]:.1f} ms" for name in steps), ratio])
    made = table(["context, 8 requests, beam 512", *steps.values(), "FP8 over compiled, over the bf16 engine"], rows)
    if trained is None:
        return made
    change = trained["pooled"]["recall@10"]
    return (
        f"{made}\n\nIn {len(trained['rows'])} trained models FP8 changes recall@10 by {change['percent']:+.2f} % "
        f"[{change['low']:+.2f}, {change['high']:+.2f}]: {change['verdict']} at a margin of 1 %."
    )


def generative_quality_table() -> str | None:
    """What FP8 changes in the answers of trained OneRec models."""
    found = read("h200/onerec_quality.json")
    if found is None:
        return None

    def spell(change: dict[str, Any]) -> str:
        return f"{change['percent']:+.2f} % [{change['low']:+.2f}, {change['high']:+.2f}], {change['verdict']}"

    metrics = ("recall@10", "ndcg@10", "log-likelihood")
    rows = [
        [
            f"{row['data']}, {row['model']}",
            str(row["fp8 against bf16"]["recall@10"]["users"]),
            *(spell(row["fp8 against bf16"][metric]) for metric in metrics),
            *(f"{row['overlap with bf16'][arm]['@50']:.1%}" for arm in ("fp8", "fp16")),
        ]
        for row in found["rows"]
    ]
    rows.append(["all of them", "", *(spell(found["pooled"][metric]) for metric in metrics), "", ""])
    head = ["data, model", "users", *metrics, "beams shared with bf16, n = 50: FP8", "fp16"]
    return table(head, rows)


def dispatch_table() -> str | None:
    """How near a choice from the database comes to the fastest kernel there is."""
    found = read("h200/dispatch/dispatch.json")
    if found is None:
        return None
    rows = [
        [
            name,
            str(s["gemms"]),
            f"{100 * s['of_oracle']:.2f} %",
            f"{100 * s['worst_of_oracle']:.1f} %",
            str(s["low_precision"]),
            f"{s['mean_speedup']:.2f}x",
        ]
        for name, s in found["summary"].items()
    ]
    return table(["policy, GEMMs", "GEMMs", "of the fastest, mean", "worst", "in FP8", "speed-up, mean"], rows)


def size_table() -> str | None:
    """One linear's GEMM, its own quantisation included: from which size FP8 pays."""
    found = read("h200/dispatch/rows.json")
    if found is None:
        return None
    best: dict[tuple[str, int, int, int], dict[str, Any]] = {}
    for row in (row for group in found["groups"] for row in group["rows"] if row["op"] == "linear" and row["speedup"]):
        key = (row["variant"].split()[0], row["m"], row["k"], row["n"])
        if key not in best or row["speedup"]["value"] > best[key]["speedup"]["value"]:
            best[key] = row
    rows = []
    for (gemm, m, k, n), row in sorted(best.items(), key=lambda item: item[0][1] * item[0][2] * item[0][3]):
        s, how = row["speedup"], row["variant"].split(" ", 1)[1]
        rows.append(
            [
                gemm,
                f"{m:,}, {k:,}, {n:,}",
                f"{2 * m * k * n / 1e9:.1f}",
                f"{s['value']:.2f}x [{s['low']:.2f}, {s['high']:.2f}]",
                f"`{how}` on {row['backend']}",
            ]
        )
    return table(["GEMM", "M, K, N", "GFLOP", "best over bf16", "which"], rows)


def read_ablation() -> "Ablation | None":
    """The quality of the grid of mods and precisions; None where it is not there."""
    from loka.records import Ablation, load

    path = RESULTS / "h200" / "ablation.json"
    return load(path, Ablation) if path.exists() else None


def read_latency() -> "AblationLatency | None":
    """The latency of the same grid; None where it is not there."""
    from loka.records import AblationLatency, load

    path = RESULTS / "h200" / "ablation_latency.json"
    return load(path, AblationLatency) if path.exists() else None


def spell_change(found: "PairedChange | None") -> str:
    """A relative change with its interval, in percent."""
    if found is None:
        return ""
    value, low, high = (f"{100 * number:+.3f}" for number in (found.change.value, found.change.low, found.change.high))
    return f"{value} % [{low}, {high}]"


def ablation_table() -> str | None:
    """Every cell: mods by precision by data set."""
    found = read_ablation()
    if found is None:
        return None
    rows = []
    for cell in found.cells:
        change = cell.against_original
        lost = f", {cell.diverged} diverged" if cell.diverged else ""
        rows.append(
            [
                cell.data,
                cell.variant,
                cell.precision,
                f"{100 * cell.fp8_share:.1f} %",
                "" if cell.log_loss is None else f"{cell.log_loss:.5f}",
                spell_change(change) if change else "",
                f"{100 * change.minimum_detectable:.3f} %" if change else "",
                f"**{change.outcome}**" if change else "",
                spell_change(cell.against_naive),
                f"{cell.seeds}{lost}",
            ]
        )
    head = ["data", "mods", "precision", "in FP8 (GEMM FLOPs)", "log loss", "against the original in bf16, 95 %", "smallest detectable", "verdict",
            "against naive, 95 %", "seeds"]  # fmt: skip
    missing = [
        f"{len(runs)} runs {word}"
        for runs, word in ((found.skipped, "were left out for lack of time"), (found.failed, "failed"))
        if runs
    ]
    same = "; ".join(f"{data} ({', '.join(variants)})" for data, variants in found.list_equal_plans().items())
    said = [f"Not complete: {', '.join(missing)}."] if missing else []
    said += (
        [
            f"The plan chose the naive recipe for every GEMM: planned and naive FP8 are two runs of one recipe, and their difference is noise: {same}."
        ]
        if same
        else []
    )
    return "\n\n".join([table(head, rows), *said])


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


def spell_time(row: "TowerLatency") -> str:
    """Microseconds and the speed-up with its interval."""
    s = row.speedup
    return f"{row.microseconds.value:.1f} us, {s.value:.2f}x [{s.low:.2f}, {s.high:.2f}]"


def ablation_summary() -> str | None:
    """For README and the page of mods: the bars, a line per data set and one about time."""
    found, latency = read_ablation(), read_latency()
    lines = [] if found is None else [line for data in found.data if (line := say_data(found, data))]
    if found is not None and lines:
        seeds = max(cell.seeds for cell in found.cells)
        lines.insert(
            0,
            f"Test log loss of {found.model} against the unmodified model in bf16: up to {seeds} paired seeds, margin {100 * found.margin:.1f} %, "
            f"on {found.environment.device} ([all cells](MEASURED)):\n",
        )
    timed = (
        []
        if latency is None
        else [r for r in latency.rows if (r.mode, r.variant, r.precision) == ("infer", "all", "fused")]
    )
    if latency is not None and timed:
        speeds = ", ".join(
            f"{r.speedup.value:.2f}x [{r.speedup.low:.2f}, {r.speedup.high:.2f}] at batch {r.batch:,}" for r in timed
        )
        lines.append(
            f"- latency of an MLP tower of width {latency.settings['width']:,}, all mods and fused FP8 over the unmodified tower in compiled bf16: **{speeds}** "
            f"on {latency.environment.device}"
        )
    return "\n".join(["## What the mods are worth\n", *lines]) if lines else None


def say_data(found: "Ablation", data: str) -> str | None:
    """What a reader asks first of one data set."""
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


SECTIONS = (
    ("Whole models on one H200", "fp8_models.json", models_table,
     "Step time of whole models, compiled on all sides; every speed-up is over the bf16 case of the same run. Slower ways are listed too."),
    ("One fused layer", "fused_linear.json, fused_linear_training.json", fused_table,
     "GEMM, BlockNorm-256, hard swish and FP8 output in one kernel, against compiled bf16 linear, RMSNorm and SiLU."),
    ("From which size FP8 pays", "dispatch/rows.json", size_table,
     "One linear's GEMM with the quantisation of both operands, the best of all recipes and kernels, smallest product first; below 1.00x FP8 costs time. "
     "Where K or N is no multiple of 16, bf16 itself is slow. Fused into the layer before, or with weights quantised once per step, quantisation costs less: see the layers and models above."),
    ("The choice of kernels", "dispatch/dispatch.json", dispatch_table,
     "What a plan made from database rows runs, over the fastest kernel that could have been chosen."),
    ("scaled_mm", "scaled_mm.json", lambda: bench_table("h200/scaled_mm.json"), "The GEMM alone; quantisation has its own rows."),
    ("quantize", "quantize.json", lambda: bench_table("h200/quantize.json"), "A tensor, and where asked its transpose, to FP8. The bf16 column is a copy of the same tensor."),
    ("What a probe costs", "probe_overhead.json", probe_table, "Statistics of every linear, gradients included, once in 100 steps."),
    ("The kernels of generation", "generative_kernels.json", lambda: bench_table("h200/generative_kernels.json"),
     "Grouped GEMM of experts, selection of the best beams, attention of all beams to one context; every tile that was tried is in the record."),
    ("The generative engine", "onerec_engine.json", engine_table,
     "One batch through OneRec's search. Weights are random: this is speed, not quality."),
    ("FP8 in trained generative models", "onerec_quality.json", generative_quality_table,
     "OneRec, dense and with experts, trained on three data sets, then served by the engine in bf16, fp16 and FP8: FP8 against bf16, paired by user, margin 1 %. "
     "One data set has too few users to settle 1 % of recall; the last row weighs all changes by their precision."),
    ("Mods: the ablation", "ablation.json", ablation_table,
     "Wukong as it is and with each core mod, trained in bf16, naive FP8 (one scale per tensor, every linear) and planned FP8; all cells of a seed have the same weights and batches. "
     "Intervals are Student's over seeds, the margin is 0.1 % of log loss."),
    ("Mods: the latency of the same grid", "ablation_latency.json", latency_table,
     "Speed-ups are over the unmodified tower in bf16. Naive FP8 is tensorwise; a plan runs tensorwise or rowwise GEMM by GEMM, or the whole tower fused, which needs BlockNorm."),
    ("Quality of the models in high precision", "quality.json", quality_table, "Against popularity, Markov chains and logistic regression."),
)  # fmt: skip


def write_measured() -> str:
    """The page of numbers."""
    parts = [
        "# Numbers",
        "",
        "Written by `docs/generate.py` from the records in `benchmarks/results`; a test keeps this page and the records in step. Hardware, versions, "
        "commits and commands are in the records, what was slow or failed in `NOTES.md`. Intervals are 95 %; differences under 3 % are noise.",
    ]
    for title, source, make, text in SECTIONS:
        made = make()
        if made is not None:
            parts += [
                "",
                f"## {title}",
                "",
                f"{text} From `benchmarks/results/h200/{source}`." if "," not in source else f"{text} From {source}.",
                "",
                made,
            ]
    return "\n".join(parts) + "\n"


def write_cli() -> str:
    """The command line, from its own help."""
    import typer

    from loka import cli

    command = typer.main.get_command(cli.app)
    parts = [
        "# Command line",
        "",
        "Written by `docs/generate.py` from the code. stdout is data, stderr is talk; `--json` where a script would read it. Exit 0: fine. 1: a finding. "
        "2: a request that cannot be honoured. 130: interrupted. `loka --debug VERB` shows where an error came from; `loka --install-completion` "
        "completes verbs and options in your shell.",
    ]
    for verb, found in command.commands.items():  # type: ignore[attr-defined]
        parts += ["", f"## loka {verb}", "", (found.help or "").strip()]
        shown = [line for line, _ in cli.examples_of(verb)]
        if shown:
            parts += ["", "```text", *shown, "```"]
        for name, sub in getattr(found, "commands", {"": found}).items():
            if name:
                parts += ["", f"### loka {verb} {name}", "", (sub.help or "").strip()]
            parts += ["", *_list_options(sub)]
    return "\n".join(parts) + "\n"


def _list_options(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        words = (
            ", ".join(f"`{o}`" for o in parameter.opts)
            if parameter.param_type_name == "option"
            else f"`{parameter.name.upper()}`"
        )
        default = parameter.default
        shown = (
            f"`{default}`"
            if default is not None and not callable(default) and default is not False and default != []
            else ""
        )
        rows.append([words, (getattr(parameter, "help", "") or "").replace("|", "\\|"), shown])
    return [table(["option", "what", "default"], rows)] if rows else []


def write_blocks(text: str, measured: str) -> str:
    """A page with its marked blocks made again; `measured` is where the page of numbers is from there."""
    summary = ablation_summary()
    blocks = (
        (BEGIN, headline_table()),
        (DEMO, demo_table()),
        (QUALITY, quality_headline()),
        (ENGINE, engine_headline()),
        (ABLATION, summary and summary.replace("MEASURED", measured)),
    )
    for begin, made in blocks:
        if made is not None:
            block = f"{begin}\n\n{made}\n\n{END}"
            text = re.sub(f"{re.escape(begin)}.*?{re.escape(END)}", lambda _, block=block: block, text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def pages() -> dict[Path, str]:
    """What every generated file should hold."""
    readme, mods = ROOT / "README.md", ROOT / "docs" / "mods.md"
    return {
        ROOT / "docs" / "measured.md": write_measured(),
        ROOT / "docs" / "reference" / "cli.md": write_cli(),
        readme: write_blocks(readme.read_text(encoding="utf-8"), "docs/measured.md"),
        mods: write_blocks(mods.read_text(encoding="utf-8"), "measured.md"),
    }


def main() -> int:
    """Write, or check."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what docs/generate.py would write; run it")
        return 1 if stale else 0
    for path in stale:
        path.write_text(pages()[path], encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
