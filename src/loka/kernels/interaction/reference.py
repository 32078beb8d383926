"""The reference: the layer's equations one by one, with mixtures rounded to x's dtype, as a GEMM would."""

import torch
from torch import Tensor

from loka.formats import quantize
from loka.kernels.backend import accept_every_call
from loka.kernels.fused_linear.call import NORM_BLOCK, NORMALIZED, norm_eps
from loka.kernels.interaction.call import Interacted, InteractionCall

supports = accept_every_call


def _norm(x: Tensor) -> Tensor:
    """Apply BlockNorm to blocks of 256 of the last dimension; the last block is normalized over its own width."""
    parts = [
        part * torch.rsqrt(part.square().mean(-1, keepdim=True) + norm_eps()) for part in torch.split(x, NORM_BLOCK, -1)
    ]
    return torch.cat(parts, -1)


def _rstd(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1) + norm_eps())


def run(x: Tensor, weight: Tensor, call: InteractionCall, scale: Tensor, *, keep: bool = False) -> Interacted:
    """See `loka.kernels.interaction.interact`."""
    wide, rows = x.float(), weight.to(x.dtype).float()
    mixed = torch.matmul(rows, wide)
    linear, mixtures = mixed[:, : call.n_l], mixed[:, call.n_l : call.n_l + call.k].to(x.dtype).float()
    residual = mixed[:, call.n_l + call.k :] if call.project else wide
    products = _norm(torch.matmul(wide, mixtures.mT).flatten(1))
    following = x.new_empty(x.shape[0], call.n_f + call.n_l, call.d)
    summed = linear + residual[:, call.n_f :]
    following[:, call.n_f :] = (summed * _rstd(summed)[..., None]).to(x.dtype)
    rstd = wide.new_empty((x.shape[0], call.n_f + call.n_l) if keep else (0,))
    if keep:
        rstd[:, call.n_f :] = _rstd(summed)
    kept = residual[:, : call.n_f].to(x.dtype) if call.project else x[:, : call.n_f]
    return Interacted(quantize(products, NORMALIZED, scale=scale), following, kept, rstd)


def finish(made: Interacted, tower: Tensor, call: InteractionCall) -> Tensor:
    """See `loka.kernels.interaction.finish`."""
    summed = tower.reshape(-1, call.n_f, call.d).float() + made.residual.float()
    made.next[:, : call.n_f] = (summed * _rstd(summed)[..., None]).to(made.next.dtype)
    if made.rstd.numel():
        made.rstd[:, : call.n_f] = _rstd(summed)
    return made.next


def norm_gradient(g: Tensor, following: Tensor, rstd: Tensor) -> Tensor:
    """Compute dS = rstd (g - N mean(g N)) with N = S rstd, the next x."""
    g, n = g.float(), following.float()
    return (rstd[..., None] * (g - n * (g * n).mean(-1, keepdim=True))).to(following.dtype)


def gradient(x: Tensor, weight: Tensor, dq: Tensor, ds: Tensor, call: InteractionCall) -> tuple[Tensor, Tensor]:
    """See `loka.kernels.interaction.interact_gradient`."""
    wide, rows = x.float(), weight.to(x.dtype).float()
    w_l, w_k, w_r = rows[: call.n_l], rows[call.n_l : call.n_l + call.k], rows[call.n_l + call.k :]
    mixtures = torch.matmul(w_k, wide).to(x.dtype).float()
    flat = torch.matmul(wide, mixtures.mT).flatten(1)
    parts = []
    for p, d in zip(torch.split(flat, NORM_BLOCK, 1), torch.split(dq.float(), NORM_BLOCK, 1), strict=True):
        rstd = torch.rsqrt(p.square().mean(1, keepdim=True) + norm_eps())
        z = p * rstd
        parts.append(rstd * (d - z * (d * z).mean(1, keepdim=True)))
    dp = torch.cat(parts, 1).view(-1, call.n, call.k).to(x.dtype).float()
    dy = torch.matmul(dp.mT, wide).to(x.dtype).float()
    sums = ds.float()
    linear = sums[:, call.n_f :]
    dx = torch.matmul(dp, mixtures) + torch.matmul(w_k.T, dy) + torch.matmul(w_l.T, linear)
    dx = dx + (torch.matmul(w_r.T, sums) if call.project else sums)
    grads = [linear, dy, sums] if call.project else [linear, dy]
    dw = torch.cat([torch.einsum("brd,bnd->rn", grad, wide) for grad in grads])
    return dx.to(x.dtype), dw
