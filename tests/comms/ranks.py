"""Run a function on several gloo ranks, each its own process, and hand back what each returned; a rank that fails fails the test with its traceback."""

import contextlib
import importlib
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from forked import finish, start

TESTS = str(Path(__file__).parent.parent)


def on_ranks(
    world: int, module: str, name: str, *arguments: Any, dead: tuple[int, ...] = (), timeout: float = 180
) -> list[Any]:
    """`name` of `module` on every rank; results in the order of ranks. Ranks in `dead` must be killed on the way, and give None."""
    with tempfile.TemporaryDirectory() as folder:
        out, said = f"{folder}/out", [Path(folder) / f"said.{rank}" for rank in range(world)]
        children = [
            start(_run_rank, module, name, rank, world, f"{folder}/store", out, arguments, said=said[rank], environment={"OMP_NUM_THREADS": "1"})
            for rank in range(world)
        ]  # fmt: skip
        codes = [finish(child, timeout) for child in children]
        failed = [
            f"rank {rank} ended with {code}:\n{said[rank].read_text()[-3000:]}"
            for rank, code in enumerate(codes)
            if code != (-9 if rank in dead else 0)
        ]
        assert not failed, "\n".join(failed)
        return [None if rank in dead else torch.load(f"{out}.{rank}", weights_only=False) for rank in range(world)]


def _run_rank(module: str, name: str, rank: int, world: int, store: str, out: str, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if TESTS not in sys.path:
        sys.path.insert(0, TESTS)
    wait = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait)
    try:
        torch.save(getattr(importlib.import_module(module), name)(*arguments), f"{out}.{rank}")
        with contextlib.suppress(RuntimeError):  # a test of faults has left the group broken
            dist.barrier()  # so that nobody leaves while others still read
    finally:
        dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still be joined when a process ends, and abort it after all is done
