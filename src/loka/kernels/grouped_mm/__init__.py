"""grouped_mm: the GEMMs of a mixture of experts, and what lies around them.

    permute          which row goes to which expert: a stable counting sort of the router's choices
    gather           the rows themselves, quantised or not, in that order
    grouped_mm       y_r = W_e x_r, one GEMM for all experts
    prepare          its weights laid out once, as its backend reads them
    grouped_swiglu   the same with silu(gate) * up, and quantisation, before anything is written
    swiglu_quantize  that step alone, for GEMMs that cannot do it
    combine          the weighted sum of what a token's experts said

Group sizes are data and stay on the device; shapes depend on the number of tokens only, so all of it can be captured in a CUDA graph.
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
    """x [M, K] sorted by expert, w [E, N, K], offsets int32 [E + 1] from 0 to M -> [M, N].

    Both operands are QTensors (1x128 x 128x128, row x row) or plain tensors of one dtype. Every row must belong to an expert: offsets[E] = M. Experts may
    have no rows. fast_accum permits sums to stay in the tensor cores, as in `scaled_mm`.
    """
    call = describe(x, w, offsets, out_dtype=out_dtype, fast_accum=fast_accum)
    chosen = pick("grouped_mm", backend, call, x.device)
    out: Tensor = chosen.backend.run(x, w, offsets, out_dtype=out_dtype, fast_accum=fast_accum)
    return out


def prepare(w: QTensor, a: Spec, *, backend: str = "auto") -> QTensor:
    """The weights [E, N, K] laid out for their backend, once, for rows of Spec `a`. The same weights to every backend."""
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
    """silu(x W_gate^T) * (x W_up^T) for w [E, 2 F, K], gate above up: [M, F] quantised under `spec`, or of `out_dtype` where it is None."""
    call = describe(x, w, offsets, out_dtype=out_dtype, fast_accum=fast_accum, swiglu=True, out=spec)
    chosen: Any = pick("grouped_mm", backend, call, x.device).backend
    out: QTensor | Tensor = chosen.run_swiglu(x, w, offsets, spec=spec, out_dtype=out_dtype, fast_accum=fast_accum)
    return out


def swiglu_quantize(h: Tensor, spec: Spec | None, *, backend: str = "auto") -> QTensor | Tensor:
    """silu(h[:, :F]) * h[:, F:] of h [M, 2 F], quantised under `spec`, or in h's dtype where it is None."""
    if h.dim() != 2 or h.shape[1] % 2:
        raise ValueError(f"swiglu_quantize takes h [M, 2 F], got {tuple(h.shape)}")
    call = SwigluCall(h.shape[0], h.shape[1] // 2, spec, h.dtype)
    chosen: Any = pick("grouped_mm", backend, call, h.device).backend
    out: QTensor | Tensor = chosen.swiglu(h, spec)
    return out


def permute(ids: Tensor, experts: int, *, backend: str = "auto") -> Permutation:
    """Sort the choices ids [T, top], integers in [0, experts), by expert; visits of the same expert keep the order of their tokens."""
    if ids.dim() != 2 or ids.dtype not in (int32, int64):
        raise ValueError(f"permute takes int32 or int64 ids [tokens, top], got {ids.dtype} {tuple(ids.shape)}")
    call = MoveCall(ids.shape[0], ids.shape[1], experts)
    chosen: Any = pick("grouped_mm", backend, call, ids.device).backend
    order, offsets, inverse = chosen.permute(ids, experts)
    return Permutation(order, offsets, inverse, ids.shape[1])


def gather(x: QTensor | Tensor, permutation: Permutation, *, backend: str = "auto") -> QTensor | Tensor:
    """The rows of x [T, K] as the experts want them, [T * top, K]; a QTensor scaled per row or 1x128 brings its scales along."""
    tokens, top = x.shape[0], permutation.top
    if tokens * top != permutation.order.shape[0]:
        raise ValueError(f"the permutation is of {permutation.order.shape[0]} visits, x has {tokens} tokens x {top}")
    dtype = x.data.dtype if isinstance(x, QTensor) else x.dtype
    call = MoveCall(tokens, top, permutation.offsets.shape[0] - 1, dtype)
    chosen: Any = pick("grouped_mm", backend, call, x.device).backend
    out: QTensor | Tensor = chosen.gather(x, permutation)
    return out


def combine(
    y: Tensor, permutation: Permutation, weights: Tensor, *, add: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """out[t] = sum over a token's visits of weights[t, j] * y[its row], plus add[t] where given: y [T * top, d], weights [T, top] -> [T, d]."""
    tokens, top = weights.shape
    if y.dim() != 2 or y.shape[0] != tokens * top or permutation.top != top:
        raise ValueError(
            f"combine takes y [T * top, d] and weights [T, top], got {tuple(y.shape)} and {tuple(weights.shape)}"
        )
    if add is not None and (add.shape != (tokens, y.shape[1]) or add.dtype != y.dtype):
        raise ValueError(f"add must be {y.dtype} {(tokens, y.shape[1])}, got {add.dtype} {tuple(add.shape)}")
    call = MoveCall(tokens, top, permutation.offsets.shape[0] - 1, y.dtype)
    chosen: Any = pick("grouped_mm", backend, call, y.device).backend
    out: Tensor = chosen.combine(y, permutation, weights, add)
    return out
