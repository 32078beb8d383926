"""Beyond one GPU: simulated steps compared with published curves, and the loss of training in 8 bits."""

from typing import Any

from tables.results import read, table

DATA = {"census-income-kdd": "Census-Income", "complete-journey": "Complete Journey", "ml-1m": "MovieLens 1M"}
NETWORKS = {
    "h200-ndr": "64 and more, 8 x 400 Gb/s",
    "h200-hdr": "64 and more, 8 x 200 Gb/s",
    "h200-100g": "64 and more, one 100 Gb/s card",
}
WAYS = {
    "again": "float32 again, with draws of its own",
    "all": "**everything enabled**",
    "e4m3-nearest": "`e4m3:row:pow2` rows rounded to nearest (planted)",
    "forced": "forced: E4M3 for weights and gradients, FP8 in every linear",
}


def curves_table() -> str | None:
    """The worst error of the simulation on every published curve, and of linear scaling."""
    found = read("cpu/simulated-curves.json")
    if found is None:
        return None
    rows = []
    for curve in found["curves"]:
        worst = f"{curve['worst_error_percent']:.1f} %"
        gpus = [point["gpus"] for point in curve["points"]]
        added = "yes" if curve["added_later"] else ""
        linear = f"{curve['worst_error_percent_of_linear_scaling']:.1f} %"
        shown = worst if curve["worst_error_percent"] <= 15 else f"**{worst}**"
        rows.append([curve["curve"], curve["machine"], f"{min(gpus)} to {max(gpus)}", shown, linear, added])
    within = sum(curve["worst_error_percent"] <= 15 for curve in found["curves"])
    head = ["published curve", "machine", "predicted GPUs", "worst error, simulated", "worst error, linear scaling", "added later"]  # fmt: skip
    return f"{table(head, rows)}\n\n{within} of {len(rows)} curves are within 15 %."


def codecs_table() -> str | None:
    """The codec that a simulation finds fastest, by model and network, and what it would save."""
    found = read("cpu/simulated-curves.json")
    timed = [row for name in ("zoo_training", "zoo_training_max") for row in (read(f"h200/{name}.json") or {"rows": []})["rows"]]  # fmt: skip
    steps = {row["model"]: row["ms"] for row in timed if row["way"] == "loka" and row.get("ms")}
    if found is None or not steps:
        return None
    names = {"dlrm": ("DLRM", "54 M"), "cross": ("DCNv2", "28 M"), "wukong": ("Wukong", "134 M"), "encoder": ("encoder", "17 M")}  # fmt: skip
    rows = []
    for model, (name, embeddings) in names.items():
        near = [row for row in found["codecs"] if row["model"] == model and row["gpus"] == 8][:1]
        far = [[row for row in found["codecs"] if row["model"] == model and row["network"] == network and row["gpus"] > 8] for network in NETWORKS]  # fmt: skip
        rows.append([f"{name}, {steps[model]:.1f} ms ({embeddings})", *map(_spell_saving, [near, *far])])
    return table(["model, step (embeddings per GPU)", "8 GPUs, NVLink", *NETWORKS.values()], rows)


def _spell_saving(rows: list[dict[str, Any]]) -> str:
    if all(row["pays"] == "bf16" for row in rows):
        return "bf16"
    saved = [f"{row['saved_beside_bf16_percent']:.0f}" for row in rows]
    (low, high), name = (min(saved, key=int), max(saved, key=int)), rows[0]["pays"].partition(":")[0].upper()
    return f"{name}, {low} %" if low == high else f"{name}, {low} to {high} %"


def loss_table() -> str | None:
    """Everything in 8 bits compared with float32, by data set."""
    rows = []
    for data, name in DATA.items():
        found = read(f"cpu/loss-all-{data}.json")
        if found is not None:
            (change,) = (change for change in found["changes"] if change["way"] == "all")
            steps = f"{name}, {found['settings']['steps']} steps"
            rows.append([steps, f"**{_spell_change(change, 3)}**: {change['verdict']}", *_counts(change)])
    return table(["data", "everything enabled", "seeds", "draws per seed"], rows) if rows else None


def single_table() -> str | None:
    """Single runs per configuration and seed, with two controls."""
    rows = []
    for data, name in DATA.items():
        found = read(f"cpu/loss-single-{data}.json")
        if found is not None:
            changes = {change["way"]: change for change in found["changes"]}
            cells = (f"{_spell_change(changes[way], 2)}, {changes[way]['seeds']} seeds" for way in ("all", "forced", "e4m3-nearest"))  # fmt: skip
            rows.append([f"{name}, {found['settings']['steps']} steps", *cells])
    head = ["data", "everything enabled", "forced: E4M3 for weights and gradients, FP8 in every linear", "`e4m3:row:pow2` rows rounded to nearest (planted)"]  # fmt: skip
    return table(head, rows) if rows else None


def movielens_table() -> str | None:
    """Every configuration on MovieLens compared with float32, at the frozen settings."""
    found = read("cpu/loss-all-ml-1m.json")
    if found is None:
        return None
    changes = {change["way"]: change for change in found["changes"]}
    rows = [[name, _spell_change(changes[way], 3), changes[way]["verdict"], *_counts(changes[way])] for way, name in WAYS.items() if way in changes]  # fmt: skip
    return table(["configuration", "change of test log loss", "", "seeds", "draws per seed"], rows)


def _spell_change(change: dict[str, Any], decimals: int) -> str:
    value, low, high = (f"{change[key]:+.{decimals}f}" for key in ("change_percent", "low", "high"))
    return f"{value} % [{low}, {high}]"


def _counts(change: dict[str, Any]) -> list[str]:
    return [str(change["seeds"]), str(change["draws"])]
