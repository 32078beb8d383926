"""What the two papers claim, beside what was measured here: reproduced, refuted or not testable here, each with its record."""

from collections.abc import Callable
from typing import Any

from tables.results import read, table

REPRODUCED, REFUTED, PARTLY, OPEN, ELSEWHERE = (
    "reproduced",
    "not confirmed here",
    "partly",
    "not measured yet",
    "not testable here",
)


def published_table() -> str:
    """One row per claim; what a record is missing for says so."""
    rows = []
    for claim, stated, source, make in CLAIMS:
        found = [read(name) for name in source.split(", ")] if source else []
        if any(record is None for record in found):
            verdict, text = OPEN, "no record"
        else:
            verdict, text = make(*found)
        files = ", ".join(f"`{name}`" for name in source.split(", ")) if source else ""
        rows.append([claim, stated, text, f"**{verdict}**", files])
    return table(["claim", "published", "measured here", "verdict", "record in benchmarks/results"], rows)


def _zoo(record: dict[str, Any], model: str, way: str) -> float | None:
    found = [r["ms"] for r in record["rows"] if r.get("model") == model and r.get("way") == way and r.get("ms")]
    return found[0] if found else None


def _naive_speed(training: dict[str, Any]) -> tuple[str, str]:
    base, naive = (_zoo(training, "wukong", way) for way in ("bf16", "torchao-tensorwise"))
    if not base or not naive:
        return OPEN, "the record has no such row"
    verdict = REPRODUCED if naive > 1.03 * base else PARTLY
    return (
        verdict,
        f"torchao tensorwise on every linear of a plain Wukong: {base / naive:.2f}x of compiled bf16: no gain, but no loss of 1.3x either",
    )


def _naive_loss(ablation: dict[str, Any], demo: dict[str, Any]) -> tuple[str, str]:
    seeds = [d for seed in range(1, 8) if (d := read(f"cpu/demo_seed{seed}.json")) is not None]
    naive = [d["comparisons"]["naive"]["relative_change"]["value"] for d in (demo, *seeds)]
    trained = [
        c["against_bf16"]["change"]["value"]
        for c in ablation["cells"]
        if c["variant"] == "none" and c["precision"] == "naive" and c.get("against_bf16")
    ]
    text = f"small Wukongs on three data sets: {min(trained):+.3%} to {max(trained):+.3%}, equivalent; the demo's: {min(naive):+.2%} to {max(naive):+.2%} in {len(naive)} seeds, worse"
    return PARTLY, f"{text}. Nowhere 2.5 %: our models have 2 M parameters and train for minutes"


def _end_to_end(tuned: dict[str, Any]) -> tuple[str, str]:
    speeds = {}
    for row in tuned["rows"]:
        record = row.get("record") or {}
        speed = (record.get("speedup") or {}).get("value")
        if row.get("model") == "wukong" and speed:
            speeds[row["target"]] = speed
    if len(speeds) < 2:
        return OPEN, "the record has no Wukong"
    return PARTLY, (
        f"a plain Wukong through `loka.tune`: {speeds['train']:.2f}x training, all of it by layout in bf16; {speeds['serve']:.2f}x inference, loss unchanged. "
        "FP8's gradients were refused in that run; every chain in FP8 through `convert` gives more (see the README)"
    )


def _overhead(probe: dict[str, Any]) -> tuple[str, str]:
    seen = probe["measure_rounds"]
    return (
        REPRODUCED if seen["overhead_percent"] <= 1 else REFUTED,
        f"{seen['overhead_percent']:.2f} % of a compiled Wukong step, gradients included, one look in 100 steps",
    )


def _broken(planted: dict[str, Any]) -> tuple[str, str]:
    law = next(k for k in planted["kernels"] if k["kernel"] == "none")["learned_error"]
    ratios = [k["learned_error"] / law for k in planted["kernels"] if k["kernel"] != "none" and k["learned_error"]]
    passing = [k for k in planted["kernels"] if k["kernel"] != "none" and k["passes_normal_256"]]
    return REPRODUCED, (
        f"{len(passing)} of {len(planted['kernels']) - 1} broken kernels pass the usual test on random inputs; under learned distributions the largest ratio to the right kernel is "
        f"{max(ratios):,.0f}x, the median {sorted(ratios)[len(ratios) // 2]:.1f}x; conformance finds all"
    )


def _mods(ablation: dict[str, Any], latency: dict[str, Any]) -> tuple[str, str]:
    fused = [
        r["speedup"]["value"]
        for r in latency["rows"]
        if r["variant"] == "all" and r["precision"] == "fused" and r.get("speedup")
    ]
    outcome = {
        c["data"]: c["against_original"]["outcome"]
        for c in ablation["cells"]
        if c["variant"] == "all" and c["precision"] == "planned" and c.get("against_original")
    }
    return (
        PARTLY,
        f"latency of a fused tower {min(fused):.2f}x to {max(fused):.2f}x; the loss against the unmodified model at 0.1 %: {', '.join(f'{d} {o}' for d, o in outcome.items())}",
    )


def _shapes(found: dict[str, Any]) -> tuple[str, str]:
    best = found["summary"].get("the fastest of a shape")
    if best is None or best["shapes"] < 27:
        return OPEN, f"{0 if best is None else best['shapes']} of 27 shapes measured"
    sheet = best["share_of_data_sheet_peak"]
    agrees = best["mean_quantisation_share"] > 0.3 and abs(best["mean_speedup"] - 1.6) < 0.16
    return REPRODUCED if agrees else PARTLY, (
        f"the fastest library and recipe of each of 27 shapes between the published ends (the list is not published): {best['mean_speedup']:.2f}x on average ({best['slowest']:.2f}x to {best['fastest']:.2f}x), "
        f"{'' if sheet is None else f'{sheet:.0%} of the data sheet peak, '}quantisation {best['mean_quantisation_share']:.0%} of the time"
    )


def _policies(found: dict[str, Any]) -> tuple[str, str]:
    speeds = {row["way"]: row["speedup"] for row in found["rows"] if row.get("speedup")}
    refused = [row["way"] for row in found["rows"] if "failed" in row]
    if not {"plan-mixed", "plan-tune"} <= speeds.keys():
        return OPEN, f"the record lacks {', '.join(sorted({'plan-mixed', 'plan-tune'} - speeds.keys()))}"
    alone = max(speed for way, speed in speeds.items() if not way.startswith(("plan", "bf16")))
    text = ", ".join(f"{way.removeprefix('plan-')} {speed:.2f}x" for way, speed in speeds.items() if way != "bf16")
    without = f"; not run: {', '.join(refused)}" if refused else ""
    return REPRODUCED if speeds[
        "plan-mixed"
    ] > alone else PARTLY, f"whole step with AdamW over compiled bf16: {text}{without}"


def _hurts(found: dict[str, Any]) -> tuple[str, str]:
    rows = [row for row in found["summary"] if "change" in row]
    if not rows:
        return OPEN, "the record has no comparison"
    text = "; ".join(f"{row['data']} label {row['label']}, {row['arm']}: {row['change']:+.2%} [{row['low']:+.2%}, {row['high']:+.2%}] ({row['seeds']} seeds)" for row in rows)  # fmt: skip
    hurt = any(row["arm"] == "naive" and row["low"] > 0 for row in rows)
    return REPRODUCED if hurt else REFUTED, text


def _dispatch(dispatch: dict[str, Any]) -> tuple[str, str]:
    seen = dispatch["summary"]["default, all"]
    return PARTLY, (
        f"GEMM by GEMM, quantisation included, the choice from measured rows is {seen['mean_speedup']:.2f}x over bf16 on {seen['gemms']} GEMMs of the built-in models, and {seen['of_oracle']:.1%} of "
        "the best possible choice"
    )


def _engine(engine: dict[str, Any]) -> tuple[str, str]:
    row = next(s for s in engine["summary"] if s["context"] == 3000)
    ratio = row["latency fp8 / compiled"]["value"]
    return (
        REPRODUCED if ratio <= 0.51 else REFUTED,
        f"{ratio:.2f}x the latency of compiled bf16 and {row['throughput of fp8 within compiled' + chr(39) + 's latency at 8']['value']:.2f}x its throughput at context 3,000, beam 512 (4B-A0.5B, random weights)",
    )


def _alone(engine: dict[str, Any]) -> tuple[str, str]:
    seen = {
        s["context"]: [s[f"throughput {r} / bf16 engine"]["value"] for r in ("fp8", "fp8 mixed")]
        for s in engine["summary"]
    }
    text = "; ".join(
        f"{ours:.2f}x with the published recipe and {mixed:.2f}x with ours at context {c:,}"
        for c, (ours, mixed) in seen.items()
    )
    return PARTLY, f"over our own bf16 engine: {text}"


def _quality(quality: dict[str, Any]) -> tuple[str, str]:
    change = quality["pooled"]["recall@10"]
    word = REPRODUCED if change["verdict"] == "equivalent" else PARTLY
    return (
        word,
        f"recall@10 {change['percent']:+.2f} % [{change['low']:+.2f}, {change['high']:+.2f}] over {len(quality['rows'])} trained models, {change['verdict']} at 1 %; offline, no users",
    )


def _distributions(found: dict[str, Any]) -> tuple[str, str]:
    shown = [
        f"{m['name']}: largest weight variance {max(x['variance'] for x in m['layers'] if x['kind'] == 'weight'):.2g}, largest weight {max(x['absmax'] for x in m['layers'] if x['kind'] == 'weight'):.3g} ({m['likeness']})"
        for m in found["models"]
    ]
    return PARTLY, "; ".join(shown)


CLAIMS: tuple[tuple[str, str, str, Callable[..., tuple[str, str]]], ...] = (
    ("Naive FP8 makes Wukong slower", "1.3x slower, 64 H100", "h200/zoo_training.json", _naive_speed),
    ("Naive FP8 costs quality", "2.5 % of the log loss", "h200/ablation.json, cpu/demo.json", _naive_loss),
    ("27 production shapes: FP8 with quantisation over bf16, share of quantisation", "1.6x on average, under 20 % of peak, over 30 %", "h200/shapes.json", _shapes),
    ("Probe costs little", "at most 1 % of a step", "h200/probe_overhead.json", _overhead),
    ("Learned distributions show more error than N(0, 1)", "up to 15 % higher MERE", "",
     lambda: (REFUTED, "lower, by 7 to 16 % on the Gaussians of Wukong and HSTU and by more than half on real rows ([probe reports](probe-reports.md)); our models are small and young")),
    ("A broken kernel is told apart only by learned distributions", "47x against none", "cpu/planted.json", _broken),
    ("NoBias, BlockNorm, hard swish: latency and loss", "over 2x, loss-neutral together", "h200/ablation.json, h200/ablation_latency.json", _mods),
    ("Dispatch over one library everywhere", "1.12x mixed; 0.85x to 1.08x alone", "h200/dispatch/dispatch.json", _dispatch),
    ("Dispatch on a whole Wukong, seven policies", "tensorwise 1.05x, rowwise 1.01x, with 16-bit weight gradients 1.08x, DeepGEMM 0.85x, FBGEMM 0.98x, mixed 1.12x", "h200/policies.json", _policies),
    ("Naive FP8 on features as delivered", "biases diverge, outliers grow", "h200/hurts.json", _hurts),
    ("End to end on Wukong", "up to 1.19x training, 1.4x inference", "h200/tune_zoo_wukong.json", _end_to_end),
    ("In production", "5 to 20 % training, 10 to 17 % serving", "", lambda: (ELSEWHERE, "needs the production models and 64 GPUs")),
    ("OneRec-V2 in FP8: latency and throughput of the whole stack", "-49 %, +92 %", "h200/onerec_engine.json", _engine),
    ("FP8 alone", "+42 % throughput", "h200/onerec_engine.json", _alone),
    ("Recommendations unchanged", "core metrics of an online A/B unchanged", "h200/onerec_quality.json", _quality),
    ("Weights of rankers are wide, those of generative models are like a language model's", "variance about 1e7 and values over 1000 against under 0.1", "cpu/distributions.json", _distributions),
)  # fmt: skip
