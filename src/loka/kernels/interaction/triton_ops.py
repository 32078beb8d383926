"""The interaction and its gradient as torch ops. An op's signature is fixed, so absent outputs are empty tensors."""

import torch

from loka.kernels.interaction import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op

interact = torch_op("interact")(kernels.interact)


@fake_of(interact)
def _(x, weight, scale, k, n_l, n_f, project, keep):  # type: ignore[no-untyped-def]
    rows, n, d = x.shape
    return (
        x.new_empty(rows, n * k, dtype=torch.float8_e4m3fn),
        x.new_empty(rows, n_f + n_l, d),
        x.new_empty((rows, n_f, d) if project else (0,)),
        x.new_empty((rows, n_f + n_l) if keep else (0,), dtype=torch.float32),
    )


finish = torch_op("interact_finish", mutates=("following", "rstd"))(kernels.finish)


@fake_of(finish)
def _(following, tower, residual, rstd, n_f):  # type: ignore[no-untyped-def]
    return None


norm_gradient = torch_op("interact_norm_gradient")(kernels.norm_gradient)


@fake_of(norm_gradient)
def _(g, following, rstd):  # type: ignore[no-untyped-def]
    return following.new_empty(following.shape)


interact_gradient = torch_op("interact_gradient")(kernels.interact_gradient)


@fake_of(interact_gradient)
def _(x, weight, dq, ds, k, n_l, n_f, project):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight.new_empty(weight.shape, dtype=torch.float32)
