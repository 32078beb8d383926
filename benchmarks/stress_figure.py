"""The figure of benchmarks/stress.py: on the left where a batch's values lie in what E4M3 holds, on the right what that costs after training.

    python benchmarks/stress_figure.py benchmarks/results/cpu/stress.json docs/figures/stress.svg

Plain SVG, no library: it is committed, and a reader of the repository sees it without running anything.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 960, 480
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
        text(24, 56, "One batch of dense features, by what shares a scale", colour=FAINT),
    ]
    for index, group in enumerate(report["groups"]):
        parts += draw_group(group, 24, 82 + 118 * index, 430, 78)
    parts += draw_losses(report, 520, 34)
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
    out.append(text(left + 5, y + 22, "what E4M3 holds", size=11, colour=HELD))
    return out


def draw_losses(report: dict[str, Any], x: float, y: float) -> list[str]:
    """Bars: the change of the test log loss against the original in float32, beside what it costs never to see the features."""
    found = {row["arm"]: row for row in report["summary"]}
    rows = [row for arm, row in found.items() if "against_original" in row and arm != "without dense features"]
    blind = found["without dense features"]["against_original"]["percent"]
    low, high = -0.3, 1.5 * blind
    width = WIDTH - x - 84

    def at(percent: float) -> float:
        return x + (min(max(percent, low), high) - low) / (high - low) * width

    out = [
        text(x, y, "What that costs after training", size=18, weight=600),
        text(x, y + 22, "Test log loss against the original model in float32, %", colour=FAINT),
        *rule(at(0), y + 46, 66 * len(rows) - 6, "the original"),
        *rule(at(blind), y + 46, 66 * len(rows) - 6, f"the features never seen (+{blind:.1f})"),
    ]
    for index, row in enumerate(rows):
        out += draw_bar(row, x, y + 66 + 66 * index, at, beyond=row["against_original"]["percent"] > high)
    seeds = max(row["seeds"] for row in rows)
    note = f"{seeds} paired seeds, 95 % intervals; emulated FP8 on a CPU: no speed is measured"
    return [*out, text(x, HEIGHT - 12, note, size=11, colour=FAINT)]


def rule(x: float, y: float, height: float, name: str) -> list[str]:
    """A dashed vertical line with its name below."""
    line = f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + height}" stroke="{FAINT}" stroke-dasharray="3 3"/>'
    return [line, text(x, y + height + 14, name, size=11, colour=FAINT, anchor="middle")]


def draw_bar(row: dict[str, Any], x: float, y: float, at: Callable[[float], float], *, beyond: bool) -> list[str]:
    change = row["against_original"]
    colour = COLOURS[row["arm"].split(", ")[1]]
    start, end = sorted((at(0), at(change["percent"])))
    share = f"   ({row['fp8_share']:.0%} of the GEMM FLOPs)" if row["fp8_share"] else ""
    out = [
        text(x, y, row["arm"] + share, size=12),
        f'<rect x="{start:.1f}" y="{y + 6:.1f}" width="{max(end - start, 2):.1f}" height="18" fill="{colour}"/>',
    ]
    if not beyond:
        middle, ends = y + 15, (at(change["low"]), at(change["high"]))
        out.append(
            f'<line x1="{ends[0]:.1f}" y1="{middle}" x2="{ends[1]:.1f}" y2="{middle}" stroke="{INK}" stroke-width="1.5"/>'
        )
        end = max(end, ends[1])
    else:
        out.append(f'<path d="M{end:.1f} {y + 6} l12 9 l-12 9 z" fill="{colour}"/>')
        end += 12
    label = f"{change['percent']:+.2f}" if abs(change["percent"]) < 5 else f"{change['percent']:+.0f}"
    return [*out, text(end + 6, y + 20, label, weight=600, colour=INK if colour == HIGH else colour)]


def describe(report: dict[str, Any]) -> str:
    """The figure in words, for who cannot see it."""
    lost = "; ".join(f"{g['case']}: {g['lost']:.0%} of the values become zero" for g in report["groups"])
    changes = [(r["arm"], r["against_original"]) for r in report["summary"] if "against_original" in r]
    told = "; ".join(f"{arm} {c['percent']:+.2f} % ({c['verdict']})" for arm, c in changes)
    return f"{lost}. Test log loss against the original in float32: {told}."


def text(
    x: float, y: float, words: str, *, size: int = 13, weight: int = 400, colour: str = INK, anchor: str = "start"
) -> str:
    safe = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}">{safe}</text>'


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))
