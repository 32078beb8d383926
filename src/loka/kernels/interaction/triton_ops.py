"""The interaction and its gradient as torch ops. Absent outputs come back empty: an op's signature is fixed."""

import torch
from torch import Tensor

from loka.kernels.interaction import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op


@torch_op("interact")
def interact(
    x: Tensor, weight: Tensor, scale: Tensor, k: int, n_l: int, n_f: int, project: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """products, next, residual (empty where it is x itself), rstd."""
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
    """following[:, :n_f] = BlockNorm_d(tower + residual), and its rstd where that is not empty."""
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
    """dx, dW."""
    return kernels.interact_gradient(x, weight, dq, ds, k=k, n_l=n_l, n_f=n_f, project=project)


@fake_of(interact_gradient)
def _(x, weight, dq, ds, k, n_l, n_f, project):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), weight.new_empty(weight.shape, dtype=torch.float32)
