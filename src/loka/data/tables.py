"""Read raw tables with polars, and turn any damage of a file into a DataError that names it.

Only preprocessing imports this: training reads the cache, which does not need polars.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from loka.data.faults import BadRows, DataError

if TYPE_CHECKING:
    import polars as pl


def read_parquet(path: Path, columns: Sequence[str]) -> pl.DataFrame:
    """Read the named columns of a Parquet file."""
    import polars as pl

    try:
        present = pl.read_parquet_schema(path)
        missing = [name for name in columns if name not in present]
        if missing:
            raise DataError(f"{path}: columns {missing} are missing; it has {sorted(present)}")
        return pl.read_parquet(path, columns=list(columns), use_pyarrow=False)
    # For some damage polars raises a panic of its own, which is neither a PolarsError nor even an Exception.
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path}: not readable as Parquet ({reason}); the file may be damaged") from None


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, through gzip if its name ends in .gz."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield file  # type: ignore[misc]
    except EOFError:
        raise DataError(f"{path}: truncated, the gzip stream ends early; download it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}); download it again") from None


def split_lines(content: bytes, separator: str, names: Sequence[str], *, encoding: str = "utf-8") -> pl.DataFrame:
    """Split text into lines and lines into string columns.

    The result has `__line` (number, from 1), `__text` and one column per name; a line with too few or too many parts
    has nulls in all of them. Empty lines are dropped. Undecodable bytes become the replacement character: the line, not
    the file, is bad.
    """
    import polars as pl

    text = pl.Series("__text", content.decode(encoding, errors="replace").split("\n"), dtype=pl.String)
    frame = text.str.strip_chars_end("\r").to_frame().with_row_index("__line", offset=1).filter(pl.col("__text") != "")
    parts = pl.col("__text").str.split(separator)
    frame = frame.with_columns(parts.alias("__parts")).with_columns(pl.col("__parts").list.len().alias("__count"))
    right = pl.col("__count") == len(names)
    return frame.with_columns(
        [
            pl.when(right).then(pl.col("__parts").list.get(index, null_on_oob=True).str.strip_chars(" ")).alias(name)
            for index, name in enumerate(names)
        ]
    ).drop("__parts", "__count")


def explain_bad(
    raw: pl.DataFrame, parsed: pl.DataFrame, file: str, bad: BadRows, width: int, *, ended: bool
) -> pl.Series:
    """Count the lines of `raw` for which `parsed` has a null, keep a few examples, and return which lines are good.

    `parsed` has the required columns after casting, in the same rows as `raw`. `ended` says whether the text ends with
    a newline: a bad last line without one means that the file is truncated, which is an error and not just a bad row.
    """
    import polars as pl

    good = parsed.select(pl.all_horizontal(pl.all().is_not_null()).alias("good"))["good"]
    if raw.height and not ended and not good[-1]:
        raise DataError(
            f"{file}: ends in the middle of line {raw['__line'][-1]}, so the file is truncated; get it again, or remove that line to "
            "use what is there"
        )
    bad.seen(raw.height)
    wrong = raw.filter(~good)
    details = parsed.filter(~good)
    shown = 0
    while shown < wrong.height and bad.wants_examples:
        row = wrong.row(shown, named=True)
        nulls = [name for name, value in details.row(shown, named=True).items() if value is None]
        reason = (
            f"expected {width} parts"
            if len(nulls) == details.width and details.width > 1
            else f"bad {', '.join(nulls)}"
        )
        bad.reject(file, row["__line"], reason, row["__text"])
        shown += 1
    bad.reject_more(wrong.height - shown)
    return good
