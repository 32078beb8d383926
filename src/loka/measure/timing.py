"""Time kernels together with their competitors, with confidence intervals.

On a GPU:

    one CUDA graph per candidate   holds enough calls to run about 200 us, so launch gaps and clock resolution do not
                                   matter
    rotated operands               a graph's calls cycle through operand sets that together exceed three times the L2
                                   cache, so a small GEMM reads its operands from memory, as it does inside a model
                                   (`sets_needed`)
    interleaved repeats            every repeat replays every candidate once, in a new order, so that drift of clocks
                                   and temperature affects all alike
    median and bootstrap           median over repeats with its 95 % interval; speed-ups are medians of the ratios
                                   *within* a repeat, so what a repeat has in common cancels

On a CPU the same with `perf_counter` and no graph, labelled as such: these numbers are for tests, not for claims.

A candidate carries its Conformance. One that failed raises RedKernelError: incorrect kernels are never timed.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from loka.measure.capturing import capturing
from loka.measure.conformance import Conformance
from loka.records import Interval

BASELINE = "bf16"  # the name of the high-precision form of a call
GRAPH_SECONDS = 200e-6
L2_MULTIPLE = 3
MAX_SETS = 64
MAX_CALLS = 512  # per graph: more calls only add capture time
DEFAULT_REPEATS = 31
RESAMPLES = 400

Thunk = Callable[[], Any]
# a competitor that gets its own column: name, one thunk per operand set, its conformance
Rival = tuple[str, list[Thunk], Conformance]


class RedKernelError(ValueError):
    """Raised instead of timing a kernel that failed its conformance check."""


class CaptureError(RuntimeError):
    """Raised if a candidate cannot be captured in a CUDA graph and so has no comparable time."""


@dataclass(frozen=True)
class Contender:
    """A candidate for timing. Raises RedKernelError unless it passed its conformance check.

    Args:
        name: its name in the results.
        thunks: one callable per operand set.
        conformance: the result of its check.

    Example:
        >>> Contender("triton", [lambda: run(a, b)], judge_backend("scaled_mm", backend, call, "cuda"))
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
    """Seconds per call for every repeat. Candidates of one run share the order of repeats."""

    name: str
    seconds: tuple[float, ...]
    method: str
    sets: int

    def microseconds(self) -> Interval:
        """Return the median microseconds per call with a 95 % bootstrap interval."""
        return bootstrap_median([1e6 * s for s in self.seconds])

    def speedup_over(self, baseline: "Timing") -> Interval:
        """Return the speed-up over a baseline, paired by repeat."""
        if len(baseline.seconds) != len(self.seconds):
            raise ValueError(f"{self.name} and {baseline.name} were not timed together: they differ in repeats")
        return bootstrap_median([b / s for b, s in zip(baseline.seconds, self.seconds, strict=True)])


def bootstrap_median(values: Sequence[float]) -> Interval:
    """Return the median with a 95 % percentile bootstrap interval."""
    if not values or not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError(f"expected positive finite measurements, got {list(values)[:5]}")
    medians = np.sort(np.median(np.asarray(values)[_choose_resamples(len(values))], axis=1)).tolist()
    median = statistics.median(values)
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    return Interval(value=median, low=min(low, median), high=max(high, median))


@lru_cache
def _choose_resamples(count: int) -> np.ndarray:
    """Return the indices of resamples of some measurements, the same in every process."""
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def sets_needed(bytes_per_set: int, device: torch.device) -> int:
    """Return how many operand sets a graph must cycle through so that none stays in the L2 cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MAX_SETS, math.ceil(L2_MULTIPLE * cache / max(bytes_per_set, 1))))


def time_together(
    candidates: Sequence[Contender], device: torch.device | str, *, repeats: int = DEFAULT_REPEATS, seed: int = 0
) -> list[Timing]:
    """Time candidates on the same operands in interleaved repeats.

    Args:
        candidates: candidates that passed their check, with one callable per operand set.
        device: the device to time on.
        repeats: repeats per candidate.
        seed: seed of the order within repeats.

    Returns:
        One timing per candidate, in the given order.

    Example:
        >>> fp8, bf16 = time_together([candidate, baseline], "cuda")
    """
    device = torch.device(device)
    names = [candidate.name for candidate in candidates]
    if len(set(names)) != len(names):
        raise ValueError(f"candidates need different names, got {names}")
    runners = [_make_graph_runner(c, device) if device.type == "cuda" else _make_loop_runner(c) for c in candidates]
    seconds: list[list[float]] = [[] for _ in candidates]
    order = list(range(len(candidates)))
    source = random.Random(seed)
    for _ in range(repeats):
        source.shuffle(order)
        for index in order:
            seconds[index].append(runners[index]())
    method = "CUDA graph, events" if device.type == "cuda" else "perf_counter on a CPU"
    return [Timing(c.name, tuple(s), method, len(c.thunks)) for c, s in zip(candidates, seconds, strict=True)]


def time_capturable(
    candidates: Sequence[Contender], device: torch.device, repeats: int
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time the candidates that can be captured in a CUDA graph; return the reasons for the others."""
    refused: dict[str, str] = {}
    while left := [candidate for candidate in candidates if candidate.name not in refused]:
        try:
            return {timing.name: timing for timing in time_together(left, device, repeats=repeats)}, refused
        except CaptureError as error:
            refused[next(c.name for c in left if str(error).startswith(f"{c.name} "))] = str(error)
    return {}, refused


def _count_calls(seconds_per_call: float, sets: int) -> int:
    """Return the calls per measurement: a multiple of `sets` that runs long enough for clock and graph launch."""
    wanted = min(MAX_CALLS, math.ceil(GRAPH_SECONDS / max(seconds_per_call, 1e-9)))
    return sets * max(1, math.ceil(wanted / sets))


def _make_graph_runner(candidate: Contender, device: torch.device) -> Callable[[], float]:
    """Capture enough calls in a graph. Returns a function that replays it once and returns seconds per call."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    # compilation, autotuning and library handles happen here, on the stream that the capture will use
    with torch.cuda.stream(stream):
        for _ in range(2):
            begin = time.perf_counter()
            candidate.thunks[0]()
            torch.cuda.synchronize(device)
        from_host = time.perf_counter() - begin  # an upper bound: for small kernels mostly launch cost
    replay = _capture(
        candidate, device, stream, calls=_count_calls(max(from_host, GRAPH_SECONDS / 16), len(candidate.thunks))
    )
    replay()
    calls = _count_calls(replay(), len(candidate.thunks))
    return _capture(candidate, device, stream, calls=calls)


def _capture(candidate: Contender, device: torch.device, stream: Any, *, calls: int) -> Callable[[], float]:
    graph = torch.cuda.CUDAGraph()
    try:
        with capturing(graph, stream=stream):
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


def _make_loop_runner(candidate: Contender) -> Callable[[], float]:
    """Return a function that runs a plain loop and returns seconds per call, for CPUs."""
    candidate.thunks[0]()
    begin = time.perf_counter()
    candidate.thunks[0]()
    calls = _count_calls(time.perf_counter() - begin, len(candidate.thunks))

    def loop() -> float:
        begin = time.perf_counter()
        for index in range(calls):
            candidate.thunks[index % len(candidate.thunks)]()
        return (time.perf_counter() - begin) / calls

    return loop
