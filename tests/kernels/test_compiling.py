"""Tasks overlap the compilations of their kernels: what a stand-in for a launch sees. `test_triton_launcher` has real ones."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from loka.kernels.compiling import await_kernel, run_overlapping


class Kernels:
    """Kernels that are compiled when they are first launched; `slow` ones as long as `finish` is not called."""

    def __init__(self, slow: set[str] = frozenset(), broken: set[str] = frozenset()) -> None:
        self.slow, self.broken = slow, broken
        self.compiled: list[str] = []
        self.launched: list[str] = []
        self._may_end = threading.Event()

    def compile(self, name: str) -> None:
        if name in self.slow:
            assert self._may_end.wait(30)
        if name in self.broken:
            raise RuntimeError(f"{name} cannot be compiled")
        self.compiled.append(name)

    def finish(self) -> None:
        self._may_end.set()

    def launch(self, name: str) -> None:
        if name not in self.compiled:
            await_kernel(name, partial(self.compile, name))
        if name not in self.compiled:
            self.compile(name)
        self.launched.append(name)


def launching(kernels: Kernels, *names: str) -> Callable[[], str]:
    def task() -> str:
        for name in names:
            kernels.launch(name)
        return " ".join(names)

    return task


def test_a_task_whose_kernel_is_being_compiled_lets_the_others_go_first() -> None:
    kernels = Kernels(slow={"a"})
    tasks = [launching(kernels, "a"), launching(kernels, "b"), launching(kernels, "b", "c")]
    ended = run_overlapping(tasks, threads=2)
    assert {next(ended), next(ended)} == {(1, "b"), (2, "b c")}
    kernels.finish()
    assert list(ended) == [(0, "a")]
    assert sorted(kernels.compiled) == ["a", "b", "c"]  # each once


def test_kernels_are_compiled_side_by_side() -> None:
    meeting = threading.Barrier(3, timeout=30)  # broken unless three compile at the same time

    def task(name: str) -> None:
        await_kernel(name, meeting.wait)

    assert len(list(run_overlapping([partial(task, name) for name in "abc"], threads=3))) == 3
    assert not meeting.broken


def test_what_is_needed_later_runs_while_all_tasks_wait() -> None:
    kernels = Kernels(slow={"a", "z"})
    order: list[str] = []

    def later(name: str) -> None:
        kernels.launch(name)
        order.append(name)

    def broken() -> None:
        raise ValueError("for whoever runs it then")

    def last() -> None:  # runs when everything else waits or has run
        order.append("last")
        kernels.finish()

    first = partial(later, "b")
    meanwhile = [first, broken, partial(later, "z"), last]
    kept = meanwhile[1:3]
    assert list(run_overlapping([launching(kernels, "a")], threads=3, meanwhile=meanwhile)) == [(0, "a")]
    assert order[:2] in (["b", "last"], ["last", "b"])
    assert broken in meanwhile
    assert first not in meanwhile
    assert last not in meanwhile
    assert set(meanwhile) <= set(kept)  # "z" may have run before "a" ended


def test_nothing_runs_meanwhile_if_no_task_waits() -> None:
    meanwhile = [lambda: pytest.fail("it was not to run")]
    assert list(run_overlapping([lambda: "a", lambda: "b"], meanwhile=meanwhile)) == [(0, "a"), (1, "b")]
    assert len(meanwhile) == 1


def test_nothing_is_launched_before_it_is_compiled() -> None:
    kernels = Kernels()
    dict(run_overlapping([launching(kernels, name, "last") for name in "abcdef"], threads=3))
    assert sorted(set(kernels.launched)) == [*"abcdef", "last"]
    assert len(kernels.compiled) == len(set(kernels.compiled))


def test_a_task_is_not_stopped_from_leaving_by_what_it_catches() -> None:
    kernels = Kernels(slow={"a"})

    def careful() -> str:
        try:
            with ThreadPoolExecutor(1) as pool:  # as the gate calls from another thread
                pool.submit(kernels.launch, "b").result()
            kernels.launch("a")
        except Exception as error:
            return f"caught {error}"
        return "launched"

    ended = run_overlapping([careful, kernels.finish])
    assert next(ended) == (1, None)
    assert next(ended) == (0, "launched")


@torch.library.custom_op("loka_tests::launch_compiled", mutates_args=())
def _op(x: torch.Tensor) -> torch.Tensor:
    _op.kernels.launch("a")  # type: ignore[attr-defined]
    return x.clone()


def test_a_task_leaves_through_an_op_of_torch_and_autograd_undone() -> None:
    _op.kernels = kernels = Kernels(slow={"a"})  # type: ignore[attr-defined]

    def task() -> torch.Tensor:
        with torch.no_grad():
            return _op(torch.ones(2))

    ended = run_overlapping([task, kernels.finish])
    assert next(ended)[0] == 1
    assert torch.is_grad_enabled()
    assert torch.equal(next(ended)[1], torch.ones(2))


def test_a_kernel_that_cannot_be_compiled_fails_the_task_that_launches_it() -> None:
    kernels = Kernels(broken={"a"})

    def judged(name: str) -> str:
        try:
            kernels.launch(name)
        except RuntimeError as error:
            return str(error)
        return "fine"

    assert dict(run_overlapping([partial(judged, "a"), partial(judged, "b")])) == {0: "a cannot be compiled", 1: "fine"}
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        list(run_overlapping([partial(kernels.launch, "a")]))


def test_other_threads_and_other_code_launch_as_always() -> None:
    kernels, seen = Kernels(slow={"a"}), []

    def task() -> None:
        other = threading.Thread(target=lambda: seen.append(launching(kernels, "b")()))
        other.start()
        other.join()
        kernels.launch("a")

    ended = run_overlapping([task, kernels.finish])
    next(ended)
    launching(kernels, "c")()  # between two tasks
    list(ended)
    assert set(seen) == {"b"}
    assert kernels.compiled == ["b", "c", "a"]


def test_no_compilation_outlives_an_error() -> None:
    running = []

    def compile_slowly() -> None:
        running.append(True)
        time.sleep(0.05)
        running.clear()

    def failing() -> None:
        raise ValueError("of a task")

    with pytest.raises(ValueError, match="of a task"):
        list(run_overlapping([partial(await_kernel, "a", compile_slowly), failing]))
    assert not running


def test_no_tasks() -> None:
    assert list(run_overlapping([])) == []
