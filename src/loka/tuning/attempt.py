"""Try what a kernel, the compiler or a graph capture may fail in: a unit that fails is left out, and tuning goes on."""

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def attempt(run: Callable[[], Result], *, raised: tuple[type[Exception], ...] = ()) -> Result | Exception:
    """Run a function and return its result, or the exception it raises, of whatever type: Triton's share none with torch's.

    Args:
        run: what to try.
        raised: exceptions that are raised all the same, besides those that tell nothing about what was tried: out of
            memory, and a failed GPU, on which nothing more can run in this process.
    """
    fatal: tuple[type[Exception], ...] = (torch.OutOfMemoryError, torch.AcceleratorError, *raised)
    try:
        return run()
    except fatal:
        raise
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # frees the tensors its frames hold
        return error


def spell_error(error: Exception) -> str:
    """Return the type and the text of an exception."""
    return f"{type(error).__name__}: {error}"
