"""route: which experts a token visits, and how much each of them counts.

route          the experts of every token, best first, and their weights
route_sorted   the same as grouped_mm wants it: the visits sorted by expert
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
    """x [T, K], weight [E, K] of one dtype, balance [E] -> experts int64 [T, top] and their weights [T, top], best first.

    s = sigmoid(x W^T); the `top` largest of s + balance are chosen, equal ones lowest index first; their s, divided by their sum, are the weights. `always`
    adds a column: expert E with weight one, a shared expert that lies behind the routed ones. Weights are float32 (float64 for float64 x).
    """
    chosen = _pick(x, weight, balance, top, always, backend)
    result: tuple[Tensor, Tensor] = chosen.run(x, weight, balance, top, always=always)
    return result


def route_sorted(
    x: Tensor, weight: Tensor, balance: Tensor, top: int, *, always: bool = False, backend: str = "auto"
) -> tuple[Permutation, Tensor]:
    """`route`, with the visits sorted by expert as `grouped_mm.permute` sorts them, and the weights in the order of the tokens."""
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
            f"balance must be {wide} [{weight.shape[0]}], got {balance.dtype} {tuple(balance.shape)}; hint: zeros where nothing is balanced"
        )
    call = RouterCall(x.shape[0], x.shape[1], weight.shape[0], top, x.dtype, always)
    return pick("route", backend, call, x.device).backend
