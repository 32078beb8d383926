"""The forward hook of a site: one `if` on most steps; on a sampled step it passes the operands to the site's watch.

It works in eager mode and inside a compiled graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from loka.lowp.chain import chain_of
from loka.nn.jagged import dense
from loka.nn.replacing import SEES_CHAINS
from loka.probe.loss import LossWatch
from loka.probe.seeing import NO_TICKET, Tap, probe_see
from loka.probe.watch import Watch


class Switch:
    """Whether the current step is sampled. A plain bool, because torch.compile guards on what a hook reads."""

    def __init__(self) -> None:
        self.on = False
        self.ungraded = True  # whether calls without gradients count; False once training has been seen


def make_hook(switch: Switch, watch: Watch, loss: LossWatch) -> Callable[..., Tensor | None]:
    """Make the forward hook of a site. It reads only constants besides the switch, so there are only two graphs."""
    adapter, sharded = watch.adapter, watch.sharded

    def read(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, right = adapter.operands(module, args, kwargs)
        weight = adapter.weight(module) if sharded and adapter.weight is not None else None
        return dense(output if adapter.kind == "lookup" else x), right, weight

    def look(x: Tensor, right: Tensor | None, weight: Tensor | None, output: Tensor) -> None:
        number = watch.see_forward(
            x, right, x.requires_grad, compute_dtype(x), weight=weight, graded=torch.is_grad_enabled(), call=loss.calls
        )
        if number != NO_TICKET and adapter.gradient and output.requires_grad:
            # A tensor hook, not a Tap: in eager mode an in-place op may follow, which a Function's output forbids.
            output.register_hook(lambda dy: watch.see_backward(number, dense(dy)))  # type: ignore[no-untyped-call]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if not (torch.is_grad_enabled() or switch.ungraded) or not switch.on:
            return None
        if chain_of(module) is not None:  # observed by the chain's tap instead
            return None
        if not torch.compiler.is_compiling():
            try:
                look(*read(module, args, kwargs, output), output)
            except Exception as error:  # an observer must not raise into a training loop
                watch.switch_off("looking at a call", error)
            return None
        x, right, weight = read(module, args, kwargs, output)
        graded = torch.is_grad_enabled()
        with torch.no_grad():  # not detach(), which would hide from the compiler that the GEMM does the same cast of x
            ticket = probe_see(
                watch.token, x.to(compute_dtype(x)), right, weight, watch.number, x.requires_grad, graded
            )
        tapped = graded and adapter.gradient and output.requires_grad
        return Tap.apply(output, ticket, watch.grad_token, watch.number) if tapped else None  # type: ignore[no-untyped-call]

    setattr(hook, SEES_CHAINS, True)
    return hook


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to which a GEMM casts its input: the autocast dtype if enabled."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
