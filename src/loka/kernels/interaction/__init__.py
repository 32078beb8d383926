"""interaction: a Wukong layer around its tower, in two kernels that read x once: products, norm and FP8 for the tower; mixtures, residual and norm for the rest.

    Y = W_k X,  P = X Y^T,  q = FP8(BlockNorm(flatten P))                    what the tower reads
    next[n_f:] = BlockNorm_d(W_l X + R[n_f:])                                the linear half of the next X
    next[:n_f] = BlockNorm_d(tower + R[:n_f])                                the tower's half, by `finish`

with R = X, or R = W_r X where the counts differ. For backward only x, next and one rstd a vector are kept: everything else is computed again from x.
"""

from typing import Any, cast

from torch import Tensor

from loka.kernels.interaction.call import Interacted, InteractionCall
from loka.kernels.registry import pick

__all__ = ["Interacted", "InteractionCall", "finish", "interact", "interact_gradient", "norm_gradient"]


def interact(
    x: Tensor, weight: Tensor, call: InteractionCall, scale: Tensor, *, keep: bool = False, backend: str = "auto"
) -> Interacted:
    """x [B, n, d] and the rows of a FeatureMix [n_l + k (+ out), n] -> FP8 products, the half-written next x, the residual of the other half."""
    chosen = pick("interaction", backend, call, x.device)
    return cast(Interacted, chosen.backend.run(x, weight, call, scale, keep=keep))


def finish(made: Interacted, tower: Tensor, call: InteractionCall, *, backend: str = "auto") -> Tensor:
    """Write the tower's half into `made.next`, and return it."""
    chosen: Any = pick("interaction", backend, call, tower.device).backend
    return cast(Tensor, chosen.finish(made, tower, call))


def norm_gradient(
    g: Tensor, following: Tensor, rstd: Tensor, call: InteractionCall, *, backend: str = "auto"
) -> Tensor:
    """From the gradient of next to that of the sums its norm was given, [B, n_f + n_l, d]; its first n_f vectors are the tower's gradient."""
    chosen: Any = pick("interaction", backend, call, g.device).backend
    return cast(Tensor, chosen.norm_gradient(g, following, rstd))


def interact_gradient(
    x: Tensor, weight: Tensor, dq: Tensor, ds: Tensor, call: InteractionCall, *, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """From the gradients of the normalised products and of the sums to dx and dW (float32)."""
    chosen: Any = pick("interaction", backend, call, x.device).backend
    return cast(tuple[Tensor, Tensor], chosen.gradient(x, weight, dq, ds, call))
