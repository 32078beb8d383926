"""Compare two reports on one page, for a change of model, data, recipe, version or machine."""

from dataclasses import dataclass
from pathlib import Path

from loka.records import ProbeReport, Site, write_atomically
from loka.records.prose import diff
from loka.report import headline, origin
from loka.report.markup import about, chart, chip, count, escape, mono, percent, signed, span_of, table
from loka.report.quality import GOOD
from loka.report.render import fill_page
from loka.report.results import Results
from loka.report.vega import ACCENT, DASHED, Spec, draw, make_chart, number, point, tooltip

SHOWN = 200  # differences listed
TINY = 1e-3  # smaller errors, of products that are exact up to the last bit, are drawn at this value


@dataclass(frozen=True)
class Pair:
    """Two sets of records to compare.

    Args:
        before: the first set.
        after: the second set.
        names: the names of both, as shown on the page.

    Example:
        >>> write_pair(Pair(before, after, ("2.1", "2.2")), "difference.html")
    """

    before: Results
    after: Results
    names: tuple[str, str] = ("A", "B")

    def __post_init__(self) -> None:
        if self.names[0] == self.names[1]:
            raise ValueError(f"both reports are called {self.names[0]!r}; give two different names")

    @property
    def sides(self) -> tuple[tuple[str, Results], tuple[str, Results]]:
        """The (name, records) of both."""
        return (self.names[0], self.before), (self.names[1], self.after)


def render_pair(pair: Pair) -> str:
    """Render the page that compares two reports.

    Args:
        pair: the two sets of records.

    Returns:
        One self-contained HTML document.

    Example:
        >>> render_pair(Pair(before, after))
    """
    sections = (
        ("quality", "Quality", _write_quality(pair)),
        ("sites", "Sites", _write_sites(pair)),
        ("plan", "Plan", _write_plans(pair)),
        ("made", "How they were made", _side_by_side(pair, [origin.write_environment(r) for _, r in pair.sides])),
    )
    body = _side_by_side(pair, [headline.write_headline(results) for _, results in pair.sides])
    charts = {"pair": spec} if (spec := _draw_errors(pair)) is not None else {}
    data = {
        "names": [], "points": {}, "table": [], "words": [], "formats": [], "limits": {}, "chunk": 1, "hasPlan": False,
        "charts": charts,
    }  # fmt: skip
    return fill_page(f"loka: {pair.names[0]} | {pair.names[1]}", body, [s for s in sections if s[2]], data)


def write_pair(pair: Pair, path: str | Path) -> None:
    """Write the page that compares two reports, atomically.

    Args:
        pair: the two sets of records.
        path: the file to write.

    Example:
        >>> write_pair(Pair(before, after), "difference.html")
    """
    write_atomically(path, render_pair(pair).encode())


def _side_by_side(pair: Pair, texts: list[str]) -> str:
    if not all(texts):
        texts = [text or about("No such records.") for text in texts]
    columns = "".join(
        f'<div><p class="side-name">{escape(name)}</p>{text}</div>'
        for name, text in zip(pair.names, texts, strict=True)
    )
    return f'<div class="sides">{columns}</div>'


def _write_quality(pair: Pair) -> str:
    names = list(dict.fromkeys(c.candidate for _, r in pair.sides for c in r.ordered_comparisons))
    if not names:
        return ""
    rows = []
    for name in names:
        cells = [escape(name)]
        for _, results in pair.sides:
            found = next((c for c in results.comparisons if c.candidate == name), None)
            if found is None:
                cells += ["–", "", ""]
            else:
                change = found.relative_change
                cells += [chip(found.outcome, GOOD[found.outcome]), signed(change.value), span_of(change)]
        rows.append(cells)
    head = ["run", *(text for name in pair.names for text in (f"{name}: verdict", "change", "95 % interval"))]
    both = [{c.candidate: c.outcome for c in results.comparisons} for _, results in pair.sides]
    shared = [name for name in names if all(name in side for side in both)]
    differ = sum(both[0][name] != both[1][name] for name in shared)
    said = f"{count(len(shared), 'run')} in both; {differ or 'none'} of the verdicts {'differs' if differ == 1 else 'differ'}."
    return about(said) + table(head, rows, numeric=(2, 3, 5, 6), caption="Comparisons of both reports")


def _write_sites(pair: Pair) -> str:
    a, b = pair.before.probe, pair.after.probe
    if a is None or b is None:
        return ""
    ours, theirs = ({site.name: site for site in probe.sites} for probe in (a, b))
    both = [name for name in ours if name in theirs]
    changed = [r for name in both for r in _verdict_rows(ours[name], theirs[name])]
    only = [
        f"{len(x.keys() - y.keys())} only in {n}"
        for x, y, n in ((ours, theirs, pair.names[0]), (theirs, ours, pair.names[1]))
    ]
    text = about(
        f"{len(both)} sites are in both, {escape(', '.join(only))}. The verdicts of {len(changed)} GEMMs differ. "
        "In the chart, a point above the diagonal has a larger error in the second report; "
        f"errors below {TINY:g} are drawn at {TINY:g}."
    )
    text += chart("pair", f"Error of each GEMM in {pair.names[0]} against {pair.names[1]}")
    if not changed:
        return text
    more = f"<p>{len(changed) - SHOWN} more.</p>" if len(changed) > SHOWN else ""
    head = ("site", "GEMM", *pair.names, f"reason in {pair.names[1]}")
    return text + table(head, changed[:SHOWN], caption="Verdicts that differ") + more


def _verdict_rows(before: Site, after: Site) -> list[list[str]]:
    old = {v.gemm: v for v in before.verdicts}
    return [
        [
            mono(after.name),
            v.gemm,
            *(chip(s, {"safe": "good", "unsafe": "bad"}.get(s, "")) for s in (old[v.gemm].safety, v.safety)),
            escape(v.reason),
        ]
        for v in after.verdicts
        if v.gemm in old and old[v.gemm].safety != v.safety
    ]


def _write_plans(pair: Pair) -> str:
    a, b = pair.before.plan, pair.after.plan
    if a is None or b is None:
        return ""
    lines = [line for line in diff(a, b).split("\n") if line]
    shares = " against ".join(percent(plan.low_precision_share) for plan in (a, b))
    text = about(f"{shares} of the GEMM FLOPs in low precision; {len(lines)} differences.")
    if not lines:
        return text
    listed = "".join(f"<li><code>{escape(line)}</code></li>" for line in lines[:SHOWN])
    more = f"<p>{len(lines) - SHOWN} more: <code>loka diff</code> lists all.</p>" if len(lines) > SHOWN else ""
    return f"{text}<ul>{listed}</ul>{more}"


def _draw_errors(pair: Pair) -> Spec | None:
    """Draw the smallest error of every GEMM in one report against the other."""
    if pair.before.probe is None or pair.after.probe is None:
        return None
    ours, theirs = (_best_errors(r.probe) for _, r in pair.sides if r.probe is not None)
    rows = [
        {"site": site, "gemm": gemm, "before": max(error, TINY), "after": max(theirs[site, gemm], TINY)}
        for (site, gemm), error in ours.items()
        if (site, gemm) in theirs
    ]
    if not rows:
        return None
    values = [max(value, TINY) for side in (ours, theirs) for value in side.values()]
    ends = [min(values), max(values)]
    scale = {"type": "log", "nice": False, "padding": 10, "domain": [0.8 * ends[0], 1.25 * ends[1]]}
    x, y = (number(title=f"error in {name}", ticks=5, scale=scale) for name in pair.names)
    line = {"type": "line", **DASHED, "stroke": {"expr": "quiet"}}
    said = tooltip("site", "gemm", before=".4f", after=".4f")
    dot = point(50, 0.75, fill={"expr": ACCENT})
    return make_chart(
        f"Smallest error of each GEMM in {pair.names[0]} against {pair.names[1]}",
        height=380,
        layer=[
            draw(line, [{"x": e, "y": e} for e in ends], x={**x, "field": "x"}, y={**y, "field": "y"}),
            draw(dot, rows, x={**x, "field": "before"}, y={**y, "field": "after"}, tooltip=said),
        ],
    )


def _best_errors(probe: ProbeReport) -> dict[tuple[str, str], float]:
    best: dict[tuple[str, str], float] = {}
    for site in probe.sites:
        for c in site.candidates:
            if (error := c.error) is not None:
                key = (site.name, c.gemm)
                best[key] = min(error.value, best.get(key, error.value))
    return best
