"""HSTU's attention as a module without parameters: silu(Q K^T + bias) V over ragged rows, by a kernel of the registry.

"auto" picks the first backend that supports the operands; `chosen` is its name and `refusals` says why others refused.
If it is the reference on a GPU, the registry warns. A backend that is named explicitly and does not support the
operands raises; there is no fallback.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from loka.kernels import attention
from loka.kernels.attention import locate

__all__ = ["BACKENDS", "AttentionBackend", "SiluAttention", "locate"]

AttentionBackend = Literal["auto", "reference", "triton"]
BACKENDS: tuple[str, ...] = get_args(AttentionBackend)


class SiluAttention(nn.Module):
    """The attention product; sums are divided by `max_length`.

    `chosen` and `refusals` are those of the latest call that was not compiled.
    """

    def __init__(self, max_length: int, *, backend: AttentionBackend = "auto") -> None:
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"SiluAttention has no backend {backend!r}; backends are {', '.join(BACKENDS)}")
        self.max_length, self.backend = max_length, backend
        self.chosen: str | None = None
        self.refusals: dict[str, str] = {}
        attention.load()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the kernels: the next call may be compiled."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        attention.load()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        position_bias: Tensor,
        time_bias: Tensor | None,
        times: Tensor | None,
        query_times: Tensor | None,
    ) -> Tensor:
        """q, k [total, H, d_qk], v [total, H, d_v] -> [total, H, d_v]."""
        name: str = self.backend
        if not torch.compiler.is_compiling():
            selection = attention.choose(q, v, offsets, self.max_length, backend=name)
            self.chosen, self.refusals = selection.name, selection.refusals
            name = selection.name
        return attention.silu_attention(
            q,
            k,
            v,
            offsets,
            max_length=self.max_length,
            position_bias=position_bias,
            time_bias=time_bias,
            times=times,
            query_times=query_times,
            divisor=float(self.max_length),
            backend=name,
        )

    def extra_repr(self) -> str:
        """Return the maximum length, and the requested and the actual backend."""
        ran = f", ran {self.chosen}" if self.chosen and self.chosen != self.backend else ""
        return f"{self.max_length}, backend={self.backend}{ran}"
