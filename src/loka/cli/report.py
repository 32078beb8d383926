"""`loka report`: make the HTML page of a job again from its records.

loka report runs/demo/records --out report.html
"""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of records (*.json).")],
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
) -> None:
    """Make one self-contained HTML page from the records of a job."""
    from loka.report import Results, write_html

    write_html(Results.load(folder), out)
    typer.echo(str(out))
