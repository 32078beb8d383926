"""What the pairs of `predictor.py` say: rank correlations, AUC, and whether "safe" held.

A pair is *clear* where its change is beyond two standard errors, and *decided* where the interval of two standard errors around the size of its change does not contain the margin: of the others
nobody knows whether they cost more. AUC is given over decided pairs and over all, whose size is then taken for what was measured. The standard error is that of the paired difference over examples; of gradients, whose
change after some steps is one draw, with the rms change of nudged runs added in squares.

*Attainable* is what AUC over all pairs could be at best. A change is a draw: its sign and its size around `harm.value` belong to these weights and these examples, and a score that is exactly right
about the usual size does not know them. So every pair is given the ratio |change| / harm.value of a pair drawn at random, and the score is held against that: what it reaches there it can reach
anywhere, and what is missing from 1 is the draw's.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from loka.dispatch.margin import share_of_margin

MARGIN = 0.0002
Pair = dict[str, Any]


def describe(pairs: list[Pair]) -> str:
    scored = [p for p in pairs if p["harm"]]
    families, hazards = ({p["cell"].split("/")[i] for p in scored} for i in (0, 2))
    lines = [f"{len(scored)} pairs of {len({p['cell'] for p in pairs})} models, {len(families)} families"]
    parts: dict[str, Callable[[Pair], bool]] = {"all": lambda p: True, "fprop": lambda p: p["gemm"] == "fprop"}
    parts |= {
        f"fprop, {f}": lambda p, f=f: p["gemm"] == "fprop" and p["cell"].split("/")[0] == f for f in sorted(families)
    }
    parts |= {
        f"fprop, {h}": lambda p, h=h: p["gemm"] == "fprop" and p["cell"].split("/")[2] == h for h in sorted(hazards)
    }
    parts |= {gemm: lambda p, gemm=gemm: p["gemm"] == gemm for gemm in ("dgrad", "wgrad")}
    for name, keep in parts.items():
        chosen = [p for p in scored if keep(p)]
        if len(chosen) > 5:
            lines.append(f"{name:15s} {describe_part(chosen)}")
    mean, spread = attainable(scored)
    lines.append(
        f"attainable over all pairs by a score that knows the usual size and not the draw: AUC {mean:.3f} +- {spread:.3f}"
    )
    return "\n".join([*lines, *[describe_safe(scored, kind) for kind in ("fprop", "gradients")]])


def describe_part(pairs: list[Pair]) -> str:
    part = summarize(pairs)
    return (
        f"{part['pairs']:5d} pairs, {part['clear']} clear: rank correlation {part['harm']:.3f} (error of the product {part['error']:.3f}); more than {MARGIN:.2%}: "
        f"{part['decided']} decided, {part['costly']} of them do: AUC {part['auc']:.3f} (error of the product {part['auc_error']:.3f}); over all pairs {part['auc_all']:.3f}"
    )


def summarize(pairs: list[Pair]) -> dict[str, Any]:
    """How well the score, and the error of the product, rank pairs by what they cost: counts, rank correlations, AUC."""
    clear = [p for p in pairs if abs(p["change"]) > 2 * noise(p)]
    seen = [p for p in clear if p["error"] is not None]
    decided = [p for p in pairs if abs(abs(p["change"]) - MARGIN) > 2 * noise(p)]
    judged = [p for p in decided if p["error"] is not None]
    return {
        "pairs": len(pairs),
        "clear": len(clear),
        "harm": spearman([abs(p["change"]) for p in clear], [p["harm"][2] for p in clear]),
        "error": spearman([abs(p["change"]) for p in seen], [p["error"] for p in seen]),
        "decided": len(decided),
        "costly": sum(map(is_costly, decided)),
        "auc": auc(decided, lambda p: p["harm"][2]),
        "auc_error": auc(judged, lambda p: p["error"]),
        "auc_all": auc(pairs, lambda p: p["harm"][2]),
    }


def noise(pair: Pair) -> float:
    """The standard error of a change."""
    return math.hypot(pair["se"], pair.get("control", 0.0))


def is_costly(pair: Pair) -> bool:
    """Whether the change that was measured is more than the margin, in either direction."""
    return bool(abs(pair["change"]) > MARGIN)


def describe_safe(pairs: list[Pair], kind: str) -> str:
    chosen = _of_kind(pairs, kind)
    count, safe, wrong = count_safe(pairs, kind)
    ratios = sorted(abs(p["change"]) / p["harm"][0] for p in chosen if p["harm"][0] > 0)
    spread = ", ".join(f"{ratios[int(q * (len(ratios) - 1))]:.2f}" for q in (0.5, 0.9, 0.95, 0.99)) if ratios else ""
    return (
        f"{kind}: {safe} of {count} called safe; of these beyond their share of the margin at the lower end: {wrong}; "
        f"|change| / harm.value at 50, 90, 95, 99 %: {spread}"
    )


def count_safe(pairs: list[Pair], kind: str) -> tuple[int, int, int]:
    """Pairs of a kind (`fprop` or `gradients`), how many are called safe, and how many of these cost more than their share beyond noise."""
    chosen = _of_kind(pairs, kind)
    safe = [p for p in chosen if p["harm"][2] <= share_of_margin(MARGIN, p["units"])]
    wrong = [p for p in safe if abs(p["change"]) - 1.96 * noise(p) > share_of_margin(MARGIN, p["units"])]
    return len(chosen), len(safe), len(wrong)


def _of_kind(pairs: list[Pair], kind: str) -> list[Pair]:
    return [p for p in pairs if (p["gemm"] == "fprop") == (kind == "fprop")]


def attainable(pairs: list[Pair], draws: int = 50) -> tuple[float, float]:
    """AUC over all pairs where the score is right about sizes by construction: mean and standard deviation over draws."""
    generator = torch.Generator().manual_seed(0)
    known = [p for p in pairs if p["harm"][0] > 0]
    ratios = [abs(p["change"]) / p["harm"][0] for p in known]
    found = []
    for _ in range(draws):
        picked = torch.randint(len(ratios), (len(known),), generator=generator).tolist()
        drawn = [{**p, "change": ratios[at] * p["harm"][0]} for p, at in zip(known, picked, strict=True)]
        found.append(auc(drawn, lambda p: p["harm"][2]))
    values = torch.tensor(found)
    return float(values.mean()), float(values.std())


def spearman(a: list[float], b: list[float]) -> float:
    if len(a) < 3:
        return math.nan
    return float(torch.corrcoef(torch.stack([ranked(a), ranked(b)]))[0, 1])


def ranked(values: list[float]) -> Tensor:
    """Mean ranks: ties share theirs."""
    _, inverse, counts = torch.unique(
        torch.tensor(values, dtype=torch.float64), return_inverse=True, return_counts=True
    )
    return (counts.cumsum(0).double() - (counts.double() - 1) / 2)[inverse]


def auc(pairs: list[Pair], score: Callable[[Pair], float]) -> float:
    """How often a costly pair scores above one that is not."""
    labels = torch.tensor([is_costly(p) for p in pairs], dtype=torch.bool)
    positive, negative = int(labels.sum()), int((~labels).sum())
    if not positive or not negative:
        return math.nan
    ranks = ranked([score(p) for p in pairs])
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * negative))
