"""A call of `route` or `route_sorted`, described without tensors."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RouterCall:
    """A call of `route` or `route_sorted`.

    Args:
        tokens, k, dtype: x is [tokens, k] in `dtype`.
        experts, top: number of routed experts, and of those chosen per token.
        always: every token also visits a shared expert.

    Example:
        >>> call = RouterCall(tokens=4096, k=1024, experts=64, top=6)
    """

    tokens: int
    k: int
    experts: int
    top: int
    dtype: torch.dtype = torch.bfloat16
    always: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top <= self.experts:
            raise ValueError(f"a token visits 1 to {self.experts} experts, got top={self.top}")

    def __str__(self) -> str:
        more = " and one more" if self.always else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens}x{self.k} {kind} to {self.top} of {self.experts} experts{more}"
