"""The configuration that was timed, trained; and where naive FP8 hurts."""

from typing import Any

from tables.results import read, table

FAMILIES = {
    "wukong": "Wukong, plain (4 layers, 2,048 wide, 4,096 rows)",
    "dlrm": "DLRM, plain (over arch 1024-1024-512-256, 8,192 rows)",
    "interformer": "InterFormer (one layer, 2,048 wide, 4,096 rows)",
    "hstu": "HSTU (four layers, 1,024 wide, 128 users)",
}
RECORDS = ("trained", "trained_mods", "trained_interformer", "trained_hstu")
ARMS = {
    "tuned": "`loka.tune`'s choice",
    "naive": "torchao tensorwise everywhere",
    "layout": "bf16, our layout",
    "mods": "bf16 with mods",
    "tuned-mods": "tune's choice with mods",
}


def trained_table() -> str | None:
    """One configuration a row: speed-up, memory and loss of the same object. Rows that lack one of them are not shown."""
    records = [found for name in RECORDS if (found := read(f"h200/{name}.json")) is not None]
    rows = [row for record in records for row in record["summary"]]
    shown = [_row(row) for row in rows if all(key in row for key in ("speedup", "peak_gib", "label 0"))]
    head = ["model and data", "configuration", "against", "step, ms", "speed-up", "peak memory, GiB", "change of log loss", "detectable", "of the second label", "seeds"]  # fmt: skip
    return table(head, shown) if shown else None


def _row(row: dict[str, Any]) -> list[str]:
    family, data = row["cell"].split("/")
    ours, theirs = row["step_ms"]
    here, there = row["peak_gib"]
    loss = row["label 0"]
    change, second = (
        f"{found['change']:+.3%} [{found['low']:+.3%}, {found['high']:+.3%}]" if found else "one label only"
        for found in (loss, row.get("label 1"))
    )
    return [
        f"{FAMILIES.get(family, family)}, {data}", ARMS.get(row["arm"], row["arm"]), row["against"], f"{ours:.2f} / {theirs:.2f}", f"**{row['speedup']:.2f}x**",
        f"{here:.2f} / {there:.2f}", f"{change}: {loss['verdict']} at {row['margin']:.2%}", f"{loss['detectable']:.3%}", second, str(row["seeds"]),
    ]  # fmt: skip


FIGURE = "![Test loss and L2 of the first layer's biases along 20,000 steps on the synthetic stream at the usual rate, the median over seeds and the middle half of them: naive FP8 stays apart, planned FP8 with bf16](figures/hurts.svg)"


def hurts_table() -> str | None:
    """Naive and planned FP8 on features as delivered, beside bf16."""
    rows = []
    for name in ("hurts", "hurts_usual", "hurts_wide"):
        found = read(f"h200/{name}.json")
        for row in found["summary"] if found else ():
            if "change" not in row:
                continue
            change = f"{row['change']:+.2%} [{row['low']:+.2%}, {row['high']:+.2%}]"
            kept = ", ".join(found["plans"].get(row["data"], {}).get("kept", {})) if row["arm"] == "planned" else ""
            rows.append([row["data"], f"{found['settings']['width']} wide, rate {found['settings']['rate']:g}", row["arm"], str(row["label"]), row["half"], change, row["verdict"], f"{row['detectable']:.2%}", str(row["seeds"]), kept])  # fmt: skip
    head = ["data", "model", "arm", "label", "half", "change of test log loss", "verdict at 0.02 %", "detectable", "seeds", "kept in high precision"]  # fmt: skip
    return "\n\n".join([table(head, rows), *_biases(), FIGURE]) if rows else None


def _biases() -> list[str]:
    """How far the biases are from bf16's at the end, where that is beyond doubt."""
    rows = [(read(f"h200/{name}.json") or {}).get("biases", []) for name in ("hurts", "hurts_usual")]
    grown, compared = [], 0
    for name, found in zip(("four times the rate", "the usual rate"), rows, strict=True):
        compared += len(found)
        grown += [f"{r['data']} at {name}, {r['arm']}, {r['layer']} {r['change']:+.0%} [{r['low']:+.0%}, {r['high']:+.0%}]" for r in found if "low" in r and not r["low"] <= 0 <= r["high"]]  # fmt: skip
    return (
        [
            f"L2 of biases at the end against bf16's, where the interval excludes zero (of {compared} compared): {'; '.join(grown)}."
        ]
        if grown
        else []
    )
