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


def hurts_table() -> str | None:
    """Naive and planned FP8 on features as delivered, beside bf16."""
    rows = []
    for name in ("hurts", "hurts_wide"):
        found = read(f"h200/{name}.json")
        for row in found["summary"] if found else ():
            if "change" not in row:
                continue
            change = f"{row['change']:+.2%} [{row['low']:+.2%}, {row['high']:+.2%}]"
            kept = ", ".join(found["plans"].get(row["data"], {}).get("kept", {})) if row["arm"] == "planned" else ""
            rows.append([row["data"], f"{found['settings']['width']} wide", row["arm"], str(row["label"]), change, row["verdict"], f"{row['detectable']:.2%}", str(row["seeds"]), kept])  # fmt: skip
    head = ["data", "model", "arm", "label", "change of test log loss", "verdict at 0.02 %", "detectable", "seeds", "kept in high precision"]  # fmt: skip
    return table(head, rows) if rows else None
