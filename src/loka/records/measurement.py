"""Measured values: a number with its interval, and the machine it was measured on."""

from loka.records.record import Part


class Interval(Part, frozen=True):
    """An estimate with its 95 % interval. Decisions are made on the worse end."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"interval [{self.low}, {self.high}] does not contain its value {self.value}")


class Environment(Part, frozen=True):
    """Where and how numbers were made: enough to repeat them, and to refuse them elsewhere."""

    date: str  # ISO 8601, UTC
    command: str
    loka: str
    commit: str | None  # None outside a git checkout
    python: str
    torch: str
    triton: str | None
    device: str  # "cpu", or the GPU's name
    driver: str | None
    cpu: str
    threads: int
