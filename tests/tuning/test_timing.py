"""What is timed is a step as it is trained: with fresh quantised weights, filed magnitudes, and no copy of the inputs."""

import gc
import itertools
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import loka
from loka.lowp import Linear
from loka.lowp.binding import LinearOptions
from loka.lowp.step import end_step
from loka.placing import plan_everything
from loka.tuning import Task, timing
from loka.units.example import tensors_in


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[..., 0] - target).square()


def make(device: torch.device, chains: bool) -> tuple[nn.Module, list[tuple[tuple[torch.Tensor, ...], torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Softmax(-1), nn.Linear(64, 64), nn.Softmax(-1), nn.Linear(64, 1))  # fmt: skip
    batches = [((torch.randn(32, 64, device=device),), torch.randn(32, device=device)) for _ in range(2)]
    model.to(device)
    if chains:
        loka.convert(model, plan_everything(model, batches[0][0], linears=64))
    else:
        loka.convert(model, recipe="tensorwise", options=LinearOptions(scales="delayed"), module_filter_fn=lambda m, name: m.out_features > 1)  # fmt: skip
    return model, batches


@pytest.mark.parametrize("chains", [True, False], ids=["chains", "linears"])
def test_ending_a_step_is_what_an_optimizer_does(chains: bool) -> None:
    model, batches = make(torch.device("cpu"), chains)
    twin, _ = make(torch.device("cpu"), chains)
    assert timing.converted_modules(model)
    assert any(isinstance(module, Linear) for module in model.modules()) != chains
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    for one, end in ((model, lambda: end_step(timing.converted_modules(model))), (twin, optimizer.step)):
        for (inputs,), target in batches * 2:
            loss(one(inputs), target).mean().backward()
            end()
    for mine, theirs in zip(timing.converted_modules(model), timing.converted_modules(twin), strict=True):
        for a, b in zip(mine.remembered, theirs.remembered, strict=True):
            assert float(a.largest) > 0
            assert torch.equal(a.history, b.history)
    with torch.no_grad():  # a weight written by hand: the next forward sees it
        before = model(batches[0][0][0])
        for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
            linear.weight.data.mul_(0.5)
        end_step(timing.converted_modules(model))
        assert not torch.equal(model(batches[0][0][0]), before)


def test_inputs_are_copied_unless_they_are_timed() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(x.mul_(2.0))

    x, y = torch.ones(3, 4), torch.zeros(3)
    task = Task(Writes(), [((x,), y), ((x.clone(),), y)], loss)
    task.mean_loss(task.model, task.kept[0])
    assert torch.equal(x, torch.ones(3, 4))
    task.mean_loss(task.model, task.kept[0], copied=False)
    assert torch.equal(x, torch.full((3, 4), 2.0))


class Takes(nn.Module):
    """Takes out of a dict what it reads, as models do that pass the rest on."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(4, 1)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.top(features.pop("dense"))


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("stepped", [True, False], ids=["step", "loss"])
def test_a_forward_may_take_apart_what_it_is_given(stepped: bool, copied: bool) -> None:
    x, y = torch.ones(3, 4), torch.zeros(3)
    batches = [(({"dense": x},), y) for _ in range(2)]
    step = lambda model, batch: loss(model(*batch[0]), batch[1])  # noqa: E731
    task = Task(Takes(), batches, None if stepped else loss, step if stepped else None)
    for _ in range(2):
        task.mean_loss(task.model, task.kept[0], copied=copied)
    assert set(batches[0][0][0]) == {"dense"}
    assert set(task.example().args[0]) == {"dense"}


def test_what_is_no_function_and_no_model_is_named() -> None:
    batches = [(torch.ones(3, 4), torch.zeros(3))] * 2
    with pytest.raises(ValueError, match=r"loss is str 'mse', expected a function of \(output, target\)"):
        loka.tune(nn.Linear(4, 1), batches, "mse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model is function, expected an nn\.Module"):
        loka.tune(loss, batches, loss)  # type: ignore[arg-type]


def test_a_loss_that_is_not_finite_is_named() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    batches = [(torch.full((8, 64), value), torch.zeros(8)) for value in (1.0, float("nan"), 2.0, 3.0)]
    with pytest.raises(ValueError, match="the loss of batch 1 is nan: expected a finite number"):
        loka.tune(model, batches, loss)
    assert type(model[0]) is nn.Linear


def test_a_run_of_seconds_is_not_repeated_as_short_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = {"short": 0, "long": 0}
    taken = {"short": 2000.0, "long": 3e6}

    def replay(go: timing.Run, count: int) -> float:
        for _ in range(count):
            go()
        return taken[go()]

    def make(name: str) -> timing.Run:
        def go() -> str:
            ran[name] += 1
            return name

        return go

    monkeypatch.setattr(timing, "_replay", replay)
    times = timing.time_in_turns({name: make(name) for name in ran})
    assert times == {name: [taken[name]] * timing.TURNS for name in ran}
    assert ran["long"] == 2 * (1 + timing.TURNS)  # `replay` above runs it once more
    assert ran["short"] > timing.TURNS * timing.REPEATS * 5


@pytest.mark.parametrize("held", [True, False], ids=["a graph", "none"])
def test_workspaces_stay_where_a_graph_may_hold_their_address(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that allocates nothing shows in no snapshot of memory."""

    class Graph:
        pass

    cleared: list[bool] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"segment_pool_id": (0, 0)}])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: cleared.append(True), raising=False)
    kept = Graph() if held else None
    timing.return_workspaces()
    assert bool(cleared) != held
    del kept


def write_losses(task: Task, into: torch.Tensor) -> None:
    """Have every step of a task leave its loss in a tensor, which a captured step writes to as well."""
    inner = task.mean_loss

    def watched(*args: object, **kwargs: object) -> torch.Tensor:
        value = inner(*args, **kwargs)  # type: ignore[arg-type]
        into.copy_(value.detach())
        return value

    task.mean_loss = watched  # type: ignore[method-assign]


class Reads(TorchDispatchMode):
    """In the place of a CUDA graph: notes the memory that a captured step reads and has not made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, StorageWeakRef] = {}
        self.made: list[torch.Tensor] = []  # alive, so that no address is another's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = {tensor.untyped_storage()._cdata for tensor in self.made}
        for tensor in tensors_in((args, kwargs or {})):
            storage = tensor.untyped_storage()
            if storage._cdata not in mine:
                self.read.setdefault(storage._cdata, StorageWeakRef(storage))
        out = func(*args, **(kwargs or {}))
        self.made += tensors_in(out)
        return out

    def replay(self) -> None:
        assert not [reference for reference in self.read.values() if reference.expired()]


def capture_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("synchronize", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(timing, "_stream_of", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Reads)
    monkeypatch.setattr(timing, "capturing", lambda graph, stream: graph)
    monkeypatch.setattr(torch, "compile", lambda what, **given: what)


class Remembers(nn.Module):
    """Reads what the last call left, and leaves another tensor in its place: in a buffer, in an attribute and in a list."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))
        self.last, self.several = torch.zeros(()), [torch.zeros(())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        y: torch.Tensor = self.linear(x - self.mean) + self.last + self.several[0]
        self.last, self.several[0] = y.detach().mean(), y.detach().std()
        return y


@pytest.mark.parametrize("training", [True, False])
def test_what_a_forward_replaces_is_kept_for_the_graph(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the memory that the capture read, which the model has let go of by then."""
    capture_reads(monkeypatch)
    model, batches = Remembers(), [(torch.randn(16, 8), torch.randn(16)) for _ in range(2)]
    before = model.mean
    step = timing.whole_step(Task(model, batches, loss), training=training)
    assert model.mean is before
    gc.collect()
    step()
    del step


@pytest.mark.parametrize(("error", "raised"), [(torch.OutOfMemoryError("full"), torch.OutOfMemoryError), (RuntimeError("operation not permitted when stream is capturing"), timing.NotCapturedError)], ids=["memory", "host"])  # fmt: skip
def test_memory_that_is_full_says_nothing_about_a_step(error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A step that cannot be captured is tuned untimed; one that found no memory is not tuned at all."""
    capture_reads(monkeypatch)

    class Fails(nn.Linear):
        calls = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 5:  # after the warm-ups and the timed launches
                raise error
            return super().forward(input)

    batches = [(torch.randn(16, 8), torch.randn(16)) for _ in range(2)]
    with pytest.raises(raised):
        timing.whole_step(Task(Fails(8, 1), batches, loss), training=True)


@pytest.mark.parametrize("chains", [True, False], ids=["chains", "linears"])
def test_weights_of_a_served_model_are_kept_for_the_graph(chains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_reads(monkeypatch)
    model, batches = make(torch.device("cpu"), chains)
    loss(model(batches[0][0][0]), batches[0][1]).mean().backward()
    end_step(timing.converted_modules(model))
    loka.placing.freeze_model(model)
    step = timing.whole_step(Task(model, batches, loss), training=False)
    loka.revert(model)
    del model
    gc.collect()
    step()
    del step


@pytest.mark.gpu
@pytest.mark.parametrize("chains", [True, False], ids=["chains", "linears"])
def test_a_captured_step_quantises_its_weights(device: torch.device, chains: bool) -> None:
    """A weight that is changed between two replays changes what the second computes."""
    model, batches = make(device, chains)
    task = Task(model, batches, loss, autocast=torch.bfloat16)
    seen = torch.zeros((), device=device)
    write_losses(task, seen)
    step = timing.whole_step(task, training=True)
    step()
    first = float(seen)
    with torch.no_grad():
        for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
            linear.weight.mul_(0.25)
    step()
    assert abs(float(seen) - first) > 1e-4 * abs(first)


@pytest.mark.gpu
def test_a_captured_step_keeps_what_it_reads(device: torch.device) -> None:
    """A unit is timed after the next one was captured, which returns unused memory to the driver: nothing of the first may be in it."""
    fragment = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.Linear(64, 1)).to(device)
    batches = [((torch.randint(1000, (4096,), device=device),), torch.randn(4096, device=device)) for _ in range(2)]
    task = Task(fragment, batches, loss, autocast=torch.bfloat16)
    out = torch.full((), torch.nan, device=device)
    write_losses(task, out)
    step = timing.whole_step(task, training=True)
    step()
    expected, weight = float(out), weakref.ref(fragment[1].weight)
    fragment[1] = nn.Linear(64, 64, device=device)  # as a mod does it
    del fragment, batches, task
    gc.collect()
    torch.cuda.empty_cache()
    filler = [torch.full((1 << 18,), 2**40, dtype=torch.int64, device=device) for _ in range(8)]
    step()
    assert weight() is not None
    assert float(out) == pytest.approx(expected, rel=1e-6)
    del step, filler


def test_a_step_that_calls_parts_is_compiled_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling the model would change nothing: it is never called."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda what, **_: compiled.append(what) or what)
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    batches = [(torch.randn(2, 4), torch.zeros(2)) for _ in range(2)]

    def parts(model: nn.ModuleDict, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return loss(model["a"](batch[0]) + model["b"](batch[0]), batch[1])

    task = Task(model, batches, step=parts)
    timed, run = timing._compile(task, {})
    assert compiled == [parts]
    assert run is model
    assert timed.mean_loss(run, batches[0]).requires_grad
    timing._compile(Task(model["a"], batches, loss), {})
    timing._compile(Task(model["a"], batches, step=lambda model, batch: loss(model(batch[0]), batch[1])), {})
    assert compiled[1:] == [model["a"], model["a"]]


@pytest.mark.parametrize(("clock", "turns"), [([1.0], 5), ([1.0, 1.2], 15), ([1.0, 1.0, 1.2, 1.0, 1.0], 15)])
def test_turns_that_disagree_are_followed_by_more(
    clock: list[float], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clock`: how much slower the second run is, turn by turn."""
    speeds = itertools.cycle(clock)
    seen = {"bf16": 0, "loka": 0}
    monkeypatch.setattr(timing, "LONG", 0.0)  # one run per turn

    def replay(go, count: int) -> float:
        name = go()
        seen[name] += 1
        return 100.0 if name == "bf16" else 50.0 * (next(speeds) if seen[name] > 1 else 1.0)

    monkeypatch.setattr(timing, "_replay", replay)
    times = timing.time_in_turns({"bf16": lambda: "bf16", "loka": lambda: "loka"})
    assert {name: len(found) for name, found in times.items()} == {"bf16": turns, "loka": turns}
    found = timing.compare(times, "loka", "bf16")
    assert found.low <= found.value <= found.high
    assert found.high == 2.0
    assert found.low == (2.0 if clock.count(1.2) * 5 <= len(clock) else pytest.approx(100 / 60))
