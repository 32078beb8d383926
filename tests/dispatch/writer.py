"""A process that writes rows while others do: `python -m tests.dispatch.writer PATH NUMBER ROWS`."""

import sys

from loka.dispatch.database import Database

from .measured import origin, row


def main(path: str, number: int, count: int) -> None:
    for index in range(count):
        with Database.open(path) as database:  # a fresh connection each time: creation and locking are raced for too
            database.add(origin(date=f"2026-01-{number + 1:02d}"), [row(k=number * 1000 + index), row(k=999_999)])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
