"""Errors of data: the exception, and the counter of bad rows.

A real log has a few broken lines. Dropping them silently would hide a broken download; stopping at the first one would
make the data unusable. So bad rows are counted, the first few are kept with line number and reason, and the build fails
if their share exceeds a threshold (by default one in a thousand).
"""

from dataclasses import dataclass, field

MAX_BAD = 0.001
"""Default largest share of bad rows that still loads"""
KEPT_EXAMPLES = 5
"""Bad rows that are shown, not only counted"""
_SHOWN_CHARACTERS = 80


class DataError(ValueError):
    """A data set, a cache or a download is damaged or missing; the message names the file and what to do."""


@dataclass(frozen=True)
class BadRow:
    """One rejected line."""

    file: str
    line: int
    reason: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}: {self.text!r}"


@dataclass
class BadRows:
    """Counts rejected lines, keeps a few as examples, and decides when there are too many."""

    limit: float = MAX_BAD
    total: int = 0
    bad: int = 0
    examples: list[BadRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0.0 <= self.limit <= 1.0:
            raise ValueError(f"max_bad is a share of the rows and must lie in [0, 1], got {self.limit}")

    def seen(self, rows: int) -> None:
        """Count rows that were read, good or bad."""
        self.total += rows

    def reject(self, file: str, line: int, reason: str, text: str) -> None:
        """Count one bad row, keeping it as an example if few have been kept so far."""
        self.bad += 1
        if len(self.examples) < KEPT_EXAMPLES:
            self.examples.append(BadRow(file, line, reason, text[:_SHOWN_CHARACTERS]))

    def reject_more(self, count: int) -> None:
        """Count bad rows beyond those worth keeping as examples."""
        self.bad += count

    @property
    def wants_examples(self) -> bool:
        """Whether another example would be kept. If not, vectorized readers need not explain further bad rows."""
        return len(self.examples) < KEPT_EXAMPLES

    def check(self, where: str) -> None:
        """Raise if too many of the rows seen so far were bad."""
        if self.total == 0:
            raise DataError(f"{where}: no rows at all; the file is empty or is not this data set")
        if self.bad > self.limit * self.total:
            shown = "\n  ".join(str(example) for example in self.examples)
            raise DataError(
                f"{where}: {self.bad} of {self.total} rows are bad ({self.bad / self.total:.2%}), more than the allowed "
                f"{self.limit:.2%}; the file may be damaged or of another format. First ones:\n  {shown}\n"
                f"Pass max_bad={min(1.0, self.bad / self.total * 1.01):.4f} to drop them and go on."
            )
