"""Let modules share what they compute from one tensor, while the forward of the module that contains them is compiled.

A mixin of the containing module runs its forward through `run_sharing`. The modules inside keep a reference to a
`Shared` and use it only while it is open. After any in-place write everything is forgotten, since a shared tensor may
have changed; writes that only the compiler sees make what was shared before invalid. Eager calls share nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from loka.nn.writing import is_unwritten, stamp_versions, writes


def take_stamp() -> str:
    """Return a stamp for `is_valid`; in torch.compile, of the graph that is being made."""
    return stamp_versions() if torch.compiler.is_dynamo_compiling() else ""


def is_valid(stamp: str) -> bool:
    """Check that nothing was written to since a stamp was taken, as far as compiled code can tell.

    A function mode does not see every write there (`torch.relu_`, `torch._foreach_mul_`), and an example does not run every
    path: without this, what is shared could be older than the tensor it was computed from.
    """
    return not torch.compiler.is_dynamo_compiling() or is_unwritten(stamp)


_T = TypeVar("_T")
# What a mode has recorded: nothing, or the latest record and what was recorded before it. Not a list: where a graph breaks,
# torch.compile rebuilds a list that grew from its earlier entries, by their positions, after it has run the next graph.
# That graph's functions pass through the mode too, and a write among them may have emptied the list: an IndexError.
Recorded = tuple[()] | tuple[_T, Any]


def each(recorded: Recorded[_T]) -> list[_T]:
    """Return the records, the latest first."""
    found = []
    while recorded:
        latest, recorded = recorded
        found.append(latest)
    return found


class Shared:
    """What some modules share. Subclasses hold the tensors, and discard them in `forget`."""

    open = False  # whether the forward around the modules runs, compiled

    def begin(self) -> None:
        """Start sharing: the forward around the modules begins."""
        self.forget()
        self.open = True

    def end(self) -> None:
        """Stop sharing: the forward is over."""
        self.open = False
        self.forget()

    def forget(self) -> None:
        """Discard all tensors, which may have changed."""
        raise NotImplementedError(f"{type(self).__name__} does not say what to forget")

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Take note of a torch function that the forward has called and that wrote to no tensor."""


class Watch(TorchFunctionMode):
    """Shows every torch function to shared states, and lets them forget everything after an in-place write."""

    def __init__(self, shared: Sequence[Shared]) -> None:
        super().__init__()
        self.shared = shared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, then tell the shared states."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        written = writes(func, args, kwargs)
        for one in self.shared:
            if written:
                one.forget()
            else:
                one.see(func, args, kwargs, out)
        return out


def run_sharing(shared: Sequence[Shared], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the original forward of the module that contains `shared` states: sharing if it is being compiled."""
    if not torch.compiler.is_compiling():
        return forward(*args, **kwargs)
    for one in shared:
        one.begin()
    try:
        with Watch(shared):
            return forward(*args, **kwargs)
    finally:
        for one in shared:
            one.end()
