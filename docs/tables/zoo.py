"""Unmodified PyTorch models: their speed in every configuration, and the results of one call of `loka.tune`."""

from typing import Any

from tables.results import read, table

MODELS = {
    "wukong": "Wukong, plain (6 layers, 2,048 wide, 8,192 rows)",
    "dlrm": "DLRM (26 x 128, over arch 1024-1024-512-256, 16,384 rows)",
    "tower": "MLP tower, LayerNorm + SiLU (5 x 3,072, 6,144 rows)",
    "cross": "cross network + deep tower (3,456 wide, 8,192 rows)",
    "encoder": "nn.TransformerEncoder, GELU (4 x 1,024, 64 x 256)",
}
FAMILIES = {
    "interformer": "InterFormer of this package (2 layers, 256 events, 2,048 rows)",
    "hstu": "HSTU of this package (4 x 1,024, 256 histories, 49,152 events)",
}
MORE = {
    "mmoe": "MMoE (8,192 rows)",
    "llama": "transformer with RMSNorm, SwiGLU, rotary (64 histories)",
    "resmlp": "residual MLP, pre-norm (8,192 rows)",
    "bst": "behaviour sequence transformer, dropout (128 histories)",
    "masknet": "MaskNet (8,192 rows)",
    "deepfm": "DeepFM, dropout (16,384 rows)",
    "twotower": "two towers, BatchNorm, in-batch softmax (8,192 rows)",
    "gdcn": "gated cross network (8,192 rows)",
    "autoint": "AutoInt (2,048 rows)",
    "ple": "progressive layered extraction (8,192 rows)",
}
CENSUS = {
    "wukong": "Wukong, plain, on Census-Income (4 layers, 2,048 wide, 4,096 rows)",
    "dlrm": "DLRM, plain, on Census-Income (1024-1024-512-256, 8,192 rows)",
}
LATER = {
    "training": ("zoo_wukong_train", "zoo_training_modes_2", "zoo_training_modes_1", "zoo_training_max"),
    "inference": ("zoo_wukong_infer",),
}  # newest first
AGAIN = {
    "training": {
        "zoo_dlrm_train": (
            "dlrm",
            "newer code, which writes the gradients of its vectors contiguously; in this run bf16 left 479 columns unpadded",
        )
    }
}
WAYS = (
    "bf16",
    "bf16+max",
    "bf16-layout",
    "torchao-tensorwise",
    "torchao-rowwise",
    "loka",
    "loka+max",
)


def zoo_table() -> str | None:
    """Return the step time of every configuration, and the speed-up of ours over the fastest measured bf16."""
    rows = []
    for mode, name in (("train", "training"), ("infer", "inference")):
        found = read(f"h200/zoo_{name}.json")
        if found is None:
            return None
        # A run of fewer models gives the compiler more of the machine; all cells of a model are of one run.
        runs = [*((read(f"h200/{file}.json") or {"rows": []})["rows"] for file in LATER[name]), found["rows"]]
        for model, title in MODELS.items():
            rows_of = next((rows_ for rows_ in runs if any(row["model"] == model for row in rows_)), [])
            cells = {row["way"]: row for row in rows_of if row["model"] == model and row["mode"] == mode}
            if cells:
                rows.append([title, name, *(_cell(cells.get(way)) for way in WAYS), _speedup(cells)])
            for file, (again, why) in AGAIN.get(name, {}).items():
                newer = (read(f"h200/{file}.json") or {"rows": []})["rows"] if again == model else []
                if cells := {row["way"]: row for row in newer if row["mode"] == mode}:
                    rows.append([f"{title}: {why}", name, *(_cell(cells.get(way)) for way in WAYS), _speedup(cells)])
    head = ["model", "step, ms", "bf16", "bf16, max-autotune", "bf16, our layout", "torchao tensorwise", "torchao rowwise", "loka", "loka, max-autotune", "loka over the fastest bf16"]  # fmt: skip
    return "\n\n".join(part for part in (table(head, rows), _torchao_before()) if part)


def _torchao_before() -> str:
    """Return one sentence: torchao in training, from the runs that have it."""
    rows, said = _newest("policies", "zoo_training", "zoo_training_max"), []
    for model, title in MODELS.items():
        cells = {row["way"]: row["ms"] for row in rows if row["model"] == model and "ms" in row}
        best = min((ms for way, ms in cells.items() if way.startswith("torchao")), default=None)
        if best is not None and "bf16" in cells:
            said.append(f"{title.partition(' (')[0]} {cells['bf16'] / best:.2f}x")
    return f"torchao in training, its best recipe of an earlier run over compiled bf16 of that run (policies.json, zoo_training.json): {'; '.join(said)}." if said else ""  # fmt: skip


def _newest(*files: str) -> list[dict[str, Any]]:
    """Return the rows of several records, newest first. All rows of a model come from the newest record that has it."""
    rows: list[dict[str, Any]] = []
    for file in files:
        known = {(row["model"], row.get("mode", row.get("target"))) for row in rows}
        found = (read(f"h200/{file}.json") or {"rows": []})["rows"]
        rows += [row for row in found if (row["model"], row.get("mode", row.get("target"))) not in known]
    return rows


def changed_table() -> str | None:
    """Return models with changed architectures, and two of ours compared with their earlier code."""
    rows = []
    found = _newest("zoo_wukong_infer", "zoo_tower_cross", "zoo_mods_train")
    for mode, name in (("train", "training"), ("infer", "inference")):
        for model, title in MODELS.items():
            cells = {row["way"]: row for row in found if (row["model"], row["mode"]) == (model, mode)}
            if "loka-mods" in cells or "loka-mods+max" in cells:
                rows.append([f"{title}, with mods", name, *_best(cells, "bf16"), _cell(cells.get("bf16-mods")), *_best(cells, "loka-mods"), _ratio(cells, ("bf16",), "loka-mods")])  # fmt: skip
    found = _newest("zoo_hstu", "zoo_families")
    for mode, name in (("train", "training"), ("infer", "inference")):
        for model, title in FAMILIES.items():
            cells = {row["way"]: row for row in found if (row["model"], row["mode"]) == (model, mode)}
            if cells:
                rows.append([title, name, *_best(cells, "bf16-before"), _cell(cells.get("bf16")), *_best(cells, "loka"), _ratio(cells, ("bf16-before", "bf16"), "loka")])  # fmt: skip
    head = ["model", "step, ms", "bf16, original", "bf16, with the changes", "loka", "loka over original bf16"]
    return table(head, rows) if rows else None


def more_table() -> str | None:
    """Return further models with every chain and wide linear in FP8, compared with bf16 and torchao."""
    rows = []
    found = _newest("zoo_more_5", "zoo_more_4", "zoo_more_3", "zoo_more_1", "zoo_more_2")
    for model in dict.fromkeys(row["model"] for row in found):
        for mode, name in (("infer", "inference"), ("train", "training")):
            cells = {row["way"]: row for row in found if (row["model"], row["mode"]) == (model, mode)}
            others = [cells[way]["ms"] for way in ("bf16", "torchao-rowwise") if "ms" in cells.get(way, {})]
            mine = cells.get("loka", {}).get("ms")
            alone = "" if len(others) == 2 else ", over bf16 alone"
            ratio = "not compiled in time" if mine is None or not others else f"**{min(others) / mine:.2f}x**{alone}"
            rows.append([MORE[model], name, *(_cell(cells.get(way)) for way in ("bf16", "torchao-rowwise", "loka")), ratio])  # fmt: skip
    head = ["model", "step, ms", "bf16", "torchao rowwise", "loka", "loka over the faster of the two"]
    return table(head, rows) if rows else None


def _best(cells: dict[str, dict[str, Any]], way: str) -> list[str]:
    """The faster of the two compile modes."""
    timed = [row for row in (cells.get(way), cells.get(f"{way}+max")) if row is not None and "ms" in row]
    return [_cell(min(timed, key=lambda row: row["ms"]) if timed else cells.get(way))]


def _ratio(cells: dict[str, dict[str, Any]], bases: tuple[str, ...], way: str) -> str:
    times = {w: min((cells[w + m]["ms"] for m in ("", "+max") if "ms" in cells.get(w + m, {})), default=None) for w in (*bases, way)}  # fmt: skip
    base = times[bases[0]]
    if base is None or times[way] is None:
        return "not compiled in time"
    default = "" if "ms" in cells.get(f"{bases[0]}+max", {}) else "; bf16 in its default mode"
    return f"**{base / times[way]:.2f}x**{default}"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if "ms" in row:
        return f"{row['ms']:.3f}"
    return "not compiled in time" if row["failed"].startswith("still") else "failed"


def _speedup(cells: dict[str, dict[str, Any]]) -> str:
    """Compare each side in its better mode. If bf16 has no max-autotune time, compare in the default mode and say so."""
    tuned = "ms" in cells.get("bf16+max", {})
    modes = ("", "+max") if tuned else ("",)
    base, mine = ([cells[w + m]["ms"] for m in modes if "ms" in cells.get(w + m, {})] for w in ("bf16", "loka"))
    if not base or not mine:
        return "not measured"
    return f"**{min(base) / min(mine):.2f}x**" + ("" if tuned else ", default mode")


def tune_table() -> str | None:
    """Return one configuration per row: step and loss compared with bf16."""
    found = _newest(
        "tune_zoo_fresh",
        "tune_zoo_plain",
        "tune_zoo_encoder",
        "tune_zoo_wukong",
        "tune_zoo_serve",
        "tune_zoo",
        "tune_zoo_dlrm",
        "tune_zoo_more",
        "tune_zoo_small",
    )
    if not found:
        return None
    rows, titles = [], MODELS | MORE
    for row in sorted(found, key=lambda row: (list(titles).index(row["model"]), row["target"] != "train")):
        if "record" not in row:
            rows.append([titles[row["model"]], row["target"], "failed", "", "", "", "", ""])
            continue
        rows.append(_tuned(titles[row["model"]], row["record"], row["tune_s"]))
    launched = (read("h200/tune_zoo_ungraphed.json") or {"rows": []})["rows"]
    rows += [_tuned(f"{MODELS[row['model']]}, without a CUDA graph", row["record"], row["tune_s"]) for row in launched]  # fmt: skip
    trained: dict[str, Any] = {}
    for file in ("trained_plain", "trained_wukong", "trained_dlrm_mods", "trained"):  # newest first
        trained = {**((read(f"h200/{file}.json") or {}).get("tuned") or {}), **trained}
    for name, row in trained.items():
        title = CENSUS[name.partition("-")[0]] + ", with mods" * name.endswith("-mods")
        rows.append(_tuned(title, row["record"], sum(row["record"]["seconds"].values())))
    head = ["model", "for", "whole step over compiled bf16", "speed-up by layout alone, in bf16", "change of the loss, 95 %", "margin used", "linears' FLOPs in FP8", "tuning time"]  # fmt: skip
    return table(head, rows)


def fresh_table() -> str | None:
    """Return what became of saved plans in fresh processes, one row per plan."""
    found = [row for row in _newest("tune_zoo_fresh", "tune_zoo_dlrm") if "metric_change" in row.get("again", {})]
    if not found:
        return None
    rows = []
    for row in sorted(found, key=lambda row: (list(MODELS).index(row["model"]), row["target"] != "train")):
        again, change = row["again"], row["again"]["metric_change"]
        hand = change.get("everything")
        rows.append(
            [
                MODELS[row["model"]],
                row["target"],
                _say_same(again),
                f"{again['over_tune']:.2f}" if "over_tune" in again else "",
                f"{again['memory_after_tune']['peak_gib']:.2f}",
                f"{again['over_best_by_hand']:.2f}" if "over_best_by_hand" in again else "",
                "" if hand is None else f"{hand['value']:+.3%} [{hand['low']:+.3%}, {hand['high']:+.3%}]",
            ]
        )
    head = ["model", "for", "the same as in `tune`'s process", "step / step in `tune`", "peak memory of a step in `tune` / here", "step / fastest by hand", "change of the loss, everything by hand in FP8"]  # fmt: skip
    return table(head, rows)


def _say_same(again: dict[str, Any]) -> str:
    """Name what a plan makes the same in a fresh process, and what differs."""
    kernels = not again["kernels_only_here"] and not again["kernels_only_in_tune"]
    parts = {
        "modules": again["same_modules"],
        "conversion": again["same_conversion"],
        "kernels": kernels,
        "outputs": again["output_difference"] == 0.0,
    }
    same, other = ([name for name, equal in parts.items() if equal is wanted] for wanted in (True, False))
    return ", ".join(same) + (f"; not {', '.join(other)}" if other else "")


def inference_headline() -> str | None:
    """Return one paragraph: what `loka.tune` chose for serving with its change of the loss, and all chains in FP8 over the faster mode of bf16."""
    names = {"wukong": "Wukong", "dlrm": "DLRM", "tower": "MLP tower", "cross": "cross network", "encoder": "transformer encoder"}  # fmt: skip
    tuned, ratios = [], []
    rows = [row for row in _newest("tune_zoo_fresh", "tune_zoo_plain", "tune_zoo_serve") if row["target"] == "serve" and "record" in row]  # fmt: skip
    timed = _newest("zoo_wukong_infer", "zoo_inference")
    for model, name in names.items():
        for row in (row for row in rows if row["model"] == model):
            speed, change = row["record"]["speedup"], row["record"]["metric_change"]
            if speed is not None and change is not None:
                low, high = (100 * change[end] for end in ("low", "high"))
                tuned.append(
                    f"{name} **{speed['value']:.2f}x** at {100 * change['value']:+.3f}% [{low:+.3f}%, {high:+.3f}%]"
                )
        cells = {row["way"]: row for row in timed if row["model"] == model}
        best = {way: min((cells[way + m]["ms"] for m in ("", "+max") if "ms" in cells.get(way + m, {})), default=None) for way in ("bf16", "loka")}  # fmt: skip
        if "ms" in cells.get("bf16+max", {}) and best["loka"]:
            ratios.append(f"{name} {best['bf16'] / best['loka']:.2f}x")
    if not tuned or not ratios:
        return None
    return (
        f"**Inference of plain models**, in CUDA graphs on one H200. As `loka.tune` converted them for serving, over compiled bf16, with the change of the loss: {'; '.join(tuned)}. "
        f"With every chain in FP8 (`loka.convert`), over the faster of bf16's two compile modes: {', '.join(ratios)}."
    )


def _tuned(title: str, record: dict[str, Any], seconds: float) -> list[str]:
    """Return the result of one call of tune."""
    speed, change = record["speedup"], record["metric_change"]
    taken = sum(unit["flops_share"] for unit in record["units"] if unit["way"] != "high")
    unmeasured = "not measured" if taken else "1.00x: nothing is converted"
    return [
        title,
        record["target"],
        unmeasured if speed is None else f"**{speed['value']:.2f}x** [{speed['low']:.2f}, {speed['high']:.2f}]",
        _layout_share(record["step_microseconds"]),
        "not measured" if change is None else f"{change['value']:+.4%} [{change['low']:+.4%}, {change['high']:+.4%}]",
        f"{record['used_margin']:.2%}",
        f"{taken:.0%}",
        f"{seconds:.0f} s",
    ]


def _layout_share(steps: dict[str, float]) -> str:
    """Return the speed-up of the rewritten model in bf16 over the original, which is not due to FP8."""
    return f"{steps['bf16'] / steps['bf16 layout']:.2f}x" if "bf16 layout" in steps else "1.00x"
