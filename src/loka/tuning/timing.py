"""Time a unit and the whole step as they will run: compiled with static shapes, in a CUDA graph, in turns with what they are compared with.

Without a GPU nothing is timed: FP8 is emulated on a CPU, its numerics are real and its time is not.
"""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from loka.lowp.chain import Chain
from loka.lowp.chain_modules import chains_of
from loka.lowp.linear import Linear, linears_of
from loka.lowp.step import end_step
from loka.nn.wrapping import named_sites
from loka.records import Interval, UnitPlan
from loka.tuning.task import Task
from loka.units.example import copy_example, tensors_in
from loka.units.following import make_activation
from loka.units.undisturbed import put_back

TURNS, REPEATS = 5, 4
LONG_ENOUGH = 8000.0  # microseconds that are timed at once
LONG = 200_000.0  # microseconds of a run that is timed once a turn: what disturbs a shorter one is little of it
Run = Callable[[], Any]


class NotCapturedError(RuntimeError):
    """A step that reads values on the host, or does something else that no CUDA graph can hold."""


def can_time(device: torch.device) -> str | None:
    """Why nothing can be timed on a device; None where it can.

    Args:
        device: where the model is.

    Returns:
        The reason, or None.
    """
    return None if device.type == "cuda" else f"the model is on {device.type}, where FP8 is emulated"


@dataclass(frozen=True)
class Captured:
    """A step in a CUDA graph.

    Args:
        replay: runs it.
        host_microseconds: what the host takes to launch the step when it is in no graph; the device waits for that where it is the longer of both.
        kept: all that the step reads. A graph knows addresses only: what is freed after the capture is somebody else's memory in a replay, or nobody's.
    """

    replay: Run
    host_microseconds: float
    kept: Any

    def __call__(self) -> None:
        """Replay."""
        self.replay()


class Fragment(nn.Module):
    """A unit cut out of its model: copies of its modules, run one after another, with something before and behind for the compiler to join to.

    Args:
        parts: names and copies of the modules in the order they run.
    """

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.order = [name.replace(".", "_") for name in parts]
        for name, part in parts.items():
            self.add_module(name.replace(".", "_"), part)

    def forward(self, x: Tensor) -> Tensor:
        """The unit between an addition and a product."""
        x = x + 1.0
        for name in self.order:
            x = getattr(self, name)(x)
        return x * 0.5


def make_fragment(model: nn.Module, unit: UnitPlan) -> tuple[Fragment, UnitPlan]:
    """A unit's modules, copied, and the unit by the names they have in the copy.

    Args:
        model: not converted.
        unit: from `discover`.

    Returns:
        The fragment, and the unit that can be placed in it.
    """
    import msgspec

    modules, parts, links = dict(named_sites(model)), {}, []
    for index, link in enumerate(unit.links):
        parts[link.linear] = deepcopy(modules[link.linear])
        passed = []
        for name in link.passed:
            parts[name] = deepcopy(modules[name])
            passed.append(name.replace(".", "_"))
        if link.called:
            parts[f"function_{index}"] = make_activation(link.activation, link.slope)
            passed.append(f"function_{index}")
        dropout = None if link.dropout_site is None else link.dropout_site.replace(".", "_")
        if link.dropout is not None and link.dropout_site not in link.passed:
            dropout = f"dropout_{index}"
            parts[dropout] = nn.Dropout(link.dropout)
            passed.append(dropout)
        norm = None if link.norm_site is None else link.norm_site.replace(".", "_")
        links.append(
            msgspec.structs.replace(
                link,
                linear=link.linear.replace(".", "_"),
                passed=passed,
                callers=[],
                called=False,
                norm_site=norm,
                dropout_site=dropout,
            )
        )
    magnitudes = {name.replace(".", "_"): value for name, value in unit.magnitudes.items()}
    return Fragment(parts), msgspec.structs.replace(
        unit, name=links[0].linear, links=links, magnitudes=magnitudes, around=None
    )


def fragment_step(
    fragment: nn.Module, x: Tensor, *, training: bool, autocast: torch.dtype | None, mode: str | None
) -> Captured:
    """One step of a fragment, compiled and captured.

    Args:
        fragment: in training or eval mode.
        x: its input.
        training: forward, backward and what an optimizer's step brings about in low precision, otherwise forward alone.
        autocast: compute in this type.
        mode: of torch.compile.

    Returns:
        What replays the step.
    """
    run = torch.compile(fragment, dynamic=False, mode=mode)
    x = x.clone().requires_grad_(training)

    def step() -> None:
        with torch.set_grad_enabled(training):
            with (
                torch.autocast(x.device.type, autocast)
                if autocast is not None
                else torch.autocast(x.device.type, enabled=False)
            ):
                y = run(x)
            if training:
                y.sum().backward()
                end_step(_placed(fragment))
                x.grad = None
                fragment.zero_grad(set_to_none=True)

    return capture(step, fragment)


# Ways to compile, by name: what torch.compile is given. Coordinate descent also turns products with a vector into sums that join their neighbours; torchao switches it on for all that is compiled after it.
COMPILERS: dict[str, dict[str, Any]] = {
    "": {},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
    "coordinate descent": {"options": {"coordinate_descent_tuning": True}},
}


def whole_step(task: Task, *, training: bool, compiler: str = "") -> Captured:
    """One step of the whole model on one batch, compiled and captured, in training or eval mode. The model is afterwards what it was; a replay writes to its buffers again.

    Args:
        task: what the user gave.
        training: forward, backward, and what an optimizer's step brings about in low precision (weights are quantised anew, scales move on); no optimizer, nothing is trained.
        compiler: of `COMPILERS`.

    Returns:
        What replays the step.
    """
    model, batch = task.model, copy_example(task.kept[0])  # one copy: made in every step it would be timed with it
    timed, run = _compile(task, COMPILERS[compiler])

    def step() -> None:
        with torch.set_grad_enabled(training):
            loss = timed.mean_loss(run, batch, copied=False)
            if training:
                loss.backward()  # type: ignore[no-untyped-call]
                end_step(_placed(model))
                model.zero_grad(set_to_none=True)

    with put_back(model):
        if model.training != training:  # parts that are in eval mode inside of a model that trains stay so
            model.train(training)
        return capture(step, model)


def _compile(task: Task, given: Mapping[str, Any]) -> tuple[Task, nn.Module]:
    """A task and the model it is run with: the model compiled, or the step, where that calls parts of the model alone, which compiling the model would not reach."""
    if task.step is None or task.example() is not None:
        return task, torch.compile(task.model, dynamic=False, **given)  # type: ignore[return-value]
    timed = copy.copy(task)
    timed.step = torch.compile(task.step, dynamic=False, **given)
    return timed, task.model


def held_by(model: nn.Module) -> list[Any]:
    """Modules of a model, and all that is in their attributes now.

    Args:
        model: any; it may be changed while a graph still reads what it held.

    Returns:
        Modules, tensors, and objects that hold tensors.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]  # tensors too: what holds them may let go of them
    return [*modules, *model.parameters(), *model.buffers(), *attributes, *tensors_in(attributes)]


def _placed(model: nn.Module) -> list[Linear | Chain]:
    """What is in low precision; not asked for before a step, since a compiled step must not trace it."""
    return [linear for _, linear in linears_of(model)] + [chain for _, chain in chains_of(model)]


def capture(step: Run, model: nn.Module) -> Captured:
    """Warm a step up and capture it in a CUDA graph; a step that cannot be captured (it reads values on the host) raises.

    Args:
        step: what to capture; it is kept with the graph, and with it the inputs it closes over.
        model: what else the step reads.

    Returns:
        What replays the step.
    """
    # Fragments share one forward: without room for them torch.compile gives up after eight and runs the rest eagerly, which times something else.
    with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        return _capture(step, model)


@cache
def _stream_of(device: int) -> torch.cuda.Stream:
    """One stream for all warm-ups and captures: cuBLAS keeps 32 MiB for every stream it has run on, for as long as the process lives."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _capture(step: Run, model: nn.Module) -> Captured:
    stream = _stream_of(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
        host = min(_time_launch(step) for _ in range(3))  # a single one may meet a collection of garbage
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A forward may put another tensor in the place of a buffer or an attribute that it reads: the graph reads what the last warm-up left, and writes what the capture did.
    before = held_by(model)
    try:
        with torch.cuda.graph(graph, stream=stream):
            step()
    except torch.OutOfMemoryError:  # says nothing about the step
        raise
    except RuntimeError as error:
        torch.cuda.synchronize()
        # Not run as it is instead: a step that is timed later would by then run whatever the model has become.
        raise NotCapturedError(f"the step cannot be captured in a CUDA graph: {str(error).splitlines()[0]}") from error
    return Captured(graph.replay, host, (step, before, held_by(model)))


def _time_launch(step: Run) -> float:
    """Microseconds of the host's work for a step; the device may still be at it."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    return 1e6 * (time.perf_counter() - began)


def return_workspaces() -> None:
    """Give back what cuBLAS keeps for the streams it has run on, 32 MiB each, unless somebody's CUDA graph may hold its address: where there is a graph, or a pool of memory as graphs that C++ made have.

    Call it when no captured step of ours is left.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    # a graph that allocates nothing has an empty pool, which no snapshot shows
    graphs = any(issubclass(type(kept), torch.cuda.CUDAGraph) for kept in gc.get_objects())
    pools = {segment.get("segment_pool_id", (0, 0)) for segment in torch.cuda.memory_snapshot()}  # type: ignore[no-untyped-call]
    if clear is not None and not graphs and pools <= {(0, 0)}:
        torch.cuda.synchronize()
        clear()
        torch.cuda.empty_cache()


def time_in_turns(runs: Mapping[str, Run]) -> dict[str, list[float]]:
    """Microseconds of every way, in turns, so that what the card does meanwhile hits all alike.

    Args:
        runs: what to time, by name.

    Returns:
        The median of every turn, by name.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    once = {name: _replay(go, 1) for name, go in runs.items()}
    for _ in range(TURNS):
        for name, go in runs.items():
            if once[name] >= LONG:
                times[name].append(_replay(go, 1))
                continue
            go()
            count = 1 + round(LONG_ENOUGH / max(once[name], 1.0))
            times[name].append(statistics.median(_replay(go, count) for _ in range(REPEATS)))
    return times


def _replay(go: Run, count: int) -> float:
    """Microseconds of a run. Several follow one another without a pause: of a single one the host's launch would be timed too, 10 to 50 us that a loop of steps does not wait for."""
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        go()
    end.record()
    torch.cuda.synchronize()
    return float(1000 * begin.elapsed_time(end) / count)


def compare(times: Mapping[str, list[float]], name: str, base: str) -> Interval:
    """How many times faster one way is than another: the median over turns, and the worst and best turn.

    Args:
        times: of `time_in_turns`.
        name: the way.
        base: what it is compared with.

    Returns:
        The speed-up.
    """
    ratios = [b / a for a, b in zip(times[name], times[base], strict=True)]
    return Interval(value=statistics.median(ratios), low=min(ratios), high=max(ratios))


def say_host(step: Mapping[str, float], host: Mapping[str, float], mine: str, base: str) -> str | None:
    """What becomes of a speed-up without a CUDA graph, where the host takes longer to launch a step than the device to run it.

    Args:
        step: microseconds of the steps in CUDA graphs, by name.
        host: microseconds that launching them takes.
        mine: the way.
        base: what it is compared with.

    Returns:
        A sentence; None where the device is the slower of both, or launched so the way is as far ahead.

    Example:
        >>> say_host({"loka": 900.0, "bf16": 1200.0}, {"loka": 3000.0, "bf16": 1000.0}, "loka", "bf16")
        'this speed-up is of steps in CUDA graphs; launched one kernel at a time a step takes 3.00 ms of the host alone (16 bits: 1.00 ms), about 0.40x: compile with mode="reduce-overhead", or capture the step ("Capture a step" in docs/guides/how-to.md); cuda_graph=False chooses for steps that are launched so'
    """
    if host[mine] <= step[mine]:
        return None
    ours, theirs = (max(host[name], step[name]) for name in (mine, base))
    if theirs / ours >= step[base] / step[mine]:
        return None
    return (
        f"this speed-up is of steps in CUDA graphs; launched one kernel at a time a step takes {host[mine] / 1000:.2f} ms of the host alone (16 bits: {host[base] / 1000:.2f} ms), about {theirs / ours:.2f}x: "
        'compile with mode="reduce-overhead", or capture the step ("Capture a step" in docs/guides/how-to.md); cuda_graph=False chooses for steps that are launched so'
    )
