"""The generative engine: milliseconds of a batch, and what FP8 changes in the answers of trained models."""

from typing import Any

from tables.results import read, table


def engine_table() -> str | None:
    """The generative engine: latency of a batch, and the bars it was measured against. Each context is from its newest record."""
    found = read("h200/onerec_engine.json")
    if found is None:
        return None
    newer = (read("h200/onerec_engine_3000.json") or {"rows": []})["rows"]
    older = [row for row in found["rows"] if row["context"] not in {other["context"] for other in newer}]
    rows = [
        [
            row["variant"],
            str(row["batch"]),
            str(row["context"]),
            f"{row['ms']:.1f} [{row['ms_low']:.1f}, {row['ms_high']:.1f}]",
            f"{row['queries_per_s']:.0f}",
        ]
        for row in [*older, *newer]
        if "ms" in row and "ms_low" in row
    ]
    return "\n\n".join([table(["variant", "batch", "context", "ms, 95 %", "queries/s"], rows), *found.get("notes", [])])


METRICS = ("recall@10", "ndcg@10", "log-likelihood")


def spell(change: dict[str, Any]) -> str:
    """A change in per cent with its interval."""
    if "percent" not in change:
        return str(change["verdict"])
    return f"{change['percent']:+.2f} % [{change['low']:+.2f}, {change['high']:+.2f}], {change['verdict']}"


def wide_table() -> str | None:
    """What the published recipe and ours change in a trained OneRec whose experts have several 128-blocks; the last rows are all seeds together."""
    found = read("h200/onerec_wide.json")
    if found is None or not found["rows"]:
        return None
    rows = []
    for low, name in (("fp8", "published recipe"), ("fp8 mixed", "ours")):
        for row in found["rows"]:
            seen = row[f"{low} against bf16"]
            shared = [f"{row['overlap with bf16'][arm]['@50']:.1%}" for arm in (low, "fp16")]
            rows.append([f"{row['data']}, seed {row['seed']}", name, *(spell(seen[m]) for m in METRICS), f"{seen['recall@10'].get('mde', float('nan')):.2f} %", *shared])  # fmt: skip
        for cell, seen in found.get("over seeds", {}).items():
            change = seen[f"{low} against bf16"]
            rows.append([f"{cell.split(':')[1]}, {seen['seeds']} seeds", name, *(spell(change[m]) for m in METRICS), f"{change['recall@10'].get('mde', float('nan')):.2f} %", "", ""])  # fmt: skip
    return table(["data", "recipe", *METRICS, "detectable, recall@10", "beams shared, n = 50: FP8", "fp16"], rows)


def generative_quality_table() -> str | None:
    """What FP8 changes in the answers of trained OneRec models."""
    found = read("h200/onerec_quality.json")
    if found is None:
        return None

    metrics = METRICS
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
