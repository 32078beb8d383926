"""Run in a process of its own, as `noted_launches` is: Triton compiles for Hopper the kernels that several tasks launch first."""

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    import triton
    from noted_launches import Notes, build, make_driver  # beside this file
    from triton.backends.nvidia import driver as nvidia

    notes = Notes(build(folder, Path(nvidia.__file__).parent / "include"))
    triton.runtime.driver.set_active(make_driver())
    import torch
    from launched_kernels import add, scale

    from loka.kernels import triton_bound, triton_compiled, triton_launcher
    from loka.kernels.compiling import run_overlapping

    triton_launcher._current_device = triton_bound._current_device = lambda: 0
    compiled: list[tuple[str, str]] = []
    compile_plainly = triton.runtime.jit.JITFunction._do_compile

    def compile_watched(self: Any, *args: Any, **options: Any) -> Any:
        compiled.append((self.__name__, threading.current_thread().name))
        return compile_plainly(self, *args, **options)

    triton.runtime.jit.JITFunction._do_compile = compile_watched
    notes.expect([])
    store = torch.zeros(1 << 12)
    add, scale = triton_launcher.quick(add), triton_launcher.quick(scale)
    halves = triton_bound.bind(scale, (5,), 7, 0.25, 64, views={0: torch.float16}, num_warps=1)
    begun: list[int] = []

    def run(task: int, shift: int, block: list[int]) -> int:
        """Two kernels, of which the second depends on an address."""
        begun.append(task)
        x = store.as_strided((32, 32), (32, 1))
        described = triton_compiled.describe(x, block)
        add[(3, 2)](described, store, described, None, 48, 0.5, *block, num_warps=4)
        scale[(5,)](store[shift:], store, 7, 0.25, 64, num_warps=1)
        return shift

    def run_bound() -> int:
        begun.append(3)
        halves(store, store)
        return -1

    tasks = [partial(run, 0, 0, [16, 16]), partial(run, 1, 1, [16, 16]), partial(run, 2, 0, [32, 16]), run_bound]
    assert dict(run_overlapping(tasks, threads=2)) == {0: 0, 1: 1, 2: 0, 3: -1}
    # `add` with two blocks; `scale` at an aligned address, at an odd one and of a float16 view: each once, by the pool
    assert sorted(name for name, _ in compiled) == ["add"] * 2 + ["scale"] * 3, compiled
    assert all(thread.startswith("compile-kernels") for _, thread in compiled), compiled
    assert begun[:4] == [0, 1, 2, 3], begun  # none waited for another's kernel
    assert len(begun) <= 4 + 3 + 3 + 1, begun  # and each began again only for a kernel that was missing
    del compiled[:], begun[:]
    assert sorted(run_overlapping(tasks)) == [(0, 0), (1, 1), (2, 0), (3, -1)]
    assert (compiled, begun) == ([], [0, 1, 2, 3])
    print("together")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
