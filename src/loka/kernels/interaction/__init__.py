"""interaction: a Wukong layer except for its tower, in two kernels that read x once.

    Y = W_k X,  P = X Y^T,  q = FP8(BlockNorm(flatten P))        the tower's input, by `interact`
    next[n_f:] = BlockNorm_d(W_l X + R[n_f:])                    the linear half of the next X, by `interact`
    next[:n_f] = BlockNorm_d(tower + R[:n_f])                    the tower's half, by `finish`

with R = X, or R = W_r X if the number of vectors changes. For backward only x, next and one rstd per vector are kept;
everything else is recomputed from x.
"""

from typing import Any, cast

from torch import Tensor

from loka.kernels.interaction.call import Interacted, InteractionCall
from loka.kernels.registry import pick

__all__ = ["Interacted", "InteractionCall", "finish", "interact", "interact_gradient", "norm_gradient"]


def interact(
    x: Tensor, weight: Tensor, call: InteractionCall, scale: Tensor, *, keep: bool = False, backend: str = "auto"
) -> Interacted:
    """Compute the tower's input and the linear half of the next x.

    Args:
        x: [B, n, d].
        weight: [call.weights, n], the rows of W_l, W_k and, with `call.project`, W_r.
        call: sizes and options.
        scale: of the FP8 products, a scalar tensor.
        keep: also return rstd, for backward.
        backend: a name of the registry, or "auto".

    Returns:
        FP8 products, the half-written next x, and the residual of the other half.

    Example:
        >>> made = interact(x, weight, call, scale)
        >>> x = finish(made, tower(made.products), call)
    """
    chosen = pick("interaction", backend, call, x.device)
    return cast(Interacted, chosen.backend.run(x, weight, call, scale, keep=keep))


def finish(made: Interacted, tower: Tensor, call: InteractionCall, *, backend: str = "auto") -> Tensor:
    """Write the tower's half into `made.next`, in place, and return it.

    Args:
        made: returned by `interact`.
        tower: the tower's output, [B, n_f d].
        call, backend: as in `interact`.

    Returns:
        The next x, [B, n_f + n_l, d].

    Example:
        >>> x = finish(made, tower(made.products), call)
    """
    chosen: Any = pick("interaction", backend, call, tower.device).backend
    return cast(Tensor, chosen.finish(made, tower, call))


def norm_gradient(
    g: Tensor, following: Tensor, rstd: Tensor, call: InteractionCall, *, backend: str = "auto"
) -> Tensor:
    """Compute the gradient through the last norm.

    Args:
        g: gradient of the next x, [B, n_f + n_l, d].
        following: the next x.
        rstd: kept by `interact` and `finish`, [B, n_f + n_l].
        call, backend: as in `interact`.

    Returns:
        The gradient of the norm's input, [B, n_f + n_l, d]. Its first n_f vectors are the tower's gradient.

    Example:
        >>> ds = norm_gradient(g, made.next, made.rstd, call)
    """
    chosen: Any = pick("interaction", backend, call, g.device).backend
    return cast(Tensor, chosen.norm_gradient(g, following, rstd))


def interact_gradient(
    x: Tensor, weight: Tensor, dq: Tensor, ds: Tensor, call: InteractionCall, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and of the weight.

    Args:
        x, weight, call, backend: as in `interact`.
        dq: gradient of the normalized products, [B, n k].
        ds: returned by `norm_gradient`.

    Returns:
        dx in x's dtype and dW in float32.

    Example:
        >>> dx, dw = interact_gradient(x, weight, dq, ds, call)
    """
    chosen: Any = pick("interaction", backend, call, x.device).backend
    return cast(tuple[Tensor, Tensor], chosen.gradient(x, weight, dq, ds, call))
