"""Whole models: speed, quality compared with simple baselines, and the results of the demo."""

import math
from typing import Any

from tables.results import read, table

NAMES = {
    "wukong": "Wukong",
    "wukong8k": "Wukong, width 8,192",
    "wukong8k4k": "Wukong, width 8,192, 4,096 rows",
    "dlrm": "DLRM",
    "elfm": "ELFM",
    "interformer": "InterFormer",
    "hstu": "HSTU",
}
RUNS = {
    "planned": "continued in planned FP8",
    "naive": "continued in naive FP8 (tensorwise everywhere)",
    "swap-planned": "final float32 weights, planned FP8 swapped in",
    "swap-naive": "final float32 weights, naive FP8 swapped in",
    "control": "control: float32 from weights perturbed by a bf16 rounding",
}


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


def demo_table() -> str | None:
    """The demo on a CPU, and all its seeds."""
    made = _compared("cpu/demo.json")
    return None if made is None else f"{made}\n\n{seeds_table()}"


def gpu_demo_table() -> str | None:
    """The demo on a GPU, where the step is timed too."""
    made, found = _compared("h200/demo.json"), read("h200/demo.json")
    return None if made is None or found is None else f"{made} Tune: {found['tuning']['verdict']}."


def _compared(name: str) -> str | None:
    """The demo's comparisons, as `loka demo --json` wrote them."""
    found = read(name)
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


def _read_seeds() -> dict[int, dict[str, Any]]:
    """The demo's comparisons on every seed that has a record."""
    names = {0: "cpu/demo.json"} | {seed: f"cpu/demo_seed{seed}.json" for seed in range(1, 8)}
    return {seed: record["comparisons"] for seed, name in names.items() if (record := read(name)) is not None}


def demo_headline() -> str | None:
    """Return the results of the demo's seeds in a sentence, for README."""
    found = _read_seeds()
    if not found:
        return None
    said = []
    for arm, name in (("planned", "in planned FP8"), ("naive", "in naive FP8"), ("control", "in float32 from slightly perturbed weights")):  # fmt: skip
        changes = [c[arm]["relative_change"]["value"] for c in found.values()]
        outcomes = [c[arm]["outcome"] for c in found.values()]
        counted = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
        said.append(f"{name} {sum(changes) / len(changes):+.3%} ({counted})")
    margin = next(iter(found.values()))["planned"]["margin"]
    sentence = f"**The demo.** Its Wukong continues training from one checkpoint. Mean change of the log loss over {len(found)} seeds, with verdicts at a margin of {margin:.1%}: {'; '.join(said)}."
    return f"{sentence}{_say_gpu_demo()}"


def demo_share() -> str | None:
    """What the plan of the demo converts and what that does to the loss, in a sentence."""
    found = read("cpu/demo.json")
    if found is None:
        return None
    planned, naive = found["comparisons"]["planned"], found["comparisons"]["naive"]
    ends = [f"changes the test log loss by {c['relative_change']['value']:+.3%} ({c['outcome']})" for c in (planned, naive)]  # fmt: skip
    return (
        f"In the recorded demo run (`benchmarks/results/cpu/demo.json`) the plan converts {found['converted']} of {found['linears']} linears, {found['low_precision_flops_share']:.0%} of the GEMM FLOPs, and "
        f"{ends[0]}. Naive FP8 runs {naive['low_precision_flops_share']:.0%} of the FLOPs in FP8 and {ends[1]}."
    )


def _say_gpu_demo() -> str:
    """Return the result of the demo on a GPU, one seed."""
    found = read("h200/demo.json")
    if found is None:
        return ""
    changes = {arm: found["comparisons"][arm] for arm in ("planned", "naive")}
    said = [f"{arm} FP8 {c['relative_change']['value']:+.3%}, {c['outcome']}" for arm, c in changes.items()]
    speed = found["tuning"]["verdict"].partition(" [")[0].removeprefix("step ")
    return f" `loka demo --device cuda` trains a wide DLRM instead and times its step. On one H200: {speed} the speed of compiled bf16, forward and backward; {'; '.join(said)} (one seed)."


def seeds_table() -> str:
    """Return the demo on every seed that has a record (planned, naive, control), and the means."""
    found = _read_seeds()
    arms = ("planned", "naive", "control")

    def spell(comparison: dict[str, Any]) -> str:
        return f"{100 * comparison['relative_change']['value']:+.3f} %, {comparison['outcome']}"

    rows = [[str(seed), *(spell(comparisons[arm]) for arm in arms)] for seed, comparisons in found.items()]
    means = (sum(c[arm]["relative_change"]["value"] for c in found.values()) / len(found) for arm in arms)
    rows.append(["mean", *(f"{100 * mean:+.3f} %" for mean in means)])
    return table(["seed", "continued in planned FP8", "in naive FP8", "control"], rows)


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
