"""The interaction and its gradient as torch ops. An op's signature is fixed, so absent outputs are empty tensors."""

import torch
from torch import Tensor

from loka.kernels.interaction import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op


@torch_op("interact")
def interact(
    x: Tensor, weight: Tensor, scale: Tensor, k: int, n_l: int, n_f: int, project: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return products, next, residual (empty if it is x itself) and rstd (empty if not `keep`)."""
    return kernels.interact(x, weight, scale, k=k, n_l=n_l, n_f=n_f, project=project, keep=keep)


@fake_of(interact)
def _(x, weight, scale, k, n_l, n_f, project, keep):  # type: ignore[no-untyped-def]
    rows, n, d = x.shape
    return (
        x.new_empty(rows, n * k, dtype=torch.float8_e4m3fn),
        x.new_empty(rows, n_f + n_l, d),
        x.new_empty((rows, n_f, d) if project else (0,)),
        x.new_empty((rows, n_f + n_l) if keep else (0,), dtype=torch.float32),
    )


@torch_op("interact_finish", mutates=("following", "rstd"))
def finish(following: Tensor, tower: Tensor, residual: Tensor, rstd: Tensor, n_f: int) -> None:
    """Write BlockNorm_d(tower + residual) to following[:, :n_f], and its rstd if that is not empty."""
    kernels.finish(following, tower, residual, rstd if rstd.numel() else None, n_f=n_f)


@fake_of(finish)
def _(following, tower, residual, rstd, n_f):  # type: ignore[no-untyped-def]
    return None


norm_gradient = torch_op("interact_norm_gradient")(kernels.norm_gradient)


@fake_of(norm_gradient)
def _(g, following, rstd):  # type: ignore[no-untyped-def]
    return torch.empty_like(following)


@torch_op("interact_gradient")
def interact_gradient(
    x: Tensor, weight: Tensor, dq: Tensor, ds: Tensor, k: int, n_l: int, n_f: int, project: bool
) -> tuple[Tensor, Tensor]:
    """Return dx and dW."""
    return kernels.interact_gradient(x, weight, dq, ds, k=k, n_l=n_l, n_f=n_f, project=project)


@fake_of(interact_gradient)
def _(x, weight, dq, ds, k, n_l, n_f, project):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), weight.new_empty(weight.shape, dtype=torch.float32)
