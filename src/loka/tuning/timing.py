"""Capture steps as they will run, compiled with static shapes in CUDA graphs, and time them in turns.

Without a GPU nothing is timed: FP8 is emulated on a CPU, where its numerics are real but its time is not.
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from loka.lowp.chain import Chain
from loka.lowp.chain_modules import chains_of
from loka.lowp.linear import Linear, linears_of
from loka.lowp.step import end_step
from loka.measure.capturing import capturing
from loka.measure.timing import bootstrap_median
from loka.records import Interval
from loka.tuning.task import Task
from loka.units.example import copy_example, tensors_in
from loka.units.undisturbed import put_back

TURNS, REPEATS = 5, 4
MOST_TURNS = 15  # where turns disagree: a GPU that runs into its power limit changes its clock from turn to turn
AGREE = 0.05  # turns agree if their ratios differ by at most this
LONG_ENOUGH = 8000.0  # microseconds to time at once
LONG = 200_000.0  # a run of this many microseconds is timed once per turn: disturbances are a small part of it
Run = Callable[[], Any]


class NotCapturedError(RuntimeError):
    """A step cannot be captured in a CUDA graph, for example because it reads values on the host."""


def can_time(device: torch.device) -> str | None:
    """Return why nothing can be timed on a device, or None if it can."""
    return None if device.type == "cuda" else f"the model is on {device.type}, where FP8 is emulated"


@dataclass(frozen=True)
class Captured:
    """A step in a CUDA graph.

    Args:
        replay: runs it.
        host_microseconds: time the host needs to launch the step without a graph. If that is longer than the step,
            the device waits for it.
        kept: everything that the step reads. A graph only knows addresses, so nothing of it may be freed.
    """

    replay: Run
    host_microseconds: float
    kept: Any

    def __call__(self) -> None:
        """Replay the graph."""
        self.replay()


# Arguments of torch.compile by name. Coordinate descent also turns matrix-vector products into sums that fuse with
# their neighbours; torchao enables it for everything that is compiled after it.
COMPILERS: dict[str, dict[str, Any]] = {
    "": {},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
    "coordinate descent": {"options": {"coordinate_descent_tuning": True}},
}


def whole_step(task: Task, *, training: bool, compiler: str = "") -> Captured:
    """Compile one step of the whole model on one batch and capture it. The model is restored; replays write buffers.

    Args:
        task: the model and how to run it.
        training: forward, backward, and what an optimizer step does to low precision (weights are quantized again,
            scales advance). There is no optimizer, and nothing is trained. Otherwise forward only, in eval mode.
        compiler: a key of `COMPILERS`.

    Returns:
        The captured step.
    """
    model, batch = task.model, copy_example(task.kept[0])  # copied once: a copy in every step would be timed with it
    timed, run = _compile(task, COMPILERS[compiler])

    def step() -> None:
        with torch.set_grad_enabled(training):
            loss = timed.mean_loss(run, batch, copied=False)
            if training:
                loss.backward()  # type: ignore[no-untyped-call]
                end_step(converted_modules(model))
                model.zero_grad(set_to_none=True)

    with put_back(model):
        if model.training != training:  # keeps submodules that are in eval mode inside a model that trains
            model.train(training)
        return capture(step, model)


def _compile(task: Task, given: Mapping[str, Any]) -> tuple[Task, nn.Module]:
    """Return a compiled task and model: the model is compiled, or the step if it only calls parts of the model."""
    if task.step is None or task.example() is not None:
        return task, torch.compile(task.model, dynamic=False, **given)  # type: ignore[return-value]
    timed = copy.copy(task)
    timed.step = torch.compile(task.step, dynamic=False, **given)
    return timed, task.model


def held_by(model: nn.Module) -> list[Any]:
    """Return the modules of a model, and all tensors and objects that their attributes hold now."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]  # tensors too: their owners may drop them
    return [*modules, *model.parameters(), *model.buffers(), *attributes, *tensors_in(attributes)]


def converted_modules(model: nn.Module) -> list[Linear | Chain]:
    """Return the converted linears and chains of a model. Compiled code must not trace this."""
    return [linear for _, linear in linears_of(model)] + [chain for _, chain in chains_of(model)]


def capture(step: Run, model: nn.Module) -> Captured:
    """Warm up a step and capture it in a CUDA graph, which keeps the step alive and everything it and the model read.

    Raises `NotCapturedError` if it cannot be captured.
    """
    # Fragments share one forward. With the default limit, torch.compile gives up after eight of them and runs the rest
    # eagerly, which would time something else.
    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        return _capture(step, model)


@cache
def _stream_of(device: int) -> torch.cuda.Stream:
    """Return one stream for all warm-ups and captures: cuBLAS keeps 32 MiB per stream while the process lives."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _capture(step: Run, model: nn.Module) -> Captured:
    stream = _stream_of(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        host = min(_time_launch(step) for _ in range(3))  # one alone may include a garbage collection
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A forward may replace a buffer or attribute that it reads. The graph reads what the last warm-up left, and writes
    # what the capture made, so both are kept.
    before = held_by(model)
    try:
        with capturing(graph, stream=stream):
            step()
    except torch.OutOfMemoryError:  # tells nothing about the step
        raise
    except RuntimeError as error:
        torch.cuda.synchronize()
        # No fallback to the plain step: by the time it is timed, the model may have been changed.
        raise NotCapturedError(f"the step cannot be captured in a CUDA graph: {str(error).splitlines()[0]}") from error
    return Captured(graph.replay, host, (step, before, held_by(model)))


def _time_launch(step: Run) -> float:
    """Return the microseconds that the host needs to launch a step; the device may still be running it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    return 1e6 * (time.perf_counter() - began)


def return_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for streams, 32 MiB each, unless a CUDA graph may hold their addresses.

    That is assumed if there is any graph, or any private memory pool, as graphs made in C++ have. Call it when no
    captured step of ours is left.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    # a graph that allocates nothing has an empty pool, which no snapshot shows, so look for graphs as well
    graphs = any(issubclass(type(kept), torch.cuda.CUDAGraph) for kept in gc.get_objects())
    pools = {segment.get("segment_pool_id", (0, 0)) for segment in torch.cuda.memory_snapshot()}  # type: ignore[no-untyped-call]
    if clear is not None and not graphs and pools <= {(0, 0)}:
        torch.cuda.synchronize()
        clear()
        torch.cuda.empty_cache()


def time_in_turns(runs: Mapping[str, Run]) -> dict[str, list[float]]:
    """Time runs in turns, so that disturbances of the GPU affect all of them alike.

    Returns microseconds by name: the median of every turn, of more turns if the first ones do not agree.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    once = {name: _replay(go, 1) for name, go in runs.items()}
    for turn in range(MOST_TURNS):
        if turn >= TURNS and _agree(list(times.values())):
            break
        for name, go in runs.items():
            if once[name] >= LONG:
                times[name].append(_replay(go, 1))
                continue
            go()
            count = 1 + round(LONG_ENOUGH / max(once[name], 1.0))
            times[name].append(statistics.median(_replay(go, count) for _ in range(REPEATS)))
    return times


def _agree(times: list[list[float]]) -> bool:
    """Return True if in every turn the runs take the same multiple of the first one's time, nearly."""
    ratios = [[a / b for a, b in zip(other, times[0], strict=True)] for other in times[1:]]
    return all(max(found) <= (1 + AGREE) * min(found) for found in ratios)


def _replay(go: Run, count: int) -> float:
    """Return the microseconds of one run, of `count` back to back.

    A single run would include its launch by the host, 10 to 50 us that a loop of steps does not wait for.
    """
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        go()
    end.record()
    torch.cuda.synchronize()
    return float(1000 * begin.elapsed_time(end) / count)


def compare(times: Mapping[str, list[float]], name: str, base: str) -> Interval:
    """Return the speed-up of one run over another: the median over turns, with the worst and the best turn.

    Where more turns were needed, with the 95 % interval of the median: single turns say little there.
    """
    ratios = [b / a for a, b in zip(times[name], times[base], strict=True)]
    if len(ratios) > TURNS:
        return bootstrap_median(ratios)
    return Interval(value=statistics.median(ratios), low=min(ratios), high=max(ratios))


def say_host(step: Mapping[str, float], host: Mapping[str, float], mine: str, base: str) -> str | None:
    """Say what is left of a speed-up without a CUDA graph, if launching a step takes longer than running it.

    Args:
        step: microseconds of the steps in CUDA graphs, by name.
        host: microseconds to launch them.
        mine: the run.
        base: the run to compare with.

    Returns:
        A sentence; None if the device takes longer than the host, or nothing of the speed-up is lost.

    Example:
        >>> say_host({"loka": 900.0, "bf16": 1200.0}, {"loka": 3000.0, "bf16": 1000.0}, "loka", "bf16")
        'this speed-up is for steps in CUDA graphs; launched kernel by kernel, a step takes 3.00 ms on the host alone (16-bit: 1.00 ms), about 0.40x: compile with mode="reduce-overhead", or capture the step ("Capture a step" in docs/guides/how-to.md); cuda_graph=False chooses for steps launched this way'
    """
    if host[mine] <= step[mine]:
        return None
    ours, theirs = (max(host[name], step[name]) for name in (mine, base))
    if theirs / ours >= step[base] / step[mine]:
        return None
    return (
        f"this speed-up is for steps in CUDA graphs; launched kernel by kernel, a step takes {host[mine] / 1000:.2f} ms on the host alone (16-bit: {host[base] / 1000:.2f} ms), about {theirs / ours:.2f}x: "
        'compile with mode="reduce-overhead", or capture the step ("Capture a step" in docs/guides/how-to.md); cuda_graph=False chooses for steps launched this way'
    )
