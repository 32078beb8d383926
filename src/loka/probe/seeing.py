"""Observing a compiled model: two opaque custom ops called by the graph, and an identity that captures gradients.

The hook of a site reads one plain bool. torch.compile guards on it, so a model has two graphs: one without the probe,
identical to the original, and one with it. In the latter, each site has

    loka::probe_see(x)            in the forward: returns a ticket, the number of this call
    Tap.apply(output, ticket)     the identity; its backward calls
    loka::probe_see_grad(dy, ticket)

At run time the ops are plain Python: they look up the site by its number and return at once if it is not due on this
step, so staggering sites over steps needs no further graphs. They are declared to mutate a token, because a graph may
drop or reorder ops without side effects. The ticket pairs a gradient with the rows of its own call, also for a module
that is called twice.

Cost: creating a Probe resets torch.compile (`make_hooks_count`). There are no graph breaks. On sampled steps the
operands of observed GEMMs are materialized (a fused producer must write them); the copy in the identity is fused away.
CUDA graphs exclude these ops from capture, because they are tagged `cudagraph_unsafe`.
"""

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from loka.kernels.op import fake_of, torch_op


class Seer(Protocol):
    """Receives tensors from a graph: the watch of a site, of a chain, or of the model's output."""

    def see_forward(
        self, x: Tensor, right: Tensor | None, needs_dgrad: bool, *, weight: Tensor | None, graded: bool
    ) -> int:
        """Receive the operands of one call; returns a ticket."""

    def see_backward(self, ticket: int, dy: Tensor) -> None:
        """Receive the gradient of the call with this ticket."""


_NUMBERS = itertools.count()
_WATCHES: "weakref.WeakValueDictionary[int, Seer]" = weakref.WeakValueDictionary()
_TAGS = (torch._C.Tag.cudagraph_unsafe,) if hasattr(torch._C.Tag, "cudagraph_unsafe") else ()
NO_TICKET = -1


def enroll(watch: Seer) -> int:
    """Register a watch (weakly) and return the number under which graphs find it."""
    number = next(_NUMBERS)
    _WATCHES[number] = watch
    return number


def make_hooks_count() -> None:
    """Make torch.compile guard on hooks, and reset it.

    By default, a graph compiled for a module without hooks is reused after hooks are added, even for another module of
    the same class. A probe would then silently observe nothing.
    """
    import torch._dynamo  # slow to import, and only needed here

    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.reset()


def inside_backward() -> bool:
    """Return whether autograd is running; a forward pass inside it is the recomputation of a checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)


@torch_op("probe_see", mutates=("token",), tags=_TAGS)
def probe_see(
    token: Tensor, x: Tensor, right: Tensor | None, weight: Tensor | None, site: int, needs_dgrad: bool, graded: bool
) -> Tensor:
    """Pass the operands of one call to its watch; returns the ticket, int64 on the CPU. `graded`: is grad enabled."""
    watch = _WATCHES.get(site)
    ticket = NO_TICKET if watch is None else watch.see_forward(x, right, needs_dgrad, weight=weight, graded=graded)
    return torch.tensor(ticket)


@fake_of(probe_see)
def _(
    token: Tensor, x: Tensor, right: Tensor | None, weight: Tensor | None, site: int, needs_dgrad: bool, graded: bool
) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch_op("probe_see_grad", mutates=("token",), tags=_TAGS)
def probe_see_grad(token: Tensor, dy: Tensor, ticket: Tensor, site: int) -> None:
    """Pass the gradient of the output of the call with this ticket to its watch."""
    watch = _WATCHES.get(site)
    if watch is not None:
        watch.see_backward(int(ticket), dy)


@fake_of(probe_see_grad)
def _(token: Tensor, dy: Tensor, ticket: Tensor, site: int) -> None:
    return None


class Tap(torch.autograd.Function):
    """Identity whose backward passes the gradient to the probe."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, ticket: Tensor, token: Tensor, site: int) -> Tensor:
        """Clone: an output that aliases an input lost gradients under torch 2.11. The compiler fuses the copy away."""
        ctx.save_for_backward(ticket, token)
        ctx.site = site
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Pass dy to the probe and return it unchanged."""
        (dy,) = grads
        ticket, token = ctx.saved_tensors
        probe_see_grad(token, dy, ticket, ctx.site)
        return dy, None, None, None
