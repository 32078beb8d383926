"""Configurations that were both timed and trained, and where naive FP8 hurts."""

from typing import Any

from tables.results import read, table

FAMILIES = {
    "wukong": "Wukong, plain (4 layers, 2,048 wide, 4,096 rows)",
    "dlrm": "DLRM, plain (over arch 1024-1024-512-256, 8,192 rows)",
    "interformer": "InterFormer (one layer, 2,048 wide, 4,096 rows)",
    "hstu": "HSTU (four layers, 1,024 wide, 128 users)",
}
RECORDS = (
    "trained_plain",
    "trained_wukong",
    "trained",
    "trained_dlrm_mods",
    "trained_interformer",
    "trained_hstu",
)  # newest first
ARMS = {
    "tuned": "`loka.tune`'s choice",
    "naive": "torchao tensorwise everywhere",
    "layout": "bf16, our layout",
    "mods": "bf16 with mods",
    "tuned-mods": "tune's choice with mods",
}


def trained_table() -> str | None:
    """Return one configuration per row, with speed-up, memory and loss. Rows that lack one of them are omitted."""
    shown = [_row(row, _is_same(row, record)) for row, record in newest_rows(*RECORDS)]
    head = ["model and data", "configuration", "compared with", "step, ms", "speed-up", "peak memory, GiB", "change of log loss", "detectable", "of the second label", "seeds"]  # fmt: skip
    return table(head, shown) if shown else None


def trained_headline() -> str | None:
    """Return the table of README, and how much of the speed-up is not due to FP8."""
    found = [(row, record) for row, record in newest_rows("trained_plain", "trained_wukong", "trained") if row["arm"] in ("tuned", "naive")]  # fmt: skip
    rows = [row for row, _ in found]
    if not rows:
        return None
    shown = []
    for row in rows:
        here, there = row["peak_gib"]
        changes = [_spell_change(row[label]) for label in ("label 0", "label 1") if label in row]
        shown.append([FAMILIES[row["cell"].split("/")[0]], ARMS[row["arm"]], f"**{row['speedup']:.2f}x**", f"{here / there:.2f}x", *changes, str(row["seeds"])])  # fmt: skip
    head = [
        "model",
        "FP8 by",
        "speed-up",
        "peak memory",
        "change of log loss, 95 %: label income",
        "label never married",
        "seeds",
    ]
    return f"{table(head, shown)}\n\n{_say_layout(found)} {_say_worse(rows)}".rstrip()


def newest_rows(*files: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the complete rows of several records with their records, each comparison from the first file that has it."""
    rows: dict[tuple[str, str, str], tuple[dict[str, Any], dict[str, Any]]] = {}
    for name in files:
        record = read(f"h200/{name}.json") or {"summary": []}
        for row in record["summary"]:
            if all(key in row for key in ("speedup", "peak_gib", "label 0")):
                rows.setdefault((row["cell"], row["arm"], row["against"]), (row, record))
    return list(rows.values())


def _say_layout(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Return the speed-up of the rewrites that keep the function, in bf16, for what tune chose."""
    parts = []
    for row, record in found:
        if row["arm"] != "tuned":
            continue
        steps = record["tuned"][row["cell"].replace("/", "-")]["record"]["step_microseconds"]
        if "bf16 layout" in steps:
            parts.append(f"{steps['bf16'] / steps['bf16 layout']:.2f}x for the {FAMILIES[row['cell'].partition('/')[0]].partition(',')[0]}")  # fmt: skip
    return f"Part of the speed-up is a better memory layout in bf16: {' and '.join(parts)}. The rest is FP8." if parts else ""  # fmt: skip


def _say_worse(rows: list[dict[str, Any]]) -> str:
    """List the changes for the worse whose interval excludes zero."""
    worse = [
        f"{ARMS[row['arm']]} for the {FAMILIES[row['cell'].split('/')[0]].partition(',')[0]} is significantly worse on the label {name}, {_spell_change(row[label])}. This is within 0.1 %, the margin that the held-out data could resolve when `loka.tune` chose it"
        for row in rows
        for label, name in (("label 0", "income"), ("label 1", "never married"))
        if label in row and row[label]["low"] > 0
    ]
    return f"{'. '.join(worse)}." if worse else ""


def _spell_change(found: dict[str, Any]) -> str:
    return f"{found['change']:+.3%} [{found['low']:+.3%}, {found['high']:+.3%}]"


def hurts_headline() -> str | None:
    """Return naive and planned FP8 on raw integers at the usual rate, in the later half of the run, for README."""
    found = read("h200/hurts_usual.json")
    rows = {} if found is None else {row["arm"]: row for row in found["summary"] if row["half"] == "later"}
    if found is None or not {"naive", "planned"} <= rows.keys():
        return None
    naive, planned = ({key: f"{row[key]:+.1%}" for key in ("change", "low", "high")} | {"seeds": row["seeds"]} for row in (rows["naive"], rows["planned"]))  # fmt: skip
    plan = found["plans"][rows["planned"]["data"]]
    return (
        f"**Where naive FP8 hurts, planned FP8 does not.** A ranker reads thirteen raw integers whose marginal distributions match Criteo's and trains for {max(run['steps'] for run in found['runs'].values()):,} steps. Naive FP8 (torchao tensorwise everywhere) changes the log loss by "
        f"**{naive['change']}** [{naive['low']}, {naive['high']}] over {naive['seeds']} seeds. The plan keeps {len(plan['kept'])} products in high precision, runs {plan['share']:.0%} of the FLOPs in FP8, and changes the log loss by "
        f"{planned['change']} [{planned['low']}, {planned['high']}] over {planned['seeds']} seeds."
    )


def _is_same(row: dict[str, Any], record: dict[str, Any]) -> bool:
    """Return True if tune converted nothing: both sides are then the same program, and the difference is noise."""
    tuned = record["tuned"].get(row["cell"].replace("/", "-"), {}).get("record")
    return row["arm"] == "tuned" and tuned is not None and tuned["conversion"] is None


def _row(row: dict[str, Any], same: bool) -> list[str]:
    family, data = row["cell"].split("/")
    ours, theirs = row["step_ms"]
    here, there = row["peak_gib"]
    loss = row["label 0"]
    change, second = (
        f"{found['change']:+.3%} [{found['low']:+.3%}, {found['high']:+.3%}]" if found else "one label only"
        for found in (loss, row.get("label 1"))
    )
    return [
        f"{FAMILIES.get(family, family)}, {data}", ARMS.get(row["arm"], row["arm"]) + ": convert nothing; bf16 twice" * same, row["against"], f"{ours:.2f} / {theirs:.2f}", f"**{row['speedup']:.2f}x**",
        f"{here:.2f} / {there:.2f}", f"{change}: {loss['verdict']} at {row['margin']:.2%}", f"{loss['detectable']:.3%}", second, str(row["seeds"]),
    ]  # fmt: skip


FIGURE = "![Test loss and L2 of the first layer's biases along 20,000 steps on the synthetic stream at the usual rate, the median over seeds and the middle half of them: naive FP8 stays apart, planned FP8 with bf16](figures/hurts.svg)"


def hurts_table() -> str | None:
    """Return naive and planned FP8 on raw features, compared with bf16."""
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
    """Return how far the biases end from those of bf16, where the interval excludes zero."""
    rows = [(read(f"h200/{name}.json") or {}).get("biases", []) for name in ("hurts", "hurts_usual")]
    grown, compared = [], 0
    for name, found in zip(("four times the rate", "the usual rate"), rows, strict=True):
        compared += len(found)
        grown += [f"{r['data']} at {name}, {r['arm']}, {r['layer']} {r['change']:+.0%} [{r['low']:+.0%}, {r['high']:+.0%}]" for r in found if "low" in r and not r["low"] <= 0 <= r["high"]]  # fmt: skip
    return (
        [
            f"Final L2 of biases compared with bf16, where the interval excludes zero (of {compared} compared): {'; '.join(grown)}."
        ]
        if grown
        else []
    )
