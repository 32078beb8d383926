"""Run tasks that launch Triton kernels for the first time, compiling the kernels of several tasks at the same time.

    for index, verdict in run_overlapping([partial(judge, call) for call in calls]): ...

A kernel takes about a second to compile, nearly all of it outside of Python. A program that launches a hundred new
kernels one after the other uses one core for two minutes while the others idle. Here a task that reaches a kernel which
is not compiled is put off: the kernel is compiled by another thread, the next task begins, and the first one starts
again when its kernel is ready. Nothing is launched before it is compiled, so no task sees a result that is not real.

Tasks run one at a time, in the calling thread. What a task launches from other threads (backward of CUDA tensors runs
in one of autograd's) is compiled where it is launched, as always.
"""

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

T = TypeVar("T")
MOST = 16  # threads; a compilation takes a few hundred MB of host memory

_local = threading.local()  # .run: the _Run of this thread while one of its tasks runs


class PutOff(BaseException):
    """Leaves a task that needs a kernel which is being compiled.

    Not an Exception: tasks catch those to find out what a kernel does wrong.
    """

    def __init__(self, future: "Future[Any]") -> None:
        super().__init__("a kernel is being compiled; the task starts again when it is ready")
        self.future = future


_Pending = tuple[int, Callable[[], Any], "Future[Any] | None"]  # index, task, the kernel that it waits for


class _Run:
    """The kernels of one `run_overlapping`: each is compiled once, whichever tasks need it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._futures: dict[Any, Future[Any]] = {}

    def await_kernel(self, key: Any, compile_kernel: Callable[[], Any]) -> None:
        future = self._futures.get(key)
        if future is None:
            future = self._futures[key] = self._pool.submit(compile_kernel)
        if not future.done():
            raise PutOff(future)
        # If it failed, the launch that follows compiles it again and raises the error where it belongs.

    def attempt(self, task: Callable[[], T]) -> T | PutOff:
        """Call a task. Return what it returned, or how it was put off."""
        outer, _local.run = getattr(_local, "run", None), self
        try:
            return task()
        except PutOff as left:
            traceback.clear_frames(left.__traceback__)  # frees the tensors its frames hold
            return left
        finally:
            _local.run = outer


def await_kernel(key: Any, compile_kernel: Callable[[], Any]) -> None:
    """Before a kernel is launched that may not be compiled: put the current task off until it is.

    Without a `run_overlapping` in this thread nothing happens: the launch compiles the kernel.

    Args:
        key: what the compiled kernel depends on.
        compile_kernel: compiles it without launching it. Called in another thread, once for equal keys.
    """
    run: _Run | None = getattr(_local, "run", None)
    if run is not None:
        run.await_kernel(key, compile_kernel)


def run_overlapping(
    tasks: Sequence[Callable[[], T]], *, threads: int | None = None, meanwhile: list[Callable[[], Any]] | None = None
) -> Iterator[tuple[int, T]]:
    """Run tasks one at a time, in any order, and compile the Triton kernels that several of them need side by side.

    Args:
        tasks: functions that may be left at a launch and called again from the start.
        threads: how many kernels are compiled at the same time. None: one for each core, at most 16.
        meanwhile: what to run while all tasks wait for kernels, needed later. What has run is taken from the list. What
            raises an error stays, for whoever runs it then.

    Yields:
        The index of a task and what it returned, in the order in which tasks end. An error of a task is raised here.

    Example:
        >>> dict(run_overlapping([lambda: "a", lambda: "b"]))
        {0: 'a', 1: 'b'}
    """
    pool = ThreadPoolExecutor(threads or min(os.cpu_count() or 1, MOST), "compile-kernels")
    run = _Run(pool)
    pending: list[_Pending] = [(index, task, None) for index, task in enumerate(tasks)]
    fillers: list[_Pending] = [(-1, task, None) for task in meanwhile or ()]
    try:
        while pending:
            if (task := _take_ready(pending)) is not None:
                index, result = task[0], run.attempt(task[1])
                if isinstance(result, PutOff):
                    pending.append((index, task[1], result.future))
                else:
                    yield index, result
            elif meanwhile is not None and (task := _take_ready(fillers)) is not None:
                try:
                    result = run.attempt(task[1])
                except Exception as error:
                    traceback.clear_frames(error.__traceback__)
                    continue
                if isinstance(result, PutOff):
                    fillers.append((-1, task[1], result.future))
                else:
                    meanwhile.remove(task[1])
            else:
                wait([future for _, _, future in pending + fillers if future is not None], return_when=FIRST_COMPLETED)
    finally:
        pool.shutdown(cancel_futures=True)


def _take_ready(pending: list[_Pending]) -> _Pending | None:
    """Take the first task that waits for no kernel."""
    place = next((at for at, (_, _, future) in enumerate(pending) if future is None or future.done()), None)
    return None if place is None else pending.pop(place)
