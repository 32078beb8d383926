"""The interaction as torch ops."""

import torch
from torch import Tensor

from loka.kernels.interaction import triton_kernels as kernels


@torch.library.custom_op("loka::interact", mutates_args=())
def interact(
    x: Tensor, weight: Tensor, scale: Tensor, k: int, n_l: int, n_f: int, project: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """products, next, residual (empty where it is x itself)."""
    return kernels.interact(x, weight, scale, k=k, n_l=n_l, n_f=n_f, project=project)


@interact.register_fake
def _(x, weight, scale, k, n_l, n_f, project):  # type: ignore[no-untyped-def]
    rows, n, d = x.shape
    return (
        x.new_empty(rows, n * k, dtype=torch.float8_e4m3fn),
        x.new_empty(rows, n_f + n_l, d),
        x.new_empty((rows, n_f, d) if project else (0,)),
    )


@torch.library.custom_op("loka::interact_finish", mutates_args=("following",))
def finish(following: Tensor, tower: Tensor, residual: Tensor, n_f: int) -> None:
    """following[:, :n_f] = BlockNorm_d(tower + residual)."""
    kernels.finish(following, tower, residual, n_f=n_f)


@finish.register_fake
def _(following, tower, residual, n_f):  # type: ignore[no-untyped-def]
    return None
