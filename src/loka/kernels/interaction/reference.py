"""The law: the layer's equations, one after the other, with the mixtures rounded to the type of x as a GEMM leaves them."""

import torch
from torch import Tensor

from loka.formats import quantize
from loka.kernels.backend import YES, Verdict
from loka.kernels.fused_linear.call import NORMALIZED
from loka.kernels.interaction.call import NORM_BLOCK, NORM_EPS, Interacted, InteractionCall


def supports(call: InteractionCall, device: torch.device) -> Verdict:
    """Everything: this is emulation."""
    return YES


def _norm(x: Tensor) -> Tensor:
    """Blocks of 256 of the last dimension; the tail over its own width."""
    parts = [
        part * torch.rsqrt(part.square().mean(-1, keepdim=True) + NORM_EPS) for part in torch.split(x, NORM_BLOCK, -1)
    ]
    return torch.cat(parts, -1)


def run(x: Tensor, weight: Tensor, call: InteractionCall, scale: Tensor) -> Interacted:
    """Products for the tower, and the half of the next x that does not wait for it."""
    wide, rows = x.float(), weight.to(x.dtype).float()
    mixed = torch.matmul(rows, wide)
    linear, mixtures = mixed[:, : call.n_l], mixed[:, call.n_l : call.n_l + call.k].to(x.dtype).float()
    residual = mixed[:, call.n_l + call.k :] if call.project else wide
    products = _norm(torch.matmul(wide, mixtures.mT).flatten(1))
    following = x.new_empty(x.shape[0], call.n_f + call.n_l, call.d)
    following[:, call.n_f :] = _norm(linear + residual[:, call.n_f :]).to(x.dtype)
    kept = residual[:, : call.n_f].to(x.dtype) if call.project else x[:, : call.n_f]
    return Interacted(quantize(products, NORMALIZED, scale=scale), following, kept)


def finish(made: Interacted, tower: Tensor, call: InteractionCall) -> Tensor:
    """Norm of the tower's vectors and their residual, into the first half."""
    vectors = tower.reshape(-1, call.n_f, call.d).float()
    made.next[:, : call.n_f] = _norm(vectors + made.residual.float()).to(made.next.dtype)
    return made.next
