"""Kernels and single layers compared with bf16, the choice of kernels, and the cost of a probe."""

import math
import statistics
from typing import Any

from tables.results import read, table


def fused_table() -> str | None:
    """Return one fused layer compared with compiled bf16."""
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


def sweep_table() -> str | None:
    """Fused layers at random and named shapes, relative to the fastest bare FP8 GEMM."""
    found = read("h200/fused_linear_sweep.json")
    if found is None:
        return None
    named = 12  # the last rows: six named shapes in two forms
    random, fixed = found["rows"][:-named], found["rows"][-named:]
    aligned = [row for row in random if row["k"] % 32 == 0 and row["m"] >= 1024]
    parts = {"six named shapes": fixed, "random, M 64 to 32,768, K and N 256 to 8,192": random, "of these, K a multiple of 32 and M at least 1,024": aligned}  # fmt: skip
    forms = {
        "relu": "bias, ReLU, FP8 out", "norm": "BlockNorm-256, hard swish, FP8 out", "train relu": "ReLU in training (transpose, largest value of z)",
        "train gelu": "GELU in training", "dgrad relu": "a step of backward, ReLU", "dgrad gelu": "a step of backward, GELU",
    }  # fmt: skip
    rows = []
    for part, inside in parts.items():
        for form, title in forms.items():
            ratios = [_over_bare(row) for row in inside if row["form"] == form]
            if len(ratios) > 5:
                cells = (
                    f"{statistics.geometric_mean(some):.2f}, worst {max(some):.2f}"
                    for some in zip(*ratios, strict=True)
                )
                rows.append([part, title, str(len(ratios)), *cells])
    shown = table(["shapes", "layer", "number", "chosen launch", "best launch"], rows)
    return f"{found['device']}, torch {found['torch']}, Triton {found['triton']}, `{found['command']}`.\n\n{shown}"


def _over_bare(row: dict[str, Any]) -> tuple[float, float]:
    """The time of the chosen and of the best launch over that of the fastest bare GEMM."""
    bare, timed = min(row["bare"].values()), [launch for launch in row["launches"] if math.isfinite(launch["us"])]
    best = min(launch["us"] for launch in timed)
    chosen = next((launch["us"] for launch in timed if launch["chosen"]), best)
    return chosen / bare, best / bare


def bench_table(name: str) -> str | None:
    """Return every call of a kernel benchmark: the best backend, bf16, the roofline, and the number of refusals."""
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


def quantizers_table() -> str | None:
    """Return the share of a copy's bandwidth that quantizers reach at random shapes, small and large."""
    found = read("h200/quantizers.json")
    if found is None:
        return None
    rows = []
    for variant in dict.fromkeys(row["variant"] for row in found["rows"]):
        timed = [row for row in found["rows"] if row["variant"] == variant and "percent" in row]
        plain, _, transposed = variant.partition("+")
        cells = [f"`{plain}`", f"`{transposed}`" if transposed else ""]
        for small in (True, False):
            shares = [row["percent"] for row in timed if (row["m"] * row["k"] < 8e6) == small]
            cells.append(
                f"{statistics.median(shares):.0f} % ({min(shares):.0f} to {max(shares):.0f})" if shares else ""
            )
        rows.append([*cells, f"{sum(row['percent'] >= found['bar_percent'] for row in timed)} of {len(timed)}"])
    return table(["result", "and its transpose", "small, median (worst to best)", "large", "at 75 % or more"], rows)


def size_table() -> str | None:
    """Return the speed of one linear's GEMM including quantization, by size."""
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


def dispatch_table() -> str | None:
    """Return how close a choice from the database is to the fastest kernel."""
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
    return table(["policy, GEMMs", "GEMMs", "share of the fastest, mean", "worst", "in FP8", "speed-up, mean"], rows)


def probe_table() -> str | None:
    """Return the cost of a probe in a training step."""
    found = read("h200/probe_overhead.json")
    if found is None:
        return None
    rounds, memory = found["measure_rounds"], found["measure_memory"]
    low, high = rounds["overhead_percent_95"]
    rows = [
        ["step without a probe", f"{rounds['bare_step_ms']:.2f} ms"],
        ["step with a probe, amortized", f"{rounds['probed_step_ms']:.2f} ms"],
        ["overhead, median of paired rounds", f"{rounds['overhead_percent']:.2f} % [{low:.2f}, {high:.2f}]"],
        ["memory of the widest site", f"{memory['widest_site_mib']:.0f} MiB"],
        ["memory of all sites", f"{memory['planned_total_mib']:.0f} MiB"],
    ]
    return table(["compiled bf16 Wukong, 21 linears, batch 8,192", ""], rows)


def evaluate_table() -> str | None:
    """Return how long an evaluation takes, with and without compiled kernels to start from."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file in ("evaluate_time_cold", "evaluate_time"):  # newest first
        for row in (read(f"h200/{file}.json") or {"rows": []})["rows"]:
            if "seconds" in row:
                found.setdefault((row["model"], row["cache"]), row)
    if not found:
        return None
    names = {"wukong": "Wukong, plain (6 layers, 2,048 wide, 8,192 rows)", "dlrm": "DLRM, plain (16,384 rows)"}
    rows = [
        [
            names[row["model"]],
            {"cold": "no, the first look on a machine", "warm": "yes"}[row["cache"]],
            str(row["linears"]),
            *(f"{row[part]:.1f} s" for part in ("chains_s", "kernels_s", "sites_s", "seconds")),
            f"**{row['seconds_a_linear']:.2f} s**",
        ]
        for row in found.values()
    ]
    head = ["model", "kernels compiled before", "linears", "kernels of a step", "kernels of candidates", "errors and times", "all", "a linear"]  # fmt: skip
    return table(head, rows)


def masked_table() -> str | None:
    """Return masked attention compared with torch's, forward and backward."""
    found = read("h200/masked_attention.json")
    if found is None:
        return None
    rows = []
    for row in found["rows"]:
        count, heads, shared, queries, keys, d = row["sizes"]
        times = (f"{row[side][f'{part}_us']:,.0f}" for part in ("forward", "backward") for side in ("torch", "triton"))
        ratios = (f"**{row[f'{part}_speedup']:.2f}x**" for part in ("forward", "backward"))
        padded = {"half": "lengths from 1 to all", "full": "none"}[row["padding"]]
        shape = f"{count:,} x {heads}{f' on {shared}' if shared != heads else ''}, {queries:,} x {keys:,}, {d}"
        rows.append([shape, padded, *times, *ratios])
    head = ["rows x heads, queries x keys, width", "padding", "torch, forward, us", "ours", "torch, backward, us", "ours", "forward", "backward"]  # fmt: skip
    return table(head, rows)


def package_table() -> str | None:
    """Return exported packages compared with the converted models they came from."""
    found = [record for name in ("export_zoo", "export_zoo_wukong") if (record := read(f"h200/{name}.json"))]
    if not found:
        return None
    rows = [
        [
            {"dlrm": "DLRM", "wukong": "Wukong, plain"}[row["model"]],
            f"{row['rows']:,}",
            f"{row['difference']:.4f}",
            f"{row['ms']['compiled']:.3f}",
            f"{row['ms']['package']:.3f}",
            f"**{1 / row['package_over_compiled'][0]:.2f}x**",
            f"{row['export_s']:.0f} s",
        ]
        for record in found
        for row in record["rows"]
    ]
    head = ["model", "rows", "relative L2 from the model", "compiled, ms", "package, ms", "speed-up of the package", "made in"]  # fmt: skip
    return table(head, rows)


def rows_table() -> str | None:
    """Return lookups and updates of embedding rows, for items drawn uniformly and by Zipf's law."""
    found = read("h200/tables.json")
    if found is None:
        return None
    rows = []
    for kind, names in (("lookups", ("F.embedding_bag", "bfloat16", "int8:row", "e4m3:row")), ("updates", ("float32 whole", "bfloat16 whole", "int8:row whole", "e4m3:row:pow2 whole"))):  # fmt: skip
        for drawn in ("uniform", "zipf"):
            for width in sorted({x["width"] for x in found[kind]}):
                seen = {x["rows"]: x["microseconds"] for x in found[kind] if (x["width"], x["drawn"]) == (width, drawn)}
                times = [seen.get(name) for name in names]
                if all(times):
                    base = times[1 if kind == "lookups" else 0]
                    shown = [f"{t:,.0f}" if i < 2 else f"{t:,.0f} ({base / t:.2f}x)" for i, t in enumerate(times)]
                    rows.append([kind[:-1], drawn, str(width), *shown])
    head = ["us", "items", "width", "F.embedding_bag, bf16 / update of float32 rows", "bf16 rows", "int8 rows", "E4M3 rows"]  # fmt: skip
    return table(head, rows)


def wire_table() -> str | None:
    """Return what packing and unpacking take, as shares of a copy of the same bytes."""
    found = read("h200/wire.json")
    if found is None:
        return None
    seen = {row["rows"]: row for row in found["wire"]}
    rows = []
    for name, row in seen.items():
        kind, _, rest = name.partition(" ")
        if kind == "pack":
            other = seen[f"unpack {rest}"]
            spec, _, dtype = rest.partition(" ")
            rows.append([f"`{spec}`", dtype, *(f"{x['microseconds']:.0f} ({x['share_of_copy']:.0%})" for x in (row, other))])  # fmt: skip
    return table(["codec", "of", "pack, us (of a copy's bandwidth)", "unpack, us"], rows)


ATTENTION = {
    "hstu, 64 to 320": "HSTU, 256 histories of 64 to 320, 8 heads of 128",
    "hstu, 410 to 2048": "HSTU, 16 histories of 410 to 2,048, 8 heads of 128",
    "interformer": "softmax, 2,048 x 260 padded, 4 heads of 32",
    "interformer, full": "softmax, 2,048 x 260, 4 heads of 32",
    "long": "softmax, 64 x 1,024 padded, 8 heads of 64",
    "long, full": "softmax, 64 x 1,024, 8 heads of 64",
    "wide": "softmax, 256 x 512 padded, 8 heads of 128",
    "wide, full": "softmax, 256 x 512, 8 heads of 128",
    "engine, context 3000": "engine, context 3,000, 8 requests of 512 beams",
    "engine, context 3000, first step": "engine, context 3,000, 8 requests, first step",
}


def attention_fp8_table() -> str | None:
    """Return attention with both products in FP8 compared with bf16, alone and with what rounds keys and values."""
    found = read("h200/attention_fp8.json")
    if found is None:
        return None
    by_name = {row["case"]: row for row in found["rows"] if not row["why"]}
    rows = []
    for name, title in ATTENTION.items():
        if name not in by_name:
            continue
        row = by_name[name]
        bf16, fp8, cast = (row[way]["us"][0] for way in ("bf16", "fp8", "cast"))
        # the engine rounds a context once and reads it in many calls
        whole = fp8 + cast / row["uses"] if row["uses"] > 1 else row["fp8 with cast"]["us"][0]
        errors = (f"{row[way]['error']:.3f}" for way in ("bf16", "fp8"))
        rows.append([title, f"{bf16:.0f}", f"{fp8:.0f}", f"{bf16 / fp8:.2f}x", f"{whole:.0f}", f"**{bf16 / whole:.2f}x**", " / ".join(errors)])  # fmt: skip
    head = ["attention", "bf16, us", "FP8, us", "FP8 alone", "with rounding, us", "with rounding", "relative L2 error, bf16 / FP8"]  # fmt: skip
    return table(head, rows)
