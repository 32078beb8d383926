"""`loka report`: make the HTML page of a job from its records, or compare two jobs side by side.

    loka report runs/demo/records --out report.html
    loka report runs/demo/records --add benchmarks/results/h200/scaled_mm.json    with a kernel benchmark and roofline
    loka report runs/a/records runs/b/records --out compare.html                  two jobs on one page

stdout carries the path of the page. Exit 2 if a file is damaged or not a record; the message names it.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from loka.cli.places import check_file


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of records (*.json), or one record.")],
    other: Annotated[Path | None, typer.Argument(help="Another one, to compare the two side by side.")] = None,
    add: Annotated[list[Path] | None, typer.Option(help="Further record files, e.g. a kernel benchmark.")] = None,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    json_: Annotated[bool, typer.Option("--json", help="Print the path and size of the page as JSON.")] = False,
) -> None:
    """Make a self-contained HTML page from the records of one job, or compare two jobs."""
    from loka.report import Pair, Results, write_html, write_pair

    sources = [one for one in (folder, other) if one is not None]
    check_file("--out", out, [*sources, *(add or ()), *(file for one in sources for file in one.glob("*.json"))])
    results = Results.load(folder, add or ())
    if other is None:
        write_html(results, out)
    else:
        if add:
            raise ValueError("--add adds records to one report and does not go with a comparison of two")
        write_pair(Pair(results, Results.load(other), name_sides(folder, other)), out)
    typer.echo(json.dumps({"report": str(out), "bytes": out.stat().st_size}) if json_ else str(out))


def name_sides(folder: Path, other: Path) -> tuple[str, str]:
    """Return the shortest ends of two paths that tell them apart."""
    ours, theirs = folder.absolute().parts, other.absolute().parts
    if ours == theirs:
        raise ValueError(f"{folder} is given twice; name two different folders")
    for count in range(1, max(len(ours), len(theirs)) + 1):
        a, b = "/".join(ours[-count:]), "/".join(theirs[-count:])
        if a != b:
            break
    return tuple(name.removesuffix("/records").removesuffix(".json") for name in (a, b))  # type: ignore[return-value]
