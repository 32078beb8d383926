"""Timing: what a kernel costs, with an interval, side by side with its rivals.

On a GPU

    one CUDA graph per candidate     it holds enough calls to run about 200 us, so neither launch gaps nor the clock's grain are measured
    rotated operands                 the calls of a graph walk through several operand sets that together exceed three times the L2 cache,
                                     so a small GEMM reads its operands from memory, as it does inside a model; `sets_needed` says how many
    interleaved repeats              every repeat replays every candidate once, in a new order: drift of clocks and heat hits all alike
    median and bootstrap             per candidate the median of its repeats and its 95 % interval; speed-ups are medians of the ratios
                                     *within* a repeat, so what a repeat shares cancels

On a CPU the same with `perf_counter` and no graph, and the label says so: such a number is good for tests, not for claims about kernels.

A candidate carries its Conformance; a red one raises. No kernel is timed that computes something else.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from loka.measure.conformance import Conformance
from loka.records import Interval

BASELINE = "bf16"  # the name of the high-precision form of a call
GRAPH_SECONDS = 200e-6
L2_MULTIPLE = 3
MAX_SETS = 64
MAX_CALLS = 512  # per graph: beyond that capture time grows and nothing else
DEFAULT_REPEATS = 31

Thunk = Callable[[], Any]
# something worth a column beside the backends: name, one thunk per operand set, the proof
Rival = tuple[str, list[Thunk], Conformance]


class RedKernelError(ValueError):
    """A kernel that was found wrong was to be timed."""


class CaptureError(RuntimeError):
    """A candidate that cannot be captured in a CUDA graph, and so has no comparable time."""


@dataclass(frozen=True)
class Contender:
    """Something to time beside others; refused unless it was found correct.

    Args:
        name: in the result.
        thunks: one per operand set.
        conformance: the proof that it is right.

    Example:
        >>> Contender("triton", [lambda: run(a, b)], check_scaled_mm(backend, call, a, b))
    """

    name: str
    thunks: Sequence[Thunk]
    conformance: Conformance

    def __post_init__(self) -> None:
        if not self.thunks:
            raise ValueError(f"candidate {self.name!r} has nothing to call")
        if not self.conformance:
            raise RedKernelError(f"{self.name} is wrong and will not be timed: {self.conformance.reason}")


@dataclass(frozen=True)
class Timing:
    """Seconds per call of every repeat, in the order of the repeats (which the candidates of one run share)."""

    name: str
    seconds: tuple[float, ...]
    method: str
    sets: int

    def microseconds(self) -> Interval:
        """Median microseconds per call with a 95 % bootstrap interval."""
        return bootstrap_median([1e6 * s for s in self.seconds])

    def speedup_over(self, baseline: "Timing") -> Interval:
        """How many times faster than the baseline, paired by repeat."""
        if len(baseline.seconds) != len(self.seconds):
            raise ValueError(f"{self.name} and {baseline.name} were not timed together: they differ in repeats")
        return bootstrap_median([b / s for b, s in zip(baseline.seconds, self.seconds, strict=True)])


def bootstrap_median(values: Sequence[float], *, resamples: int = 400, seed: int = 0) -> Interval:
    """Median with a 95 % percentile bootstrap interval."""
    if not values or not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError(f"expected positive finite measurements, got {list(values)[:5]}")
    source = random.Random(seed)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(resamples))
    median = statistics.median(values)
    low, high = medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
    return Interval(value=median, low=min(low, median), high=max(high, median))


def sets_needed(bytes_per_set: int, device: torch.device) -> int:
    """How many operand sets a graph must walk through so that none is found in the L2 cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MAX_SETS, math.ceil(L2_MULTIPLE * cache / max(bytes_per_set, 1))))


def time_together(
    candidates: Sequence[Contender], device: torch.device | str, *, repeats: int = DEFAULT_REPEATS, seed: int = 0
) -> list[Timing]:
    """Time candidates on the same operands in interleaved repeats.

    Args:
        candidates: green ones; each has something to call per set of operands.
        device: where.
        repeats: of each.
        seed: of the order.

    Returns:
        A timing per candidate, in their order.

    Example:
        >>> fp8, bf16 = time_together([candidate, baseline], "cuda")
    """
    device = torch.device(device)
    names = [candidate.name for candidate in candidates]
    if len(set(names)) != len(names):
        raise ValueError(f"candidates need different names, got {names}")
    runners = [_graph(c, device) if device.type == "cuda" else _loop(c) for c in candidates]
    seconds: list[list[float]] = [[] for _ in candidates]
    order = list(range(len(candidates)))
    source = random.Random(seed)
    for _ in range(repeats):
        source.shuffle(order)
        for index in order:
            seconds[index].append(runners[index]())
    method = "CUDA graph, events" if device.type == "cuda" else "perf_counter on a CPU"
    return [Timing(c.name, tuple(s), method, len(c.thunks)) for c, s in zip(candidates, seconds, strict=True)]


def _calls(seconds_per_call: float, sets: int) -> int:
    """Calls per measurement: a multiple of the operand sets, long enough for the clock and the launch of the graph."""
    wanted = min(MAX_CALLS, math.ceil(GRAPH_SECONDS / max(seconds_per_call, 1e-9)))
    return sets * max(1, math.ceil(wanted / sets))


def _graph(candidate: Contender, device: torch.device) -> Callable[[], float]:
    """Capture enough calls; the runner replays them once and returns seconds per call."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    # compilation, autotuning and handles happen here, on the stream the capture will use
    with torch.cuda.stream(stream):
        for _ in range(2):
            begin = time.perf_counter()
            candidate.thunks[0]()
            torch.cuda.synchronize(device)
        from_host = time.perf_counter() - begin  # an upper bound: for small kernels mostly the cost of launching
    replay = _capture(
        candidate, device, stream, calls=_calls(max(from_host, GRAPH_SECONDS / 16), len(candidate.thunks))
    )
    replay()
    calls = _calls(replay(), len(candidate.thunks))
    return _capture(candidate, device, stream, calls=calls)


def _capture(candidate: Contender, device: torch.device, stream: Any, *, calls: int) -> Callable[[], float]:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for index in range(calls):
                candidate.thunks[index % len(candidate.thunks)]()
    except RuntimeError as error:
        raise CaptureError(f"{candidate.name} cannot be captured in a CUDA graph: {error}") from error
    graph.replay()
    torch.cuda.synchronize(device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def replay() -> float:
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e-3 / calls

    return replay


def _loop(candidate: Contender) -> Callable[[], float]:
    """The CPU form: a plain loop."""
    candidate.thunks[0]()
    begin = time.perf_counter()
    candidate.thunks[0]()
    calls = _calls(time.perf_counter() - begin, len(candidate.thunks))

    def loop() -> float:
        begin = time.perf_counter()
        for index in range(calls):
            candidate.thunks[index % len(candidate.thunks)]()
        return (time.perf_counter() - begin) / calls

    return loop
