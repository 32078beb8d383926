"""route: the router of a mixture of experts.

route          the experts of every token, best first, and their weights
route_sorted   the same, sorted by expert for `grouped_mm`
"""

from typing import Any

from torch import Tensor, float32, float64

from loka.kernels.grouped_mm import Permutation
from loka.kernels.registry import pick
from loka.kernels.route.call import RouterCall

__all__ = ["RouterCall", "route", "route_sorted"]


def route(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool = False, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Choose `top` experts for every token.

    With s = sigmoid(x W^T), the experts with the largest s + balance are chosen, of equal ones the lowest index first.
    Their weights are their s, divided by the sum of these.

    Args:
        x: [T, K].
        weight: [E, K] in x's dtype.
        balance: [E], float32 (float64 for float64 x). Affects which experts are chosen, not their weights.
        top: number of experts per token.
        always: add a last column for a shared expert: index E with weight one.
        backend: a name of the registry, or "auto".

    Returns:
        Experts, int64, and weights in balance's dtype, both [T, top] or [T, top + 1], best first.

    Example:
        >>> experts, weights = route(x, weight, torch.zeros(64), top=6)
    """
    chosen = _pick(x, weight, balance, top, always, backend)
    result: tuple[Tensor, Tensor] = chosen.run(x, weight, balance, top, always=always)
    return result


def route_sorted(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool = False, backend: str = "auto"
) -> tuple[Permutation, Tensor]:
    """Choose experts as `route` does, and sort the visits by expert as `grouped_mm.permute` does.

    Args:
        x, weight, balance, top, always, backend: as in `route`.

    Returns:
        The permutation of the visits, and the weights in the order of the tokens.

    Example:
        >>> permutation, weights = route_sorted(x, weight, torch.zeros(64), top=6)
    """
    chosen = _pick(x, weight, balance, top, always, backend)
    order, offsets, inverse, gates = chosen.run_sorted(x, weight, balance, top, always=always)
    return Permutation(order, offsets, inverse, top + int(always)), gates


def _pick(x: Tensor, weight: Tensor, balance: Tensor, top: int, always: bool, backend: str) -> Any:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype != weight.dtype:
        raise ValueError(
            f"route takes x [T, K] and weight [E, K] of one dtype, got {x.dtype} {tuple(x.shape)} and {weight.dtype} {tuple(weight.shape)}"
        )
    wide = float64 if x.dtype == float64 else float32
    if balance.shape != weight.shape[:1] or balance.dtype != wide:
        raise ValueError(
            f"balance must be {wide} [{weight.shape[0]}], got {balance.dtype} {tuple(balance.shape)}; hint: zeros for no balancing"
        )
    call = RouterCall(x.shape[0], x.shape[1], weight.shape[0], top, x.dtype, always)
    return pick("route", backend, call, x.device).backend
