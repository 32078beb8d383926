"""Run a function on several gloo ranks, each its own process, and hand back what each returned; a rank that fails fails the test with its traceback."""

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CHILD = """
import os, pickle, sys, traceback
from datetime import timedelta
import torch, torch.distributed as dist
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
module, name, rank, world, store, out = sys.argv[1:7]
arguments = pickle.load(open(out + ".in", "rb"))
dist.init_process_group("gloo", init_method="file://" + store, rank=int(rank), world_size=int(world), timeout=timedelta(seconds=120))
try:
    result = getattr(__import__(module, fromlist=[name]), name)(*arguments)
    torch.save(result, out + "." + rank)
    try:
        dist.barrier()  # so that nobody leaves while others still read
    except RuntimeError:
        pass  # a test of faults has left the group broken
finally:
    dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # gloo's threads may still be joined when a process ends, and abort it after all is done
"""


def on_ranks(
    world: int, module: str, name: str, *arguments: Any, dead: tuple[int, ...] = (), timeout: float = 180
) -> list[Any]:
    """`name` of `module` on every rank; results in the order of ranks. Ranks in `dead` must be killed on the way, and give None."""
    import torch

    tests = str(Path(__file__).parent.parent)
    with tempfile.TemporaryDirectory() as folder:
        store, out = f"{folder}/store", f"{folder}/out"
        Path(f"{out}.in").write_bytes(pickle.dumps(arguments))
        code = CHILD.format(tests=tests)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        children = [
            subprocess.Popen(
                [sys.executable, "-c", code, module, name, str(rank), str(world), store, out],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        outputs = [child.communicate(timeout=timeout)[0] for child in children]
        expected = [-9 if rank in dead else 0 for rank in range(world)]
        failed = [
            f"rank {rank} ended with {child.returncode}:\n{text[-3000:]}"
            for rank, (child, text) in enumerate(zip(children, outputs, strict=True))
            if child.returncode != expected[rank]
        ]
        assert not failed, "\n".join(failed)
        paths = [f"{out}.{rank}" for rank in range(world)]
        return [None if rank in dead else torch.load(path, weights_only=False) for rank, path in enumerate(paths)]
