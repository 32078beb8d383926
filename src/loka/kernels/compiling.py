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


def run_overlapping(tasks: Sequence[Callable[[], T]], *, threads: int | None = None) -> Iterator[tuple[int, T]]:
    """Run tasks one at a time, in any order, and compile the Triton kernels that several of them need side by side.

    Args:
        tasks: functions that may be left at a launch and called again from the start.
        threads: how many kernels are compiled at the same time. None: one for each core, at most 16.

    Yields:
        The index of a task and what it returned, in the order in which tasks end. An error of a task is raised here.

    Example:
        >>> dict(run_overlapping([lambda: "a", lambda: "b"]))
        {0: 'a', 1: 'b'}
    """
    pool = ThreadPoolExecutor(threads or min(os.cpu_count() or 1, MOST), "compile-kernels")
    run = _Run(pool)
    pending: list[tuple[int, Future[Any] | None]] = [(index, None) for index in range(len(tasks))]
    try:
        while pending:
            place = next((at for at, (_, future) in enumerate(pending) if future is None or future.done()), None)
            if place is None:
                wait([future for _, future in pending if future is not None], return_when=FIRST_COMPLETED)
                continue
            index, _ = pending.pop(place)
            outer, _local.run = getattr(_local, "run", None), run
            try:
                result = tasks[index]()
            except PutOff as left:
                traceback.clear_frames(left.__traceback__)  # frees the tensors its frames hold
                pending.append((index, left.future))
                continue
            finally:
                _local.run = outer
            yield index, result
    finally:
        pool.shutdown(cancel_futures=True)
