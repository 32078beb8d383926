"""The claims of the two papers compared with our measurements: reproduced, refuted or not testable here, with records."""

from collections.abc import Callable
from typing import Any

from loka.probe import Report
from tables.results import RESULTS, read, table

REPRODUCED, REFUTED, PARTLY, OPEN, ELSEWHERE = (
    "reproduced",
    "not confirmed here",
    "partly",
    "not measured yet",
    "not testable here",
)


# reports of Probe: of a wide model that was trained to its end, and of small ones that were hardly trained
LEARNED = ("h200/learned_wukong.json", "cpu/learned_dlrm.json", "cpu/probe-wukong-ml-1m.json", "cpu/probe-hstu-ml-1m.json", "cpu/probe-dlrm-ml-1m.json")  # fmt: skip


def published_table() -> str:
    """Return one row per claim; claims without a record are marked. A record with a question mark is optional."""
    rows = []
    for claim, stated, source, make in CLAIMS:
        names = source.split(", ") if source else []
        found = {name.removesuffix("?"): read(name.removesuffix("?")) for name in names}
        if any(found[name] is None for name in names if not name.endswith("?")):
            verdict, text = OPEN, "no record"
        else:
            verdict, text = make(*found.values())
        files = ", ".join(f"`{name}`" for name, record in found.items() if record is not None or f"{name}?" not in names)  # fmt: skip
        rows.append([claim, stated, text, f"**{verdict}**", files])
    return table(["claim", "published", "measured here", "verdict", "record in benchmarks/results"], rows)


def _zoo(record: dict[str, Any], model: str, way: str) -> float | None:
    found = [r["ms"] for r in record["rows"] if r.get("model") == model and r.get("way") == way and r.get("ms")]
    return found[0] if found else None


def _trained(record: dict[str, Any], family: str, arm: str) -> dict[str, Any]:
    return next(row for row in record["summary"] if row["cell"].startswith(family) and row["arm"] == arm)


def _spell_change(found: dict[str, Any]) -> str:
    return f"{found['change']:+.2%} [{found['low']:+.2%}, {found['high']:+.2%}]"


def _naive_speed(training: dict[str, Any], trained: dict[str, Any]) -> tuple[str, str]:
    base, naive = (_zoo(training, "wukong", way) for way in ("bf16", "torchao-tensorwise"))
    if not base or not naive:
        return OPEN, "the record has no such row"
    wukong, dlrm = (_trained(trained, family, "naive")["speedup"] for family in ("wukong", "dlrm"))
    slower = max(wukong, dlrm, base / naive) < 1
    return (
        PARTLY if slower else REFUTED,
        f"torchao tensorwise on every linear, whole step in a CUDA graph over compiled bf16: {base / naive:.2f}x on a plain Wukong, {wukong:.2f}x on the one that was trained, {dlrm:.2f}x on a DLRM. Slower, but not by 1.3x",
    )


def _naive_loss(
    ablation: dict[str, Any], demo: dict[str, Any], trained: dict[str, Any], hazard: dict[str, Any]
) -> tuple[str, str]:
    seeds = [d for seed in range(1, 8) if (d := read(f"cpu/demo_seed{seed}.json")) is not None]
    naive = [d["comparisons"]["naive"]["relative_change"]["value"] for d in (demo, *seeds)]
    small = [c["against_bf16"]["change"]["value"] for c in ablation["cells"] if c["variant"] == "none" and c["precision"] == "naive" and c.get("against_bf16")]  # fmt: skip
    wide = "; ".join(f"{name} {_spell_change(row['label 0'])} ({row['seeds']} seeds)" for name, row in ((f, _trained(trained, f, "naive")) for f in ("wukong", "dlrm")))  # fmt: skip
    raw = [run["ways"]["naive tensorwise"]["change"] for run in hazard["runs"] if run["kind"] == "normed"]
    return PARTLY, (
        f"on standardized and binned features it is not measurable: small Wukongs on three data sets {min(small):+.3%} to {max(small):+.3%}; larger models: {wide}. "
        f"The demo's model is worse, {min(naive):+.2%} to {max(naive):+.2%} in {len(naive)} seeds; so is a model of a raw year, price and timestamp followed by a norm, {min(raw):+.2%} to {max(raw):+.2%} in {len(raw)} seeds"
    )


def _end_to_end(
    trained: dict[str, Any], inference: dict[str, Any], tuned: dict[str, Any], served: dict[str, Any]
) -> tuple[str, str]:
    own = _trained(trained, "wukong", "tuned")
    base, ours = (_zoo(inference, "wukong", way) for way in ("bf16+max", "loka+max"))
    if not base or not ours:
        return OPEN, "the record has no Wukong"
    said = {row["target"]: row["record"]["speedup"]["value"] for row in (*served["rows"], *tuned["rows"]) if row.get("model") == "wukong" and row.get("record")}  # fmt: skip
    return (
        REPRODUCED if own["speedup"] >= 1.19 and base / ours >= 1.4 else PARTLY,
        f"a plain Wukong over compiled bf16: whole training step as `loka.tune` chose it {own['speedup']:.2f}x, trained to log loss {_spell_change(own['label 0'])} ({own['seeds']} seeds); inference with all chains "
        f"{base / ours:.2f}x, both with max-autotune. For a larger Wukong `loka.tune` itself reported {said['train']:.2f}x and {said['serve']:.2f}x. Our Wukong and our baseline differ from theirs; one GPU",
    )


def _memory(trained: dict[str, Any]) -> tuple[str, str]:
    rows = {family: _trained(trained, family, "tuned") for family in ("wukong", "dlrm")}
    saved = {family: 1 - row["peak_gib"][0] / row["peak_gib"][1] for family, row in rows.items()}
    return (
        REPRODUCED if min(saved.values()) >= 0.2 else PARTLY,
        "peak memory of a training step compared with bf16: " + ", ".join(f"{f} {-x:.0%}" for f, x in saved.items()),
    )


def _float32(found: dict[str, Any], trained: dict[str, Any]) -> tuple[str, str]:
    """Return the step beside float32 and TF32, and beside it what is known of the loss."""
    parts, saved = [], []
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        ms = {way: _zoo(found, model, way) for way in ("fp32", "tf32", "bf16", "loka")}
        if (ours := ms.pop("loka")) is None:
            continue
        known = {way: value for way, value in ms.items() if value}
        saved += [1 - ours / known[way] for way in ("fp32", "tf32") if way in known]
        parts.append(f"{model} {', '.join(f'{ours / value - 1:+.0%} over {way}' for way, value in known.items())}")
    loss = _spell_change(_trained(trained, "dlrm", "tuned")["label 0"])
    return (
        REPRODUCED if saved and min(saved) >= 0.3 else REFUTED,
        f"time of the whole training step in a CUDA graph, every chain in FP8: {'; '.join(parts)}. The loss was compared with bf16's, on a DLRM of the same widths that `loka.tune` converted: {loss}",
    )


def _learned(*_: dict[str, Any]) -> tuple[str, str]:
    """Return the ratio of errors under learned distributions to those under N(0, 1), of trained wide models first."""
    said, largest = [], 0.0
    for name in LEARNED:
        report = Report.load(RESULTS / name)
        ratios = report.compare_sources()
        said.append(f"{report.record.model}: " + ", ".join(f"{ratio.mean:.2f} on {source}" for source, ratio in ratios.items()))  # fmt: skip
        largest = max([largest, *(ratio.mean for ratio in ratios.values())])
    return (
        REPRODUCED if largest >= 1.02 else REFUTED,
        f"guarded MERE in fprop over that under N(0, 1), geometric mean over linears and recipes: {'; '.join(said)}; single sites go both ways ([probe reports](probe-reports.md))",
    )


def _over_naive(ablation: dict[str, Any]) -> tuple[str, str]:
    cells = {c["precision"]: c["against_bf16"]["change"] for c in ablation["cells"] if (c["data"], c["variant"]) == ("ml-1m", "none") and c.get("against_bf16")}  # fmt: skip
    shown = ", ".join(f"{name} {x['value']:+.3%} [{x['low']:+.3%}, {x['high']:+.3%}]" for name, x in cells.items())
    return (
        REFUTED,
        f"log loss of a small Wukong compared with bf16, 16 seeds: {shown}. There is nothing to gain, because naive FP8 loses nothing there",
    )


def _inference(*records: dict[str, Any]) -> tuple[str, str]:
    """Of every model the newest record, which comes first."""
    shown, best = [], []
    newest = {row["model"]: record for record in reversed(records) for row in record["rows"]}
    for way in ("loka", "loka-mods"):
        for model, record in newest.items():
            pairs = [(_zoo(record, model, f"bf16{mode}"), _zoo(record, model, f"{way}{mode}")) for mode in ("", "+max")]
            both = [pair for pair in pairs if all(pair)]  # a mode that bf16 did not compile in is ours neither
            if both:
                best.append(min(base for base, _ in both) / min(ours for _, ours in both))
                shown.append(f"{model} {best[-1]:.2f}x{' with mods' if way == 'loka-mods' else ''}")
    text = f"whole models over the fastest bf16 of the same compile modes (quality was not measured in that run): {', '.join(shown)}"
    return PARTLY if max(best) >= 2 else REFUTED, f"{text}; {sum(x >= 2 for x in best)} of {len(best)} at 2x or more"


def _alone_mods(ablation: dict[str, Any], latency: dict[str, Any]) -> tuple[str, str]:
    names = ("no_bias", "block_norm", "hard_swish", "all")
    found = {n: [r["speedup"]["value"] for r in latency["rows"] if r["variant"] == n and r["precision"] == "bf16" and r.get("speedup")] for n in names}  # fmt: skip
    shown = ", ".join(f"{name} {min(x):.2f}x to {max(x):.2f}x" for name, x in found.items() if x)
    changes = {n: [c["against_bf16"]["change"]["value"] for c in ablation["cells"] if c["variant"] == n and c["precision"] == "naive" and c.get("against_bf16")] for n in ("none", *names)}  # fmt: skip
    losses = ", ".join(f"{name} {min(x):+.2%} to {max(x):+.2%}" for name, x in changes.items() if x)
    return REFUTED, (
        f"speed-up of a tower in bf16 by mods: {shown}. BlockNorm saves most, because a norm over the whole row needs a separate pass, while a bias is added in the GEMM's epilogue. "
        f"Naive FP8 compared with bf16 of the same architecture, three data sets: {losses}. There is nothing to stabilize"
    )


def _overlap(quality: dict[str, Any]) -> tuple[str, str]:
    seen = {arm: [row["overlap with bf16"][arm]["@50"] for row in quality["rows"]] for arm in ("fp8", "fp16")}
    shown = ", ".join(f"{arm} {min(x):.1%} to {max(x):.1%}" for arm, x in seen.items())
    return (
        REFUTED,
        f"share of the first 50 beams that equal those of bf16, {len(quality['rows'])} trained models: {shown}. More than published",
    )


def _sensitive(quality: dict[str, Any]) -> tuple[str, str]:
    first = [row["sensitivity"][0] for row in quality["rows"] if row["sensitivity"]]
    gates = sum("gate" in site["site"] for site in first)
    largest = max(site["percent"] for site in first)
    return (
        REFUTED,
        f"gate_up is the most sensitive site in {gates} of {len(first)} trained models. No site alone changes the likelihood by more than {largest:.2f} %, which is too little to rank them",
    )


def _overhead(probe: dict[str, Any]) -> tuple[str, str]:
    seen = probe["measure_rounds"]
    return (
        REPRODUCED if seen["overhead_percent"] <= 1 else REFUTED,
        f"{seen['overhead_percent']:.2f} % of a compiled Wukong step, including gradients, with one sampled step in 100",
    )


def _broken(planted: dict[str, Any]) -> tuple[str, str]:
    law = next(k for k in planted["kernels"] if k["kernel"] == "none")["learned_error"]
    ratios = [k["learned_error"] / law for k in planted["kernels"] if k["kernel"] != "none" and k["learned_error"]]
    passing = [k for k in planted["kernels"] if k["kernel"] != "none" and k["passes_normal_256"]]
    return REPRODUCED, (
        f"{len(passing)} of {len(planted['kernels']) - 1} broken kernels pass the usual test on random inputs; under learned distributions the largest ratio of the error to that of the correct kernel is "
        f"{max(ratios):,.0f}x, the median {sorted(ratios)[len(ratios) // 2]:.1f}x; conformance finds all of them"
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
        f"latency of a fused tower {min(fused):.2f}x to {max(fused):.2f}x; the loss compared with the unmodified model at a margin of 0.1 %: {', '.join(f'{d} {o}' for d, o in outcome.items())}",
    )


def _shapes(found: dict[str, Any]) -> tuple[str, str]:
    best = found["summary"].get("the fastest of a shape")
    if best is None or best["shapes"] < 27:
        return OPEN, f"{0 if best is None else best['shapes']} of 27 shapes measured"
    sheet = best["share_of_data_sheet_peak"]
    agrees = best["mean_quantisation_share"] > 0.3 and abs(best["mean_speedup"] - 1.6) < 0.16
    return REPRODUCED if agrees else PARTLY, (
        f"the fastest library and recipe of each of 27 shapes between the published ends (the list is not published): {best['mean_speedup']:.2f}x on average ({best['slowest']:.2f}x to {best['fastest']:.2f}x), "
        f"{'' if sheet is None else f'{sheet:.0%} of the data sheet peak, '}quantization {best['mean_quantisation_share']:.0%} of the time"
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


def _hurts(hazard: dict[str, Any], found: dict[str, Any] | None) -> tuple[str, str]:
    folded = [run["ways"] for run in hazard["runs"] if run["kind"] == "folded"]
    naive, planned = ([ways[name]["change"] for ways in folded] for name in ("naive tensorwise", "planned"))
    text = f"a raw year, price and timestamp: log loss {min(naive):+,.0%} to {max(naive):+,.0%} with naive FP8, {max(planned, key=abs):+.3%} with a plan, which keeps that linear in high precision ({len(folded)} seeds)"
    rows = [row for row in found["summary"] if "change" in row] if found else []
    if not rows:
        return PARTLY, f"{text}; biases over 20,000 steps: not measured yet"
    hurt = [row for row in rows if row["arm"] == "naive" and row["low"] > 0]
    if not hurt:
        worst = max(row["detectable"] for row in rows)
        return (
            PARTLY,
            f"{text}. In training no change of the loss was found; one of {worst:.1%} would have been detected",
        )
    parts = []
    for row in hurt:
        same = {key: row[key] for key in ("data", "label", "half")}
        plan = next(r for r in rows if r["arm"] == "planned" and all(r[key] == value for key, value in same.items()))
        parts.append(f"{row['data']}, {row['half']} half: naive {_interval(row)}, planned {_interval(plan)}")
    grown = [f"{row['layer']} {_interval(row)}" for row in found["biases"] if row["arm"] == "naive" and row.get("low", 0) > 0]  # type: ignore[index]  # fmt: skip
    biases = f"; L2 of biases under naive FP8: {', '.join(grown)}" if grown else ""
    return REPRODUCED, f"{text}. In training ({hurt[0]['seeds']} seeds): {'; '.join(parts)}{biases}"


def _interval(row: dict[str, Any]) -> str:
    return f"{row['change']:+.1%} [{row['low']:+.1%}, {row['high']:+.1%}]"


def _dispatch(dispatch: dict[str, Any]) -> tuple[str, str]:
    seen = dispatch["summary"]["default, all"]
    return PARTLY, (
        f"for each GEMM including quantization, the choice from measured rows is {seen['mean_speedup']:.2f}x over bf16 on {seen['gemms']} GEMMs of the built-in models, and {seen['of_oracle']:.1%} of "
        "the best possible choice"
    )


def _engine(engine: dict[str, Any]) -> tuple[str, str]:
    row = next(s for s in engine["summary"] if s["context"] == 3000)
    ratio = row["latency fp8 / compiled"]["value"]
    recipes = {"fp8": "the published recipe", "fp8 mixed": "ours", "fp8 mixed context": "ours and the context in FP8"}
    latency, throughput = "latency {} / compiled", "throughput of {} within compiled's latency at 8"
    shown = [
        f"{row[latency.format(arm)]['value']:.2f}x the latency of compiled bf16 and {row[throughput.format(arm)]['value']:.2f}x its throughput with {name}"
        for arm, name in recipes.items()
        if latency.format(arm) in row
    ]
    return (
        REPRODUCED if ratio <= 0.51 else REFUTED,
        f"{', '.join(shown)}, at context 3,000, beam 512 (4B-A0.5B, random weights)",
    )


def _alone(engine: dict[str, Any], newer: dict[str, Any]) -> tuple[str, str]:
    recipes = {"fp8": "the published recipe", "fp8 mixed": "ours", "fp8 mixed context": "ours and the context in FP8"}
    parts = []
    for seen in {s["context"]: s for s in (*engine["summary"], *newer["summary"])}.values():
        found = {name: seen.get(f"throughput {recipe} / bf16 engine") for recipe, name in recipes.items()}
        shown = [f"{ratio['value']:.2f}x with {name}" for name, ratio in found.items() if ratio is not None]
        parts.append(f"{', '.join(shown)} at context {seen['context']:,}")
    text = "; ".join(parts)
    return PARTLY, f"over our own bf16 engine: {text}"


def _quality(quality: dict[str, Any], wide: dict[str, Any] | None) -> tuple[str, str]:
    change = quality["pooled"]["recall@10"]
    word = REPRODUCED if change["verdict"] == "equivalent" else PARTLY
    text = f"recall@10 {change['percent']:+.2f} % [{change['low']:+.2f}, {change['high']:+.2f}] over {len(quality['rows'])} trained models, {change['verdict']} at 1 %; offline, no users"
    for cell, seen in (wide or {}).get("over seeds", {}).items():
        for arm, name in (("fp8", "published recipe"), ("fp8 mixed", "ours")):
            x = seen[f"{arm} against bf16"]["recall@10"]
            text += f"; experts 1,408 wide, {cell}, {seen['seeds']} seeds, {name}: {x['percent']:+.2f} % [{x['low']:+.2f}, {x['high']:+.2f}]"
    return word, text


def _distributions(found: dict[str, Any]) -> tuple[str, str]:
    def largest(model: dict[str, Any], field: str, kind: str) -> float:
        return max(x[field] for x in model["layers"] if x["kind"] == kind)

    shown = [
        f"{m['name']}: weights' variance up to {largest(m, 'variance', 'weight'):.2g}, largest {largest(m, 'absmax', 'weight'):.3g}, activations up to {largest(m, 'absmax', 'activation'):.3g} ({m['likeness']})"
        for m in found["models"]
    ]
    likeness = {m["name"]: m["likeness"] for m in found["models"]}
    agrees = likeness.get("OneRec") == likeness.get("language model") == "LLM-like"
    return PARTLY if agrees else REFUTED, "; ".join(shown) + (
        "; see [distributions](distributions.md)" if (RESULTS.parents[1] / "docs" / "distributions.md").exists() else ""
    )


CLAIMS: tuple[tuple[str, str, str, Callable[..., tuple[str, str]]], ...] = (
    ("Naive FP8 makes Wukong slower", "1.3x slower, 64 H100", "h200/zoo_training.json, h200/trained.json", _naive_speed),
    ("Naive FP8 costs quality", "2.5 % of the log loss", "h200/ablation.json, cpu/demo.json, h200/trained.json, cpu/hazard.json", _naive_loss),
    ("Naive FP8 on raw features", "biases diverge, outliers grow", "cpu/hazard.json, h200/hurts_usual.json?", _hurts),
    ("27 production shapes: FP8 with quantization over bf16, share of quantization", "1.6x on average, under 20 % of peak, over 30 %", "h200/shapes.json", _shapes),
    ("Probe costs little", "at most 1 % of a step", "h200/probe_overhead.json", _overhead),
    ("Learned distributions show more error than N(0, 1)", "up to 15 % higher MERE", ", ".join(LEARNED), _learned),
    ("Only learned distributions reveal a broken kernel", "47x against none", "cpu/planted.json", _broken),
    ("NoBias, BlockNorm, hard swish: latency and loss", "over 2x, loss-neutral together", "h200/ablation.json, h200/ablation_latency.json", _mods),
    ("Each of these mods alone", "NoBias saves most; none makes FP8 stable alone", "h200/ablation.json, h200/ablation_latency.json", _alone_mods),
    ("Dispatch over one library everywhere", "1.12x mixed; 0.85x to 1.08x alone", "h200/dispatch/dispatch.json", _dispatch),
    ("Dispatch on a whole Wukong, seven policies", "tensorwise 1.05x, rowwise 1.01x, with 16-bit weight gradients 1.08x, DeepGEMM 0.85x, FBGEMM 0.98x, mixed 1.12x", "h200/policies.json", _policies),
    ("End to end on Wukong", "up to 1.19x training, 1.4x inference", "h200/trained_plain.json, h200/zoo_wukong_infer.json, h200/tune_zoo_wukong.json, h200/tune_zoo_serve.json", _end_to_end),
    ("Memory of training", "-20 %", "h200/trained_plain.json", _memory),
    ("Accuracy over naive FP8 on MovieLens", "+15 %", "h200/ablation.json", _over_naive),
    ("FP8 inference at less than 1 % of ranking quality", "2x to 3x faster", "h200/zoo_wukong_infer.json, h200/zoo_tower_cross.json, h200/zoo_inference.json", _inference),
    ("Training time compared with FP32", "-30 %, accuracy within 1 %", "h200/zoo_float32.json, h200/trained_plain.json", _float32),
    ("In production", "5 to 20 % training, 10 to 17 % serving", "", lambda: (ELSEWHERE, "needs the production models and 64 GPUs")),
    ("Precisions of production models", "95 % train in TF32, 99 % serve in FP16", "", lambda: (ELSEWHERE, "a statement about one company's models")),
    ("OneRec-V2 in FP8: latency and throughput of the whole stack", "-49 %, +92 %", "h200/onerec_engine_3000.json", _engine),
    ("FP8 alone", "+42 % throughput", "h200/onerec_engine.json, h200/onerec_engine_3000.json", _alone),
    ("Recommendations unchanged", "core metrics of an online A/B unchanged", "h200/onerec_quality.json, h200/onerec_wide.json?", _quality),
    ("Beams that FP8 and bf16 share, n >= 50 (FlashRec, dense)", "70 to 76 %", "h200/onerec_quality.json", _overlap),
    ("Which matrices are sensitive (OneRec-1.7B, a public experiment)", "gate most, down least; 2.8 % of top-k metrics per token", "h200/onerec_quality.json", _sensitive),
    ("Weights of rankers are wide, those of generative models are like a language model's", "variance about 1e7 and values over 1000 against under 0.1", "cpu/distributions.json", _distributions),
)  # fmt: skip
