"""The calls of a kernel that the gate makes: where operands lie, what unused memory contains, and which thread calls.

    for number, round_, name in order_calls(sets):     each set in each of several rounds, in another order
        with fill_memory(round_, size, device):
            result = call_kernel(run, device, thread if round_.is_elsewhere(number) else None)

`loka.measure.gate` says what the rounds are for.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from loka.measure.arrangement import Place
from loka.measure.conformance import poisoned_allocations


@dataclass(frozen=True)
class Round:
    """Where the operands of a round are placed, and what unused memory contains."""

    place: Place
    leftover: float | None  # the content of freed memory
    poison: bool = False  # whether torch fills every allocation with NaN

    def at(self, number: int) -> "Round":
        """Return the round for one of its calls: every other shifted call uses slices instead."""
        return replace(self, place="slices") if self.place == "shifted" and number % 2 else self

    def is_elsewhere(self, number: int) -> bool:
        """Return True if one of its calls comes from another thread and stream."""
        return self.place != "fresh" and number % 5 == 4


FRESH, REUSED, MOVED = Round("fresh", math.nan), Round("reused", None, poison=True), Round("shifted", 1e4)


def order_calls(
    names: tuple[str, ...], *, reference: bool = False, moved: bool = True
) -> Iterator[tuple[int, Round, str]]:
    """Yield (number of the call, round, set) in the order of execution; each round begins with another set.

    Args:
        names: of the operand sets.
        reference: for the reference itself, two calls are enough.
        moved: also put operands at odd addresses and strides.
    """
    if reference:
        yield from ((number, FRESH, name) for number, name in enumerate(("spread", "extreme")))
        return
    last = MOVED if moved else FRESH
    rounds = (FRESH, REUSED, last) if len(names) > 8 else (FRESH, REUSED, last, REUSED, last)
    for turn, round_ in enumerate(rounds):
        for place, name in enumerate(names[5 * turn % len(names) :] + names[: 5 * turn % len(names)]):
            number = turn * len(names) + place
            yield number, round_.at(place // 2 + turn), name


def fill_memory(round_: Round, size: int, device: torch.device) -> AbstractContextManager[None]:
    """Fill the memory that the allocator hands out next as the round requires.

    Args:
        round_: of the call.
        size: elements of the result, in float32.
        device: where they lie.

    Returns:
        The context in which the kernel is to be called.
    """
    if round_.leftover is not None:
        blocks = [torch.full((max(size, 1),), round_.leftover, dtype=torch.float32, device=device) for _ in range(2)]
        del blocks
    return poisoned_allocations() if round_.poison else nullcontext()


def other_thread() -> ThreadPoolExecutor:
    """Return a new thread for such calls, of one judged kernel: what others left in their threads is not in it."""
    return ThreadPoolExecutor(1, "judge-elsewhere")


def call_kernel(run: Callable[[], Any], device: torch.device, elsewhere: ThreadPoolExecutor | None) -> Any:
    """Call a kernel.

    Args:
        run: calls it.
        device: the device that it runs on.
        elsewhere: the thread that calls it, on another stream; None for this one.

    Returns:
        What it returns.
    """
    if elsewhere is None:
        return run()
    here = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return elsewhere.submit(_run_after, here, run, device).result()


@torch.no_grad()
def _run_after(stream: torch.cuda.Stream | None, run: Callable[[], Any], device: torch.device) -> Any:
    """Call a kernel on another stream, after what is queued on one."""
    if stream is None:
        return run()
    own = _side_stream(device)
    own.wait_stream(stream)
    with torch.cuda.device(device), torch.cuda.stream(own):
        result = run()
    own.synchronize()
    return result


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of such calls, always the same: cuBLAS keeps a workspace of 32 MiB for every stream it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def describe_call(round_: Round, number: int, name: str, reason: str) -> str:
    """Say on which operands, and where, a call went wrong, and why."""
    places = {
        "reused": " in reused buffers, poisoned memory",
        "shifted": " at odd addresses",
        "slices": " with odd strides",
    }
    where = places.get(round_.place, "") + ", called from another thread" * round_.is_elsewhere(number)
    return f"on {name} operands{where}: {reason}"
