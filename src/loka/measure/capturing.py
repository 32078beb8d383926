"""Capture a CUDA graph so that the process stays usable if that fails.

torch stops in the middle when a step cannot be captured, for instance because it reads a value from the device:

    stream      the current one stays that of the capture
    generator   in torch 2.11 it still believes that it is captured, and every later draw of a random number raises
    allocator   it goes on asking the graph, which is gone, where to put what is allocated

All three are put back here. A step that cannot be captured is then only timed or served otherwise.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def capturing(graph: Any, *, stream: Any = None, pool: Any = None) -> Iterator[None]:
    """Capture what runs in the block, as `torch.cuda.graph` does.

    Args:
        graph: a `torch.cuda.CUDAGraph`.
        stream: the stream to capture on; None: one of torch's.
        pool: memory that the graph shares with others; None: its own.

    Raises:
        Whatever the block or torch raises, after the process was put back.

    Example:
        >>> graph = torch.cuda.CUDAGraph()                                              # doctest: +SKIP
        >>> with capturing(graph):                                                      # doctest: +SKIP
        ...     y = model(x)
    """
    before = torch.cuda.current_stream()
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            yield
    except BaseException:
        _put_back(pool)
        torch.cuda.set_stream(before)
        raise


def _put_back(pool: Any) -> None:
    """End what a failed capture left begun; what has ended, or fails again on a broken device, is left alone."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # raised if the capture had ended, or never begun
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with suppress(RuntimeError):  # the end of any capture resets the generator
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            torch.zeros(1, device=torch.device("cuda", device))
