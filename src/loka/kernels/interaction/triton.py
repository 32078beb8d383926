"""The interaction on Hopper: one program per example holds its x [n, d] and multiplies it with everything that needs it."""

import torch
from torch import Tensor

from loka.formats import QTensor
from loka.kernels.backend import YES, Verdict, no
from loka.kernels.fused_linear.call import NORMALIZED
from loka.kernels.interaction.call import Interacted, InteractionCall
from loka.kernels.op import invoke
from loka.kernels.triton_device import triton_runs_on

LARGEST_N, LARGEST_D, LARGEST_ROWS = 128, 128, 64  # x, three weights and the products of one example fit into a program


def supports(call: InteractionCall, device: torch.device) -> Verdict:
    """16-bit x whose one example fits into a program."""
    possible = fits(call)
    return triton_runs_on(device) if possible else possible


def fits(call: InteractionCall) -> Verdict:
    """The same, whatever the machine: for plans made elsewhere."""
    if call.dtype not in (torch.bfloat16, torch.float16):
        return no(f"reads bf16 and fp16, not {call.dtype}")
    if call.n > LARGEST_N or call.d > LARGEST_D:
        return no(f"holds at most {LARGEST_N} vectors of width {LARGEST_D} per example, not {call.n} of {call.d}")
    if max(call.k, call.n_l, call.n_f) > LARGEST_ROWS:
        return no(f"holds at most {LARGEST_ROWS} mixtures of a kind, not k={call.k}, n_l={call.n_l}, n_f={call.n_f}")
    if call.d % 16 or call.n % 16:
        return no(f"n and d are multiples of 16, not {call.n} and {call.d}")
    return YES


def run(x: Tensor, weight: Tensor, call: InteractionCall, scale: Tensor, *, keep: bool = False) -> Interacted:
    """One kernel."""
    from loka.kernels.interaction import triton_ops

    x = x.contiguous()
    q, following, residual, rstd = invoke(
        triton_ops.interact, x, weight.to(x.dtype).contiguous(), scale, call.k, call.n_l, call.n_f, call.project, keep
    )
    kept = residual if call.project else x[:, : call.n_f]
    return Interacted(QTensor(q, scale, NORMALIZED), following, kept, rstd)


def finish(made: Interacted, tower: Tensor, call: InteractionCall) -> Tensor:
    """One kernel, into the half that is missing."""
    from loka.kernels.interaction import triton_ops

    invoke(triton_ops.finish, made.next, tower.contiguous(), made.residual, made.rstd, call.n_f)
    return made.next


def norm_gradient(g: Tensor, following: Tensor, rstd: Tensor) -> Tensor:
    """One kernel."""
    from loka.kernels.interaction import triton_ops

    result: Tensor = invoke(triton_ops.norm_gradient, g.contiguous(), following, rstd)
    return result


def gradient(x: Tensor, weight: Tensor, dq: Tensor, ds: Tensor, call: InteractionCall) -> tuple[Tensor, Tensor]:
    """One kernel, and the sum of its parts of dW."""
    from loka.kernels.interaction import triton_ops

    operands = x, weight.to(x.dtype).contiguous(), dq.contiguous(), ds
    dx, dw = invoke(triton_ops.interact_gradient, *operands, call.k, call.n_l, call.n_f, call.project)
    return dx, dw
