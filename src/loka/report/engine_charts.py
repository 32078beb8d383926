"""Charts of the generative engine: from the plain model to FP8, and where the time of a batch goes."""

from loka.records import EngineBench
from loka.report.vega import ACCENT, QUIET, SECOND, THIRD, Spec, colour_by, make_chart

__all__ = ["draw_profiles", "draw_steps"]

_KINDS = [ACCENT, SECOND, THIRD, QUIET, "alarm", "ink", "soft"]


def draw_steps(bench: EngineBench, context: int) -> Spec | None:
    """Milliseconds of a batch by variant, slowest first."""
    rows = [
        {"variant": row.variant, "ms": row.milliseconds.value, "label": f"{row.milliseconds.value:.1f} ms", "fp8": "fp8" in row.variant}
        for row in bench.waterfall(context)
    ]  # fmt: skip
    if not rows:
        return None
    y = {"field": "variant", "type": "nominal", "sort": None, "title": None}
    x = {"field": "ms", "type": "quantitative", "title": "milliseconds a batch", "axis": {"tickCount": 6}}
    data = {"values": rows}
    colour = {
        "field": "fp8",
        "type": "nominal",
        "legend": None,
        "scale": {"domain": [False, True], "range": [{"expr": QUIET}, {"expr": ACCENT}]},
    }
    return make_chart(
        f"Milliseconds a batch by variant, context {context}",
        height=24 * len(rows),
        layer=[
            {
                "data": data,
                "mark": {"type": "bar", "height": 12},
                "encoding": {"x": x, "y": y, "color": colour, "tooltip": [{"field": "variant"}, {"field": "label"}]},
            },
            {
                "data": data,
                "mark": {"type": "text", "align": "left", "dx": 4, "fill": {"expr": "ink"}},
                "encoding": {"x": x, "y": y, "text": {"field": "label"}},
            },
        ],
    )


def draw_profiles(bench: EngineBench, context: int) -> Spec | None:
    """Where the time goes, one stacked bar a variant."""
    found = [profile for profile in bench.profiles if profile.context == context]
    kinds = list(dict.fromkeys(kind for profile in found for kind in profile.by_kind))
    rows = [
        {"variant": p.variant, "kind": kind, "ms": p.by_kind.get(kind, 0.0), "order": place}
        for p in found
        for place, kind in enumerate(kinds)
    ]
    if not rows:
        return None
    return make_chart(
        f"Milliseconds a batch by kind of work, context {context}",
        height=34 * len(found),
        layer=[
            {
                "data": {"values": rows},
                "mark": {"type": "bar", "height": 18},
                "encoding": {
                    "x": {"field": "ms", "type": "quantitative", "title": "milliseconds a batch", "stack": "zero"},
                    "y": {"field": "variant", "type": "nominal", "sort": None, "title": None},
                    "order": {"field": "order"},
                    "color": colour_by("kind", kinds, [_KINDS[i % len(_KINDS)] for i in range(len(kinds))]),
                    "tooltip": [{"field": "variant"}, {"field": "kind"}, {"field": "ms", "format": ".2f"}],
                },
            }
        ],
    )
