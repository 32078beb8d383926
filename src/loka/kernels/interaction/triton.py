"""Triton interaction for Hopper: a program loads x [n, d] of an example once for all products. See `triton_kernels`."""

import torch
from torch import Tensor

from loka.formats import QTensor
from loka.kernels.backend import YES, Verdict, no
from loka.kernels.fused_linear.call import NORMALIZED
from loka.kernels.interaction.call import Interacted, InteractionCall
from loka.kernels.op import invoke
from loka.kernels.triton_device import triton_runs_on

# up to these, x, three weights and the products of one example fit into a program
LARGEST_N, LARGEST_D, LARGEST_ROWS = 128, 128, 64


def supports(call: InteractionCall, device: torch.device) -> Verdict:
    """Accept 16-bit x if one example fits into a program."""
    possible = fits(call)
    return triton_runs_on(device) if possible else possible


def fits(call: InteractionCall) -> Verdict:
    """Check the call regardless of the device, for plans made on another machine."""
    if call.dtype not in (torch.bfloat16, torch.float16):
        return no(f"reads bf16 and fp16, not {call.dtype}")
    if call.n > LARGEST_N or call.d > LARGEST_D:
        return no(f"holds at most {LARGEST_N} vectors of width {LARGEST_D} per example, not {call.n} of {call.d}")
    if max(call.k, call.n_l, call.n_f) > LARGEST_ROWS:
        return no(f"holds at most {LARGEST_ROWS} mixtures of a kind, not k={call.k}, n_l={call.n_l}, n_f={call.n_f}")
    if call.d % 16 or call.n % 16:
        return no(f"n and d must be multiples of 16, not {call.n} and {call.d}")
    return YES


def run(x: Tensor, weight: Tensor, call: InteractionCall, scale: Tensor, *, keep: bool = False) -> Interacted:
    """See `loka.kernels.interaction.interact`."""
    from loka.kernels.interaction import triton_ops

    x = x.contiguous()
    q, following, residual, rstd = invoke(
        triton_ops.interact, x, weight.to(x.dtype).contiguous(), scale, call.k, call.n_l, call.n_f, call.project, keep
    )
    kept = residual if call.project else x[:, : call.n_f]
    return Interacted(QTensor(q, scale, NORMALIZED), following, kept, rstd)


def finish(made: Interacted, tower: Tensor, call: InteractionCall) -> Tensor:
    """See `loka.kernels.interaction.finish`."""
    from loka.kernels.interaction import triton_ops

    invoke(triton_ops.finish, made.next, tower.contiguous(), made.residual, made.rstd, call.n_f)
    return made.next


def norm_gradient(g: Tensor, following: Tensor, rstd: Tensor) -> Tensor:
    """See `loka.kernels.interaction.norm_gradient`."""
    from loka.kernels.interaction import triton_ops

    result: Tensor = invoke(triton_ops.norm_gradient, g.contiguous(), following, rstd)
    return result


def gradient(x: Tensor, weight: Tensor, dq: Tensor, ds: Tensor, call: InteractionCall) -> tuple[Tensor, Tensor]:
    """See `loka.kernels.interaction.interact_gradient`."""
    from loka.kernels.interaction import triton_ops

    operands = x, weight.to(x.dtype).contiguous(), dq.contiguous(), ds
    dx, dw = invoke(triton_ops.interact_gradient, *operands, call.k, call.n_l, call.n_f, call.project)
    return dx, dw
