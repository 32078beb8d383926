"""HTML building blocks: numbers, tables, placeholders for charts. Text from records is escaped here or by the caller."""

from collections.abc import Iterable, Sequence
from html import escape

from loka.records import Interval

__all__ = [
    "about", "capitalise", "chart", "chip", "count", "dotted", "escape", "mono", "notice", "percent", "signed", "size", "span_of", "table",
    "times",
]  # fmt: skip

NARROW = "\u202f"  # narrow no-break space between a number and its unit


def percent(value: float, digits: int = 1) -> str:
    """Format a share as a percentage."""
    return f"{100 * value:.{digits}f}{NARROW}%"


def signed(value: float) -> str:
    """Format a relative change as a percentage with sign and three decimals."""
    return f"{100 * value:+.3f}{NARROW}%".replace("-", "−")


def span_of(change: Interval) -> str:
    """Format the interval of a relative change."""
    return f"{signed(change.low)} to {signed(change.high)}"


def times(speedup: Interval | None) -> str:
    """Format a speed-up with its interval."""
    if speedup is None:
        return "not measured"
    return f"{speedup.value:.2f}× [{speedup.low:.2f}, {speedup.high:.2f}]"


def count(number: int, word: str) -> str:
    """Format a count with its noun: 1 site, 2 sites."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def size(count: int) -> str:
    """Format a number of bytes."""
    name, unit = next(((n, u) for n, u in (("GB", 1e9), ("MB", 1e6)) if count >= u), ("kB", 1e3))
    return f"{count / unit:.3g}{NARROW}{name}"


def capitalise(text: str) -> str:
    """Capitalize the first letter and keep the others."""
    return text[:1].upper() + text[1:]


def chip(word: str, kind: str = "") -> str:
    """Return a word in a colored pill. The word carries the meaning, not the color."""
    return f'<span class="chip {kind}">{escape(word)}</span>'


def dotted(name: str) -> str:
    """Return a module's name that may break after its dots."""
    return f'<span class="dotted">{escape(name).replace(".", ".<wbr>")}</span>'


def mono(text: str) -> str:
    """Return a name in a fixed-width font."""
    return f'<span class="mono">{escape(text)}</span>'


def about(text: str) -> str:
    """Return a paragraph that explains how to read what follows."""
    return f'<p class="about">{text}</p>'


def notice(text: str) -> str:
    """Return a highlighted paragraph."""
    return f'<p class="notice">{text}</p>'


def chart(name: str, label: str) -> str:
    """Return the placeholder of a chart, with a label for screen readers."""
    return f'<figure><div class="chart" id="chart-{name}" role="img" aria-label="{escape(label)}"></div></figure>'


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Iterable[int] = (),
    why: int | None = None,
    name: str = "",
    caption: str = "",
) -> str:
    """Return a table of HTML cells; `numeric` columns are right-aligned, `why` is one of sentences, which stays wide.

    It is in a frame that scrolls sideways if it is too wide. The frame is focusable, so keys scroll it.
    """
    right = set(numeric)
    kinds = dict.fromkeys(right, ' class="n"') | ({} if why is None else {why: ' class="why"'})
    cells = "".join(
        f'<th scope="col"{" class=n" if i in right else ""}>{escape(title)}</th>' for i, title in enumerate(head)
    )
    body = ("".join(f"<td{kinds.get(i, '')}>{cell}</td>" for i, cell in enumerate(row)) for row in rows)
    mark = f' id="{name}"' if name else ""
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    label = f' aria-label="{escape(caption or "Table")}"'
    return (
        f'<div class="scroll" tabindex="0" role="region"{label}><table{mark}>{told}<thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(f'<tr>{row}</tr>' for row in body)}</tbody></table></div>"
    )
