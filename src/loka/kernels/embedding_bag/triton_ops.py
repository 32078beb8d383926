"""The Triton lookup as a torch op, so that torch.compile does not trace the launch code."""

import torch
from torch import Tensor

from loka.formats import INT4, Spec
from loka.kernels.embedding_bag import triton_kernels as kernels
from loka.kernels.op import fake_of, torch_op


@torch_op("embedding_bag")
def embedding_bag(
    data: Tensor,
    scale: Tensor | None,
    slot: Tensor | None,
    hot: Tensor | None,
    indices: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    mean: bool,
    spec: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `triton_kernels.look_up`."""
    return kernels.look_up(data, scale, slot, hot, indices, offsets, weights, mean, _is_int4(spec), out_dtype)


@fake_of(embedding_bag)
def _(data, scale, slot, hot, indices, offsets, weights, mean, spec, out_dtype):  # type: ignore[no-untyped-def]
    bags = indices.shape[0] if offsets is None else offsets.shape[0] - 1
    return data.new_empty(bags, data.shape[1] * (2 if _is_int4(spec) else 1), dtype=out_dtype)


def _is_int4(spec: str) -> bool:
    return bool(spec) and Spec.parse(spec).format == INT4
