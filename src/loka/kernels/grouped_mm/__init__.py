"""grouped_mm: the GEMMs of a mixture of experts, and the data movement around them.

    permute          sort the router's choices by expert (a stable counting sort)
    gather           copy the rows, quantized or not, into that order
    grouped_mm       y_r = W_e x_r, one GEMM for all experts
    prepare          lay out the weights for a backend once
    grouped_swiglu   grouped_mm with silu(gate) * up and quantization fused into the epilogue
    swiglu_quantize  silu(gate) * up and quantization alone, for GEMMs without that epilogue
    combine          sum each token's expert outputs, weighted by the router

A visit is one (token, chosen expert) pair; there are T * top of them. Group sizes stay on the device and shapes
depend on the number of tokens only, so everything can be captured in a CUDA graph.
"""

from typing import Any

from torch import Tensor, bfloat16, dtype, int32, int64

from loka.formats import QTensor, Spec
from loka.kernels.grouped_mm.call import GroupedCall, MoveCall, Permutation, SwigluCall, describe
from loka.kernels.registry import first, pick
from loka.kernels.registry import prepare as prepare_on

__all__ = [
    "GroupedCall", "MoveCall", "Permutation", "SwigluCall", "combine", "gather", "grouped_mm", "grouped_swiglu",
    "permute", "prepare", "swiglu_quantize",
]  # fmt: skip


def grouped_mm(
    x: QTensor | Tensor,
    w: QTensor | Tensor,
    offsets: Tensor,
    *,
    out_dtype: dtype,
    fast_accum: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Multiply every row of x by its expert's weight matrix.

    Args:
        x: [M, K], rows sorted by expert.
        w: [E, N, K]. x and w are both QTensors (scaled 1x128 x 128x128 or row x row) or plain tensors of one dtype.
        offsets: int32 [E + 1]. Rows offsets[e] to offsets[e + 1] belong to expert e; offsets[0] = 0, offsets[E] = M.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: permit accumulation in the tensor cores' reduced precision, as in `scaled_mm`.
        backend: a name of the registry, or "auto".

    Returns:
        [M, N] in `out_dtype`.

    Example:
        >>> p = permute(ids, experts=8)
        >>> y = grouped_mm(gather(x, p), w, p.offsets, out_dtype=torch.bfloat16)
    """
    call = describe(x, w, offsets, out_dtype=out_dtype, fast_accum=fast_accum)
    chosen = pick("grouped_mm", backend, call, x.device)
    out: Tensor = chosen.backend.run(x, w, offsets, out_dtype=out_dtype, fast_accum=fast_accum)
    return out


def prepare(w: QTensor, a: Spec, *, backend: str = "auto") -> QTensor:
    """Lay out weights for a backend once instead of in every call (`loka.kernels.prepared`).

    Args:
        w: quantized weights [E, N, K].
        a: Spec of the rows that they will be multiplied by.
        backend: a name of the registry, or "auto".

    Returns:
        The same weights with the layout attached. Other backends can still use them.

    Example:
        >>> w = prepare(quantize(weight, Spec.parse("e4m3:row")), Spec.parse("e4m3:row"))
    """
    experts, n, k = w.shape
    if backend == "auto":
        call = GroupedCall(experts, k, n, experts, a, w.spec, a.format.dtype)
        backend = first("grouped_mm", call, w.device).name
    return prepare_on("grouped_mm", backend, w, a)


def grouped_swiglu(
    x: QTensor | Tensor,
    w: QTensor | Tensor,
    offsets: Tensor,
    *,
    spec: Spec | None,
    out_dtype: dtype = bfloat16,
    fast_accum: bool = False,
    backend: str = "auto",
) -> QTensor | Tensor:
    """Compute silu(x W_gate^T) * (x W_up^T) without writing the GEMM's result to memory.

    Args:
        x, offsets, fast_accum, backend: as in `grouped_mm`.
        w: [E, 2 F, K], gate rows first, then up rows.
        spec: how to quantize the result, or None.
        out_dtype: dtype of the result if `spec` is None.

    Returns:
        [M, F]: a QTensor if `spec` is given, else a tensor of `out_dtype`.

    Example:
        >>> h = grouped_swiglu(x, w_gate_up, p.offsets, spec=Spec.parse("e4m3:1x128"))
    """
    call = describe(x, w, offsets, out_dtype=out_dtype, fast_accum=fast_accum, swiglu=True, out=spec)
    chosen: Any = pick("grouped_mm", backend, call, x.device).backend
    out: QTensor | Tensor = chosen.run_swiglu(x, w, offsets, spec=spec, out_dtype=out_dtype, fast_accum=fast_accum)
    return out


def swiglu_quantize(h: Tensor, spec: Spec | None, *, backend: str = "auto") -> QTensor | Tensor:
    """Compute silu(h[:, :F]) * h[:, F:].

    Args:
        h: [M, 2 F], gate columns first, then up columns.
        spec: how to quantize the result, or None.
        backend: a name of the registry, or "auto".

    Returns:
        [M, F]: a QTensor if `spec` is given, else a tensor of h's dtype.

    Example:
        >>> q = swiglu_quantize(h, Spec.parse("e4m3:1x128"))
    """
    if h.dim() != 2 or h.shape[1] % 2:
        raise ValueError(f"swiglu_quantize takes h [M, 2 F], got {tuple(h.shape)}")
    call = SwigluCall(h.shape[0], h.shape[1] // 2, spec, h.dtype)
    chosen: Any = pick("grouped_mm", backend, call, h.device).backend
    out: QTensor | Tensor = chosen.swiglu(h, spec)
    return out


def permute(ids: Tensor, experts: int, *, backend: str = "auto") -> Permutation:
    """Sort visits by expert. Visits of the same expert keep the order of their tokens.

    Args:
        ids: int32 or int64 [T, top], the chosen experts of each token, in [0, experts).
        experts: number of experts.
        backend: a name of the registry, or "auto".

    Returns:
        The permutation that `gather` and `combine` take.

    Example:
        >>> p = permute(scores.topk(2).indices, experts=8)
    """
    if ids.dim() != 2 or ids.dtype not in (int32, int64):
        raise ValueError(f"permute takes int32 or int64 ids [tokens, top], got {ids.dtype} {tuple(ids.shape)}")
    call = MoveCall(ids.shape[0], ids.shape[1], experts)
    chosen: Any = pick("grouped_mm", backend, call, ids.device).backend
    order, offsets, inverse = chosen.permute(ids, experts)
    return Permutation(order, offsets, inverse, ids.shape[1])


def gather(x: QTensor | Tensor, permutation: Permutation, *, backend: str = "auto") -> QTensor | Tensor:
    """Copy each token's row to every place where one of its experts reads it.

    Args:
        x: [T, K], a tensor, or a QTensor scaled per row, 1x128 or per tensor.
        permutation: of the T tokens.
        backend: a name of the registry, or "auto".

    Returns:
        [T * top, K], rows sorted by expert; a QTensor with its scales if x is one.

    Example:
        >>> rows = gather(x, p)
    """
    tokens, top = x.shape[0], permutation.top
    if tokens * top != permutation.order.shape[0]:
        raise ValueError(f"the permutation is of {permutation.order.shape[0]} visits, x has {tokens} tokens x {top}")
    dtype, spec = (x.data.dtype, x.spec) if isinstance(x, QTensor) else (x.dtype, None)
    call = MoveCall(tokens, top, permutation.offsets.shape[0] - 1, dtype, "gather", x.shape[1], spec)
    chosen: Any = pick("grouped_mm", backend, call, x.device).backend
    out: QTensor | Tensor = chosen.gather(x, permutation)
    return out


def combine(
    y: Tensor, permutation: Permutation, weights: Tensor, *, add: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Sum each token's expert outputs, weighted: out[t] = sum_j weights[t, j] * y[row of visit (t, j)] + add[t].

    Args:
        y: [T * top, d], rows sorted by expert.
        permutation: that sorted them.
        weights: [T, top].
        add: [T, d] in y's dtype, for example a residual, or None.
        backend: a name of the registry, or "auto".

    Returns:
        [T, d] in y's dtype.

    Example:
        >>> out = combine(y, p, weights, add=residual)
    """
    tokens, top = weights.shape
    if y.dim() != 2 or y.shape[0] != tokens * top or permutation.top != top:
        raise ValueError(
            f"combine takes y [T * top, d] and weights [T, top], got {tuple(y.shape)} and {tuple(weights.shape)}"
        )
    if add is not None and (add.shape != (tokens, y.shape[1]) or add.dtype != y.dtype):
        raise ValueError(f"add must be {y.dtype} {(tokens, y.shape[1])}, got {add.dtype} {tuple(add.shape)}")
    call = MoveCall(tokens, top, permutation.offsets.shape[0] - 1, y.dtype, "combine", y.shape[1])
    chosen: Any = pick("grouped_mm", backend, call, y.device).backend
    out: Tensor = chosen.combine(y, permutation, weights, add)
    return out
