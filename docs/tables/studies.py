"""Studies on a CPU that pages of the manual quote: whether the score predicts the loss, raw columns, defective kernels."""

import math
from typing import Any

from predictor_summary import MARGIN, count_safe, summarize

from tables.results import read, table

HAZARDS = {"none": "no hazard", "offset": "a raw year", "heavy": "a log-normal column"}


def score_headline() -> str | None:
    """How well the score predicts the loss, in two sentences, for README."""
    found = read("cpu/predictor.json")
    if found is None:
        return None
    pairs = [pair for pair in found["pairs"] if pair["harm"]]
    part, safe = summarize(pairs), [count_safe(pairs, kind) for kind in ("fprop", "gradients")]
    none = "None" if not sum(wrong for _, _, wrong in safe) else f"{sum(wrong for _, _, wrong in safe)}"
    families = {pair["cell"].split("/")[0] for pair in pairs}
    return (
        f"**How well the score predicts the loss.** Over {part['pairs']:,} measured cases from {len(families)} families of models, the rank correlation with the measured change is {part['harm']:.2f} over the "
        f"{part['clear']} cases whose change is clear of noise ({part['error']:.2f} for the error of the product alone). {none} of the {sum(count for _, count, _ in safe)} cases it called safe "
        "measurably exceeded its share of the margin."
    )


def predictor_table() -> str | None:
    """The score beside the measured change, by GEMM, family, hazard and training."""
    found = read("cpu/predictor.json")
    if found is None:
        return None
    pairs = [pair for pair in found["pairs"] if pair["harm"]]
    forward = [pair for pair in pairs if pair["gemm"] == "fprop"]
    parts = {"all": pairs, "forward": forward}
    for place, names in ((0, None), (2, HAZARDS), (3, {"0.004": "learning rate 0.004"}), (4, {"900": "900 steps"})):
        values = names or {name: name for name in sorted({pair["cell"].split("/")[0] for pair in pairs})}
        for value, name in values.items():
            parts[f"forward, {name}"] = [pair for pair in forward if pair["cell"].split("/")[place] == value]
    parts |= {gemm: [pair for pair in pairs if pair["gemm"] == gemm] for gemm in ("dgrad", "wgrad")}
    rows = []
    for name, chosen in parts.items():
        part = summarize(chosen)
        shown = ("harm", "error"), ("auc", "auc_error", "auc_all")
        first, second = (["" if math.isnan(part[key]) else f"{part[key]:.3f}" for key in keys] for keys in shown)
        decided = f"{part['decided']}, {part['costly']}"
        rows.append([name, str(part["pairs"]), str(part["clear"]), *first, decided, *second])
    head = [
        "pairs", "number", "clear", "rank correlation of `harm.high` with the size of the change", "of the error of the product", f"decided, costing more than {MARGIN:.2%}",
        "AUC of `harm.high`", "AUC of the error", "AUC of `harm.high` over all pairs",
    ]  # fmt: skip
    return table(head, rows)


def hazard_table() -> str | None:
    """A raw year, price and timestamp: smallest and largest change of the log loss over seeds."""
    found = read("cpu/hazard.json")
    if found is None:
        return None
    names = {"bf16": "bf16", "naive tensorwise": "naive FP8, tensorwise", "naive rowwise": "naive FP8, rowwise", "planned": "plan of Probe", "tuned": "`loka.tune`"}  # fmt: skip
    kinds = {"folded": "standardization folded into the first linear", "normed": "linear, then batch norm"}
    rows = []
    for way, name in names.items():
        changes = [[100 * run["ways"][way]["change"] for run in found["runs"] if run["kind"] == kind] for kind in kinds]
        rows.append([name, *(f"{spell_percent(min(seen))} to {spell_percent(max(seen))}" for seen in changes)])
    return table(["", *kinds.values()], rows)


def spell_percent(value: float) -> str:
    """A change in percent, with decimals where they say something."""
    return f"{value:+.0f} %" if abs(value) >= 100 else f"{value:+.3f} %"


def defects_found() -> str | None:
    """What conformance found of randomly broken kernels, in a sentence."""
    found = read("cpu/defects.json")
    if found is None:
        return None
    summary: dict[str, Any] = found["summary"]
    environment, largest = found["environment"], " x ".join(map(str, found["limits"]))
    missed = "; ".join(f"{one['defect']}, at {one['call']}" for one in summary["missed"])
    return (
        f"{environment['date'][:10]}, CPU, torch {environment['torch']}, seed {found['seed']}, shapes up to {largest}: **{summary['defects_refused']:,} of {summary['defects']:,} defects rejected, "
        f"{summary['correct_refused']:,} of {summary['correct']:,} correct kernels rejected**; the correct kernel closest to its bound reached {summary['largest_share_of_tolerance']:.2f} of it."
        + (f" Missed: {missed}." if missed else "")
    )
