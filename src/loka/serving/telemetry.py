"""Metrics of a server, for Prometheus and for its live page.

Prometheus' text format is simple (a name, labels and a number per line), so it is written here without a dependency;
tests read it with Prometheus' own parser. Memory is bounded: the series by the labels used in this package, the live
page by `SECONDS` seconds of at most `KEPT` latencies each.
"""

import bisect
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

SECONDS, KEPT = 120, 2000
_COUNTED = ("answered", "late", "shed", "failed")  # in a second
LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 256.0, 1024.0, 4096.0)
HELP = {
    "loka_requests_total": "Responses by model and HTTP status",
    "loka_shed_total": "Requests shed at once, by reason",
    "loka_dropped_total": "Admitted requests that could no longer be answered in time",
    "loka_cancelled_total": "Requests whose client disconnected",
    "loka_sla_missed_total": "Answers after their deadline",
    "loka_batches_total": "Batches by bucket",
    "loka_units_total": "Units (requests or rows) that ran",
    "loka_padding_total": "Units of batches that were padding",
    "loka_reloads_total": "Reloads by result",
    "loka_latency_seconds": "Time from arrival to answer",
    "loka_queue_seconds": "Time from arrival to the start of the batch",
    "loka_batch_seconds": "Duration of a batch",
    "loka_batch_units": "Units in a batch",
    "loka_queue_requests": "Waiting requests",
    "loka_captures": "Shapes prepared; must not grow once ready",
    "loka_captures_after_ready": "Shapes prepared after the server was ready",
    "loka_ready": "Whether the model accepts requests",
    "loka_model_info": "Name and version of the model",
}
Labels = tuple[tuple[str, str], ...]


class Taken(msgspec.Struct, array_like=True):
    """What a front has counted, as a frame carries it.

    Args:
        counters: name, labels and amount of each series.
        histograms: name, labels, bounds, counts and sum of each series.
        seconds: of the live page: second, answered, late, shed, failed, latencies.
    """

    counters: list[tuple[str, Labels, float]]
    histograms: list[tuple[str, Labels, tuple[float, ...], list[int], float]]
    seconds: list[tuple[int, int, int, int, int, list[float]]]

    def __bool__(self) -> bool:
        return bool(self.counters or self.histograms or self.seconds)


class Histogram:
    """Counts of values by upper bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: Labels) -> list[str]:
        """Return the histogram in Prometheus' text format."""
        out, running = [], 0
        for bound, count in zip((*map(repr, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            out.append(f"{name}_bucket{_format_labels((*labels, ('le', bound)))} {running}")
        return [
            *out,
            f"{name}_sum{_format_labels(labels)} {self.total!r}",
            f"{name}_count{_format_labels(labels)} {running}",
        ]


class Telemetry:
    """Counters, histograms and the last two minutes.

    Example:
        >>> telemetry = Telemetry()
        >>> telemetry.count("loka_shed_total", reason="late")
        >>> "loka_shed_total" in telemetry.render()
        True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.counters: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        self.gauges: dict[str, Callable[[], Mapping[Labels, float]]] = {}
        self._seconds: deque[dict[str, Any]] = deque(maxlen=SECONDS)

    def take(self) -> Taken:
        """Return what was counted since the last call, and begin anew: a front's share, for `merge` in the engine's process."""
        counters = [(name, key, value) for name, series in self.counters.items() for key, value in series.items()]
        histograms = [(name, key, h.bounds, h.counts, h.total) for name, series in self.histograms.items() for key, h in series.items()]  # fmt: skip
        seconds = [(s["at"], *(s[name] for name in _COUNTED), s["latencies"]) for s in self._seconds]
        self.counters, self.histograms = {}, {}
        self._seconds.clear()
        return Taken(counters, histograms, seconds)

    def merge(self, taken: Taken) -> None:
        """Add what a front has counted."""
        for name, key, value in taken.counters:
            own = self.counters.setdefault(name, {})
            own[key] = own.get(key, 0) + value
        for name, key, bounds, counts, total in taken.histograms:
            mine = self.histograms.setdefault(name, {}).setdefault(key, Histogram(bounds))
            mine.counts = [a + b for a, b in zip(mine.counts, counts, strict=True)]
            mine.total += total
        for at, *counted, latencies in taken.seconds:
            here = self._second_at(at)
            for name, amount in zip(_COUNTED, counted, strict=True):
                here[name] += amount
            here["latencies"] += latencies[: KEPT - len(here["latencies"])]

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter."""
        series = self.counters.setdefault(name, {})
        key = tuple(labels.items())
        series[key] = series.get(key, 0) + amount

    def observe(self, name: str, value: float, bounds: tuple[float, ...] = LATENCIES, **labels: str) -> None:
        """Add to a histogram."""
        series = self.histograms.setdefault(name, {})
        key = tuple(labels.items())
        if key not in series:
            series[key] = Histogram(bounds)
        series[key].add(value)

    def watch(self, name: str, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Register a gauge, which is read whenever the metrics are rendered."""
        self.gauges[name] = read

    def second(self) -> dict[str, Any]:
        """Return the counts of the current second, for the live page."""
        return self._second_at(int(self.clock()))

    def _second_at(self, at: int) -> dict[str, Any]:
        place = len(self._seconds)
        while place and self._seconds[place - 1]["at"] > at:
            place -= 1
        if place and self._seconds[place - 1]["at"] == at:
            return self._seconds[place - 1]
        made: dict[str, Any] = {"at": at, **dict.fromkeys(_COUNTED, 0), "latencies": [], "batches": []}
        if len(self._seconds) == SECONDS:
            self._seconds.popleft()
            place = max(0, place - 1)
        self._seconds.insert(place, made)
        return made

    def answered(self, seconds: float, *, late: bool) -> None:
        """Count one answer, for the live page."""
        here = self.second()
        here["answered"] += 1
        here["late"] += late
        if len(here["latencies"]) < KEPT:
            here["latencies"].append(seconds)

    def history(self) -> list[dict[str, Any]]:
        """Return the last two minutes, second by second, with quantiles in milliseconds."""
        now, out = int(self.clock()), []
        for second in self._seconds:
            latencies = sorted(second["latencies"])
            out.append(
                {
                    "age": now - second["at"],
                    **{name: second[name] for name in ("answered", "late", "shed", "failed")},
                    "p50": _quantile(latencies, 0.5),
                    "p99": _quantile(latencies, 0.99),
                    "batch": sum(second["batches"]) / len(second["batches"]) if second["batches"] else None,
                }
            )
        return out

    def render(self) -> str:
        """Return all metrics in Prometheus' text format."""
        lines: list[str] = []
        for name, series in self.counters.items():
            lines += [f"# HELP {name} {HELP.get(name, name)}", f"# TYPE {name} counter"]
            lines += [
                f"{name}{_format_labels(labels)} {value:g}"
                if value < 1e6
                else f"{name}{_format_labels(labels)} {value!r}"
                for labels, value in series.items()
            ]
        for name, read in self.gauges.items():
            lines += [f"# HELP {name} {HELP.get(name, name)}", f"# TYPE {name} gauge"]
            lines += [f"{name}{_format_labels(labels)} {value!r}" for labels, value in read().items()]
        for name, found in self.histograms.items():
            lines += [f"# HELP {name} {HELP.get(name, name)}", f"# TYPE {name} histogram"]
            for labels, histogram in found.items():
                lines += histogram.lines(name, labels)
        return "\n".join(lines) + "\n"


def _quantile(values: list[float], q: float) -> float | None:
    return round(1e3 * values[min(len(values) - 1, int(q * len(values)))], 3) if values else None


def _format_labels(labels: Labels) -> str:
    def clean(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{clean(value)}"' for name, value in labels) + "}" if labels else ""
