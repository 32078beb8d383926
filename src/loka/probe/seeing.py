"""How a probe sees inside a compiled model: two ops that a graph calls and cannot look into, and an identity that hands over gradients.

The hook of a site reads one plain bool. torch.compile guards on it, so a model has two graphs: without the probe, exactly as it was, and with it.
In the second, each site has

    loka::probe_see(x)            in the forward: returns a ticket, the number of this call
    Tap.apply(output, ticket)     the identity; its backward calls
    loka::probe_see_grad(dy, ticket)

The ops are plain Python when they run: they look up the site by its number, and return at once when it is not this site's turn. So staggering
sites over steps needs no further graph. They pretend to write to a token: a graph may otherwise drop or reorder what it thinks has no effect. The ticket
pairs a gradient with the rows of its own call, also for a module called twice.

What it costs: making a Probe lets torch.compile forget the graphs it has (`make_hooks_count`); graph breaks none; the operands of watched GEMMs exist in memory on sampled steps (a fused producer must write them), and the copy that
the identity asks for is fused away. CUDA graphs leave these ops out of the recording (they are tagged unsafe for it).
"""

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from loka.kernels.op import fake_of, torch_op


class Seer(Protocol):
    """What a graph shows its tensors to: the watch of a site, or that of the model's output."""

    def see_forward(
        self, x: Tensor, right: Tensor | None, needs_dgrad: bool, *, weight: Tensor | None, graded: bool
    ) -> int:
        """The operands of one call; returns a ticket."""

    def see_backward(self, ticket: int, dy: Tensor) -> None:
        """The gradient of the call with this ticket."""


_NUMBERS = itertools.count()
_WATCHES: "weakref.WeakValueDictionary[int, Seer]" = weakref.WeakValueDictionary()
_TAGS = (torch._C.Tag.cudagraph_unsafe,) if hasattr(torch._C.Tag, "cudagraph_unsafe") else ()
NO_TICKET = -1


def enroll(watch: Seer) -> int:
    """A number under which graphs find the watch; a watch that is gone is not seen for."""
    number = next(_NUMBERS)
    _WATCHES[number] = watch
    return number


def make_hooks_count() -> None:
    """Have torch.compile notice hooks. By default a graph made for a module without them also serves when there are some, even for another
    module of the same class: a probe would see nothing, without a word. So graphs made so far are forgotten, and new ones check for hooks."""
    import torch._dynamo  # slow to import, and only needed here

    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.reset()


def inside_backward() -> bool:
    """Whether autograd is running: a forward then is the recomputation of a checkpoint."""
    return bool(torch._C._current_graph_task_id() != -1)


@torch_op("probe_see", mutates=("token",), tags=_TAGS)
def probe_see(
    token: Tensor, x: Tensor, right: Tensor | None, weight: Tensor | None, site: int, needs_dgrad: bool, graded: bool
) -> Tensor:
    """Show the operands of one call; the ticket is an int64 on the CPU. `graded`: whether gradients were being recorded."""
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
    """Show the gradient of the output of the call with this ticket."""
    watch = _WATCHES.get(site)
    if watch is not None:
        watch.see_backward(int(ticket), dy)


@fake_of(probe_see_grad)
def _(token: Tensor, dy: Tensor, ticket: Tensor, site: int) -> None:
    return None


class Tap(torch.autograd.Function):
    """The identity; its gradient passes by the probe."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, ticket: Tensor, token: Tensor, site: int) -> Tensor:
        """A copy for the graph, which no kernel makes: a result that aliases an input lost gradients under torch 2.11."""
        ctx.save_for_backward(ticket, token)
        ctx.site = site
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Show it, hand it on."""
        (dy,) = grads
        ticket, token = ctx.saved_tensors
        probe_see_grad(token, dy, ticket, ctx.site)
        return dy, None, None, None
