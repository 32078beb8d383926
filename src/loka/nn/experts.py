"""SwiGLU, and a mixture of SwiGLU experts: shared ones for all tokens, and routed ones, of which a token uses `top`.

    SwiGLU(x) = W_down (act(W_gate x) * W_up x)
    MoE(x)    = SwiGLU_shared(x) + sum_{e in T(x)} g_e SwiGLU_e(x)
    s = sigmoid(W_r x);   T(x) = the `top` largest of s + b;   g_e = s_e / sum over T(x) of s

Load balancing needs no auxiliary loss: b only affects which experts are chosen, not their weights, so it has no
gradient. After each step

    b_e <- b_e + rate * sign(mean load - load_e)

pulls tokens towards idle experts. Training forwards count the load; the training loop calls `update_balance` once per
optimizer step.

Gate and up are one GEMM. Tokens are sorted by expert, so each projection is one grouped GEMM with static shapes; no
token is dropped or padded.
"""

import torch
from torch import Tensor, nn

from loka.nn.activation import ActivationKind, make_activation
from loka.nn.grouped import GroupedLinear

# `balance` stores b as an integer in these units: in a model cast to bf16, small updates of a float would be lost.
UNIT = 1e-6


class SwiGLU(nn.Module):
    """W_down (act(W_gate x) * W_up x); `gate_up` stacks W_gate and W_up.

    Args:
        d: features in and out.
        hidden: hidden features.
        activation: of the gate.
        bias: of the linears.

    Example:
        >>> SwiGLU(64, 128)(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """

    def __init__(self, d: int, hidden: int, *, activation: ActivationKind = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(d, 2 * hidden, bias=bias)
        self.activation = make_activation(activation)
        self.down = nn.Linear(hidden, d, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(self.activation(gate) * up)
        return out


class MixtureOfExperts(nn.Module):
    """A mixture of experts with `top` routed experts per token.

    Args:
        d: features in and out.
        hidden: hidden features of one expert.
        routed: number of experts to choose from.
        top: number of routed experts per token.
        shared: number of experts that all tokens use, as one wide SwiGLU; 0 for none.
        activation: of the gates.

    Example:
        >>> MixtureOfExperts(64, 128, routed=8, top=2)(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    balance: Tensor
    load: Tensor

    def __init__(
        self, d: int, hidden: int, *, routed: int, top: int, shared: int = 1, activation: ActivationKind = "silu"
    ) -> None:
        super().__init__()
        if not 1 <= top <= routed or shared < 0:
            raise ValueError(
                f"expected top from 1 to {routed} (routed) and shared >= 0, got top={top}, shared={shared}"
            )
        self.top = top
        self.router = nn.Linear(d, routed, bias=False)
        self.gate_up = GroupedLinear(routed, d, 2 * hidden)
        self.activation = make_activation(activation)
        self.down = GroupedLinear(routed, hidden, d)
        self.shared = SwiGLU(d, shared * hidden, activation=activation) if shared else None
        self.register_buffer("balance", torch.zeros(routed, dtype=torch.int64))
        self.register_buffer("load", torch.zeros(routed, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d] -> [..., d]."""
        rows = x.flatten(0, -2)
        chosen, gates = self.route(rows)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = torch.zeros_like(self.load).scatter_add(0, experts, torch.ones_like(experts))
        if self.training:
            self.load.add_(counts)
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = self.gate_up(rows[order // self.top], ends).chunk(2, -1)
        out: Tensor = self.down(self.activation(gate) * up, ends)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        routed = (out[back].view(-1, self.top, out.shape[1]) * gates.to(out.dtype).unsqueeze(-1)).sum(1)
        if self.shared is not None:
            routed = routed + self.shared(rows)
        return routed.view_as(x)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of every token, [N, top], and their weights, which sum to one."""
        logits = self.router(rows)
        scores = torch.sigmoid(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        chosen = (scores + self.balance * UNIT).topk(self.top, -1).indices
        gates = scores.gather(1, chosen)
        return chosen, gates / gates.sum(-1, keepdim=True)

    @torch.no_grad()
    def update_balance(self, rate: float) -> None:
        """Bias the choice towards experts with less than the mean load, and reset the counts."""
        steps = round(rate / UNIT)
        if steps < 1:
            raise ValueError(f"rate={rate}: expected at least {UNIT}")
        below = self.load.sum() - self.load * len(self.load)  # mean load - load, without a division
        self.balance.add_(steps * torch.sign(below))
        self.load.zero_()

    def active_parameters(self) -> int:
        """Return the number of parameters used by one token: the router, its `top` routed experts, all shared ones."""
        per_expert = (self.gate_up.weight.numel() + self.down.weight.numel()) // self.gate_up.experts
        shared = 0 if self.shared is None else sum(p.numel() for p in self.shared.parameters())
        return self.router.weight.numel() + self.top * per_expert + shared
