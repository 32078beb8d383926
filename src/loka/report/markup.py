"""Pieces of HTML: numbers as text, tables, places for charts. Everything that comes from a record is escaped here or by the caller."""

from collections.abc import Iterable, Sequence
from html import escape

from loka.records import Interval

__all__ = [
    "about", "capitalise", "chart", "chip", "count", "escape", "notice", "percent", "row", "signed", "span_of",
    "table", "times",
]  # fmt: skip

NARROW = "\u202f"  # no-break space that keeps a unit with its number


def percent(value: float, digits: int = 1) -> str:
    """A share as text."""
    return f"{100 * value:.{digits}f}{NARROW}%"


def signed(value: float) -> str:
    """A relative change as text, with as many digits as a small change needs."""
    return f"{100 * value:+.3f}{NARROW}%".replace("-", "−")


def span_of(change: Interval) -> str:
    """An interval of a relative change."""
    return f"{signed(change.low)} to {signed(change.high)}"


def times(speedup: Interval | None) -> str:
    """A speed-up with its interval."""
    if speedup is None:
        return "not measured"
    return f"{speedup.value:.2f}× [{speedup.low:.2f}, {speedup.high:.2f}]"


def count(number: int, word: str) -> str:
    """1 site, 2 sites."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def capitalise(text: str) -> str:
    """The first letter large, the others as they are."""
    return text[:1].upper() + text[1:]


def chip(word: str, kind: str = "") -> str:
    """A word in a coloured pill; the word carries the meaning, not the colour."""
    return f'<span class="chip {kind}">{escape(word)}</span>'


def about(text: str) -> str:
    """A paragraph that says how to read what follows."""
    return f'<p class="about">{text}</p>'


def notice(text: str) -> str:
    """A paragraph nobody should miss."""
    return f'<p class="notice">{text}</p>'


def chart(name: str, label: str) -> str:
    """The place of a chart, with what a screen reader says of it."""
    return f'<figure><div class="chart" id="chart-{name}" role="img" aria-label="{escape(label)}"></div></figure>'


def row(cells: Sequence[str], *, numeric: Iterable[int] = (), why: int | None = None, attributes: str = "") -> str:
    """One row of a table.

    Args:
        cells: as HTML.
        numeric: which of them are numbers, set right.
        why: which one is a sentence: it stays wide enough to read where the table has to scroll.
        attributes: of the row.

    Returns:
        The row as HTML.
    """
    kinds = dict.fromkeys(numeric, ' class="n"') | ({} if why is None else {why: ' class="why"'})
    body = "".join(f"<td{kinds.get(i, '')}>{cell}</td>" for i, cell in enumerate(cells))
    return f"<tr{attributes}>{body}</tr>"


def table(
    head: Sequence[str], rows: Iterable[str], *, numeric: Iterable[int] = (), name: str = "", caption: str = ""
) -> str:
    """A table that scrolls sideways by itself where it is too wide; the frame can be focused, so that keys scroll it."""
    right = set(numeric)
    cells = "".join(
        f'<th scope="col"{" class=n" if i in right else ""}>{escape(title)}</th>' for i, title in enumerate(head)
    )
    mark = f' id="{name}"' if name else ""
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    label = f' aria-label="{escape(caption or "Table")}"'
    return (
        f'<div class="scroll" tabindex="0" role="region"{label}><table{mark}>{told}<thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
