"""Functions for test_isolation to run in a child process."""

import os
import signal
import sys
import time


def double(x: int) -> int:
    return 2 * x


def misbehave(how: str) -> str:
    """Answer, or fail in the way asked for."""
    if how == "raise":
        raise ValueError("the code under test said no")
    if how == "abort":
        print("assertion failed: smem_size <= limit", file=sys.stderr, flush=True)
        os.abort()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(3)
    if how == "hang":
        time.sleep(60)
    if how == "poison":
        _poison_cuda()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if how == "poison late":
        _poison_cuda()
    return f"survived {how}"


def _poison_cuda() -> None:
    """Make torch.cuda look like a context after a fault: in use, and failing at every synchronisation."""
    import torch

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = fail
