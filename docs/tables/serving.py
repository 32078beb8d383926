"""Answers within a deadline on a GPU, HTTP included."""

from typing import Any

from tables.results import read, table


def serving_table() -> str | None:
    """Return the goodput of FP8 and bf16 with the same server."""
    rows = []
    for found in (_generative(), _ranker()):
        keyed: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in found:
            keyed.setdefault((row.get("context"), row.get("rows_a_request"), row["sla_ms"]), {})[row["variant"]] = row
        for (context, asked, sla), cells in keyed.items():
            if {"fp8", "bf16"} <= cells.keys():
                what = f"OneRec 4B-A0.5B, beam 512, context {context}" if context else f"Wukong ranker, {asked} rows a request"  # fmt: skip
                rows.append([what, f"{sla:g} ms", *(_cell(cells[v]) for v in ("bf16", "fp8")), _ratio(cells), _over_compiled(cells)])  # fmt: skip
    head = ["model", "SLA", "bf16: answers in time per second (p99, late or dropped of the admitted)", "FP8", "FP8 over bf16", "FP8 over compiled bf16 (not our engine)"]  # fmt: skip
    return table(head, rows) if rows else None


def _generative() -> list[dict[str, Any]]:
    """Return the rows of OneRec, each from the newest file that has FP8 and bf16 of its setting."""
    found = (read("h200/serving_generative.json") or {"rows": []})["rows"]
    newer = (read("h200/serving_generative_3000.json") or {"rows": []})["rows"]
    again = {(row["context"], row["sla_ms"], row["variant"]): row for row in newer}
    return [again.get((row["context"], row["sla_ms"], row["variant"]), row) for row in found]


def _ranker() -> list[dict[str, Any]]:
    """Return the rows of the ranker; the setting that the first run had no time for is in a file of its own."""
    found = (read("h200/serving_ranker.json") or {"rows": []})["rows"]
    newer = (read("h200/serving_ranker_4096.json") or {"rows": []})["rows"]
    again = {(row["rows_a_request"], row["sla_ms"]) for row in newer}
    return [row for row in found if (row["rows_a_request"], row["sla_ms"]) not in again] + newer


def serving_headline() -> str | None:
    """Return one sentence: how many more answers arrive in time."""
    found = _generative()
    goodput = {(row["context"], row["sla_ms"], row["variant"]): row["goodput"] for row in found}
    said = []
    for context in dict.fromkeys(row["context"] for row in found):
        slas = [sla for c, sla, v in goodput if (c, v) == (context, "fp8") and (context, sla, "bf16") in goodput]
        ratios = [f"{goodput[context, sla, 'fp8'] / goodput[context, sla, 'bf16']:.2f}x at {sla:g} ms" for sla in slas]
        if ratios:
            said.append(f"{' and '.join(ratios)} with {context:,} items of history")
    if not said:
        return None
    return f"**Serving.** OneRec 4B-A0.5B over HTTP on one H200: answers per second within the deadline, FP8 over bf16 with the same server: {'; '.join(said)}. {_ranker_sentence()}(Random weights; [all rows](docs/measured.md).)"


def _ranker_sentence() -> str:
    """Return what the ranker answers within the shorter deadline at the smallest requests, and the range of its ratios."""
    found = _ranker()
    goodput = {(row["sla_ms"], row["rows_a_request"], row["variant"]): row["goodput"] for row in found}
    ratios = {(sla, rows): goodput[sla, rows, "fp8"] / value for (sla, rows, v), value in goodput.items() if v == "bf16" and (sla, rows, "fp8") in goodput}  # fmt: skip
    if not ratios:
        return ""
    sla, rows = min(ratios)
    ends = f"{min(ratios.values()):.2f}x to {max(ratios.values()):.2f}x over bf16 in {len(ratios)} settings"
    return f"A Wukong ranker with requests of {rows} rows: {goodput[sla, rows, 'fp8']:,.0f} answers per second within {sla:g} ms in FP8, {ratios[sla, rows]:.2f}x over bf16 ({ends}). "


def _cell(row: dict[str, Any]) -> str:
    if "refused" in row:
        return "refused: one batch takes longer"
    answered, dropped = row["codes"].get("200", 0), row["codes"].get("503", 0)
    broken = ((row["late_share"] or 0.0) * answered + dropped) / max(1, answered + dropped)
    return f"{row['goodput']:.0f} ({row['latency_ms']['p99']:.0f} ms, {broken:.1%})"


def _over_compiled(cells: dict[str, dict[str, Any]]) -> str:
    """Return the ratio to the plain model, compiled, behind the same server; only OneRec has an engine of ours."""
    plain = cells.get("compiled")
    if plain is None:
        return ""
    return f"{cells['fp8']['goodput'] / plain['goodput']:.2f}x" if plain["goodput"] else _cell(plain)


def _ratio(cells: dict[str, dict[str, Any]]) -> str:
    limited = any(cells[v].get("limited_by_most") for v in ("fp8", "bf16"))
    return f"**{cells['fp8']['goodput'] / cells['bf16']['goodput']:.2f}x**" + (", no higher load was offered" if limited else "")  # fmt: skip
