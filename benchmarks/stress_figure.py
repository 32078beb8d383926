"""The figure of benchmarks/stress.py: on the left where a batch's values lie in what E4M3 holds, on the right what survives training.

    python benchmarks/stress_figure.py benchmarks/results/cpu/stress.json docs/figures/stress.svg

Plain SVG, no library: it is committed, and a reader of the repository sees it without running anything.
"""

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 960, 460
# E4M3: the largest value 448 < 2^9, the smallest normal one 2^-6, the smallest at all 2^-9
TOP, NORMAL, SMALLEST = 9, -6, -9
INK, FAINT, LOST, HELD, NAIVE, PLANNED, HIGH = (
    "#1b1f24",
    "#8b949e",
    "#d55e00",
    "#0072b2",
    "#d55e00",
    "#0072b2",
    "#8b949e",
)
COLOURS = {"float32": HIGH, "naive FP8": NAIVE, "planned FP8": PLANNED}


def draw(report: dict[str, Any]) -> str:
    """The whole figure."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="13" fill="{INK}" role="img" aria-label="{describe(report)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        text(24, 34, "Range inside a scaling group is what FP8 loses", size=18, weight=600),
        text(
            24,
            56,
            "One batch of dense features (rows differ by e^±24, two channels 1,000 times larger), by what shares a scale",
            colour=FAINT,
        ),
    ]
    for index, group in enumerate(report["groups"]):
        parts += draw_group(group, 24, 82 + 118 * index, 430, 78)
    parts += draw_kept(report, 520, 34)
    return "\n".join([*parts, "</svg>", ""])


def draw_group(group: dict[str, Any], x: float, y: float, width: float, height: float) -> list[str]:
    """A histogram over octaves; what lies left of the smallest number becomes zero."""
    first, counts = group["first_octave"], group["histogram"]
    step = width / len(counts)
    tallest = max(counts) or 1

    def at(octave: float) -> float:
        return x + (octave - first) * step

    left, right = at(SMALLEST - 1), at(TOP)
    out = [
        text(
            x,
            y,
            f"{group['case']}: {group['lost']:.0%} becomes zero",
            weight=600,
            colour=LOST if group["lost"] > 0.05 else HELD,
        ),
        f'<rect x="{left:.1f}" y="{y + 8:.1f}" width="{right - left:.1f}" height="{height:.1f}" fill="#0072b2" opacity="0.10"/>',
    ]
    for index, count in enumerate(counts):
        if count:
            tall = height * (count / tallest)
            colour = HELD if first + index >= SMALLEST - 1 else LOST
            out.append(
                f'<rect x="{x + index * step + 0.5:.1f}" y="{y + 8 + height - tall:.1f}" width="{step - 1:.1f}" height="{tall:.1f}" fill="{colour}"/>'
            )
    base = y + 8 + height
    out.append(f'<line x1="{x}" y1="{base:.1f}" x2="{x + width}" y2="{base:.1f}" stroke="{FAINT}"/>')
    ticks = ((octave, f"2^{octave}" if octave else "1") for octave in (-48, -36, -24, -12, 0))
    out += [text(at(octave), base + 14, name, size=11, colour=FAINT, anchor="middle") for octave, name in ticks]
    out.append(text(right - 4, y + 22, "what E4M3 holds", size=11, colour=HELD, anchor="end"))
    return out


def draw_kept(report: dict[str, Any], x: float, y: float) -> list[str]:
    """Bars: how much of what the dense features teach has survived, relative to the original in float32."""
    rows = [row for row in report["summary"] if row.get("kept") or row["arm"] == "original, float32"]
    rows = [row for row in rows if row["arm"] != "without dense features"]
    low = min([-0.25, *(row["kept"]["low"] for row in rows if row.get("kept") and row["kept"]["low"] > -3)])
    low, high = max(low, -2.2), 1.3
    width = WIDTH - x - 24 - 40

    def at(share: float) -> float:
        return x + (min(max(share, low), high) - low) / (high - low) * width

    out = [
        text(x, y, "What the features still teach after training", size=18, weight=600),
        text(x, y + 22, "0: as if they were not there.  100 %: the original in float32", colour=FAINT),
    ]
    for index, row in enumerate(rows):
        top = y + 50 + 58 * index
        share = row["kept"]["share"] if row.get("kept") else 1.0
        colour = COLOURS[row["arm"].split(", ")[1]]
        start, end = sorted((at(0), at(share)))
        out += [
            text(x, top, f"{row['arm']}   (FP8: {row['fp8_share']:.0%} of the GEMM FLOPs)", size=12),
            f'<rect x="{start:.1f}" y="{top + 6:.1f}" width="{max(end - start, 1):.1f}" height="20" fill="{colour}"/>',
            text(at(max(share, 0)) + 8, top + 21, f"{share:.0%}", weight=600, colour=colour if colour != HIGH else INK),
        ]
        if row.get("kept"):
            middle, ends = top + 16, (at(row["kept"]["low"]), at(row["kept"]["high"]))
            out.append(
                f'<line x1="{ends[0]:.1f}" y1="{middle}" x2="{ends[1]:.1f}" y2="{middle}" stroke="{INK}" stroke-width="1.5"/>'
            )
    bottom = y + 50 + 58 * len(rows)
    for share, name in ((0.0, "0"), (1.0, "100 %")):
        out.append(
            f'<line x1="{at(share):.1f}" y1="{y + 40}" x2="{at(share):.1f}" y2="{bottom - 12}" stroke="{FAINT}" stroke-dasharray="3 3"/>'
        )
        out.append(text(at(share), bottom + 4, name, size=11, colour=FAINT, anchor="middle"))
    seeds = max(row["seeds"] for row in rows)
    out.append(
        text(
            x,
            HEIGHT - 14,
            f"{seeds} paired seeds, 95 % intervals; emulated FP8 on a CPU: no speed is measured",
            size=11,
            colour=FAINT,
        )
    )
    return out


def describe(report: dict[str, Any]) -> str:
    """The figure in words, for who cannot see it."""
    lost = "; ".join(f"{g['case']}: {g['lost']:.0%} of the values become zero" for g in report["groups"])
    kept = "; ".join(f"{r['arm']} {r['kept']['share']:.0%}" for r in report["summary"] if r.get("kept"))
    return f"{lost}. Share of what the dense features teach that survives training: {kept}."


def text(
    x: float, y: float, words: str, *, size: int = 13, weight: int = 400, colour: str = INK, anchor: str = "start"
) -> str:
    safe = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}">{safe}</text>'


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))
