"""InterFormer: feature vectors and a behavior history that exchange summaries (Zeng et al., "InterFormer", 2024).

    interaction arch  X^(l+1) = MLP(Interaction([X || S_sum]))           with a dot, DCNv2 or DHEN backbone
    sequence arch     S^(l+1) = MHA(PFFN(X_sum, S)), rotary positions   PFFN(X_sum, S) = S f(X_sum)^T, f(X_sum) is d x d
    cross arch        X_sum = Gating(MLP(X)),   S_sum = Gating([S_cls || S_pma || S_recent])
    head              MLP([X_sum || S_sum])

Gating(Z) = sigmoid(Z * MLP(Z)). The first X_sum is prepended to the history as its CLS tokens, so attention always has
a token, also for an empty history. PMA is attention of learned seeds over all tokens; the recent tokens are the last
real ones. Several aligned histories are merged by a MaskNet, S = W (S * MLP(S)), to one of width d.

The published equations have no residuals. `residual=True` (the default) adds them with a norm, which deeper stacks need
to train: X^(l+1) = Norm(X + MLP(...)) and S^(l+1) = Norm(P + MHA(P)), P = PFFN(...). `residual=False` follows the
equations.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from loka.models.dcn import CrossNetwork
from loka.models.dhen import DHENConfig, DHENLayer
from loka.models.ranker import Core, CoreConfig
from loka.nn import MLP, DotInteraction, DotProductAttention, SelfAttention, Style, make_head, make_norm
from loka.nn.activation import gate_for
from loka.nn.attention import check_heads, merge_heads, split_heads
from loka.nn.embedding import Seeds
from loka.nn.mix import compute_dtype, multiply_transposed

if TYPE_CHECKING:
    from loka.data.schema import Schema


@dataclass(frozen=True, kw_only=True)
class InterFormerConfig(CoreConfig):
    """length: of the longest history; histories: their number; hidden: MLP width; cls, pma, recent: summary tokens."""

    layers: int = 2
    heads: int = 2
    length: int = 8
    histories: int = 1
    cls: int = 4
    pma: int = 2
    recent: int = 2
    hidden: int = 32
    backbone: Literal["dot", "dcn", "dhen"] = "dot"
    rank: int | None = None
    residual: bool = True
    top: tuple[int, ...] = (64, 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heads(self.d, self.heads)
        if (self.d // self.heads) % 2:
            raise ValueError(f"InterFormer rotates pairs of features: d / heads = {self.d // self.heads} must be even")
        if self.backbone not in ("dot", "dcn", "dhen"):
            raise ValueError(f"InterFormerConfig.backbone is {self.backbone!r}; expected 'dot', 'dcn' or 'dhen'")

    @property
    def tokens(self) -> int:
        """Number of vectors in S_sum."""
        return self.cls + self.pma + self.recent


class Gating(nn.Module):
    """sigmoid(Z * MLP(Z)), the MLP over the d features of every vector; a hard gate in a hard style."""

    def __init__(self, d: int, style: Style) -> None:
        super().__init__()
        self.mlp = MLP(d, (d,), d, style=style)
        self.gate = gate_for(style.activation)

    def forward(self, z: Tensor) -> Tensor:
        """[B, m, d] -> [B, m, d]."""
        out: Tensor = self.gate(z * self.mlp(z))
        return out


class MaskNet(nn.Module):
    """S = W (S * MLP(S)) for s aligned histories: [B, T, s d] -> [B, T, d]."""

    def __init__(self, histories: int, d: int, style: Style) -> None:
        super().__init__()
        self.mask = MLP(histories * d, (d,), histories * d, style=style)
        self.project = nn.Linear(histories * d, d, bias=style.bias)

    def forward(self, s: Tensor) -> Tensor:
        """Merge the histories."""
        out: Tensor = self.project(s * self.mask(s))
        return out


class SeedPooling(nn.Module):
    """PMA: multi-head attention of learned seeds over the tokens, [B, T, d] -> [B, count, d]."""

    def __init__(self, count: int, d: int, heads: int, style: Style) -> None:
        super().__init__()
        self.heads = heads
        self.seeds = Seeds(count, d)
        self.kv = nn.Linear(d, 2 * d, bias=style.bias)
        self.attention = DotProductAttention()
        self.out = nn.Linear(d, d, bias=style.bias)

    def forward(self, s: Tensor, mask: Tensor) -> Tensor:
        """Summarize the tokens for which the mask is True."""
        k, v = (split_heads(part, self.heads) for part in self.kv(s).chunk(2, -1))
        q = split_heads(self.seeds(s.shape[0]).to(k.dtype), self.heads)
        out: Tensor = self.out(merge_heads(self.attention(q, k, v, mask)))
        return out


class CrossArch(nn.Module):
    """The summaries that both sides exchange: X_sum [B, cls, d] and S_sum [B, tokens, d]."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        n, d, style = config.n, config.d, config.style
        self.cls, self.recent, self.d = config.cls, config.recent, d
        self.compress = MLP(n * d, (config.hidden,), config.cls * d, style=style)
        self.x_gate = Gating(d, style)
        self.pma = SeedPooling(config.pma, d, config.heads, style)
        self.s_gate = Gating(d, style)

    def summarise_x(self, x: Tensor) -> Tensor:
        """Return Gating(MLP(X)), [B, cls, d]."""
        out: Tensor = self.x_gate(self.compress(x.flatten(1)).view(-1, self.cls, self.d))
        return out

    def summarise_s(self, s: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        """Return Gating([S_cls || S_pma || S_recent]), [B, tokens, d]; missing recent tokens are zero."""
        back = torch.arange(self.recent, device=s.device)
        exists = back < lengths[:, None]
        at = (self.cls + lengths[:, None] - 1 - back).clamp(min=0)
        recent = s.gather(1, at[:, :, None].expand(-1, -1, self.d)) * exists[:, :, None]
        out: Tensor = self.s_gate(torch.cat([s[:, : self.cls], self.pma(s, mask), recent], 1))
        return out


class PersonalFeedForward(nn.Module):
    """PFFN: multiply every token by a d x d matrix computed from X_sum."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.d = config.d
        self.make_weight = MLP(config.cls * config.d, (config.hidden,), config.d * config.d, style=config.style)

    def forward(self, x_sum: Tensor, s: Tensor) -> Tensor:
        """x_sum [B, cls, d], s [B, T, d] -> [B, T, d]."""
        weight = self.make_weight(x_sum.flatten(1)).view(-1, self.d, self.d)
        return multiply_transposed(s, weight)


class Backbone(nn.Module):
    """MLP(Interaction(Z)) for Z = [X || S_sum], [B, n + tokens, d] -> [B, n, d]."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        n, d, style = config.n + config.tokens, config.d, config.style
        self.shape = (config.n, d)
        self.interaction: nn.Module
        if config.backbone == "dot":
            self.interaction, width = DotInteraction(n), n * (n - 1) // 2
        elif config.backbone == "dcn":
            self.interaction, width = CrossNetwork(n * d, 1, rank=config.rank, bias=style.bias), n * d
        else:
            dhen = DHENConfig(n=n, d=d, m=config.n, interactions=("dot", "linear"), rank=config.rank, style=style)
            self.interaction, width = DHENLayer(n, dhen), dhen.width * d
        self.flat = config.backbone == "dcn"
        self.mlp = MLP(width, (config.hidden,), config.n * d, style=style)

    def forward(self, z: Tensor) -> Tensor:
        """Interact and map back to n vectors."""
        crossed = self.interaction(z.flatten(1) if self.flat else z)
        out: Tensor = self.mlp(crossed.flatten(1))
        return out.view(-1, *self.shape)


class InterFormerLayer(nn.Module):
    """One layer: both sides are updated using the other's summary."""

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        d, style = config.d, config.style
        self.backbone = Backbone(config)
        self.pffn = PersonalFeedForward(config)
        self.mha = SelfAttention(d, config.heads, rotary=config.cls + config.length, bias=style.bias)
        self.residual = config.residual
        if config.residual:
            self.x_norm = make_norm(style.norm, d, bias=style.bias)
            self.s_norm = make_norm(style.norm, d, bias=style.bias)

    def forward(self, x: Tensor, s: Tensor, mask: Tensor, x_sum: Tensor, s_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Return X and S of the next layer."""
        made = self.backbone(torch.cat([x, s_sum], 1))
        personal = self.pffn(x_sum, s)
        seen = self.mha(personal, mask)
        if not self.residual:
            return made, seen
        return self.x_norm(x + made), self.s_norm(personal + seen)


class InterFormer(Core):
    """x [B, n, d], history [B, T, histories * d] and lengths [B] -> logits [B, labels]."""

    takes_sequence: ClassVar[bool] = True
    config: InterFormerConfig

    def __init__(self, config: InterFormerConfig) -> None:
        super().__init__()
        self.config = config
        self.merge = MaskNet(config.histories, config.d, config.style) if config.histories > 1 else nn.Identity()
        self.layers = nn.ModuleList(InterFormerLayer(config) for _ in range(config.layers))
        self.summaries = nn.ModuleList(CrossArch(config) for _ in range(config.layers + 1))
        self.head = make_head((config.cls + config.tokens) * config.d, config.top, config.labels, config.style)

    @classmethod
    def fit(cls, schema: "Schema", *, dense_vectors: int) -> dict[str, Any]:
        """Return the number of histories in the schema and the length of the longest."""
        longest = max((s.max_length for s in schema.sequences), default=1)
        return {"histories": max(1, len(schema.sequences)), "length": longest}

    def forward(self, x: Tensor, history: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits [B, labels]; tokens of the history beyond its length are ignored."""
        x = self.enter(x)
        if history.dim() != 3 or history.shape[2] != self.config.histories * self.config.d:
            expected = f"[B, T, {self.config.histories * self.config.d}]"
            raise ValueError(f"InterFormer expects a history of shape {expected}, got {tuple(history.shape)}")
        s = self.merge(history.to(compute_dtype(history)))
        out: Tensor = self.head(self.exchange(x, s, lengths))
        return out

    def exchange(self, x: Tensor, s: Tensor, lengths: Tensor) -> Tensor:
        """Return [X_sum || S_sum] after all layers, flattened."""
        cls = self.config.cls
        x_sum = self.summaries[0].summarise_x(x)  # type: ignore[operator]
        s = torch.cat([x_sum, s], 1)
        mask = torch.arange(s.shape[1], device=s.device) < cls + lengths[:, None]
        s_sum = self.summaries[0].summarise_s(s, mask, lengths)  # type: ignore[operator]
        for layer, summary in zip(self.layers, list(self.summaries)[1:], strict=True):
            x, s = layer(x, s, mask, x_sum, s_sum)
            x_sum, s_sum = summary.summarise_x(x), summary.summarise_s(s, mask, lengths)  # type: ignore[operator]
        return torch.cat([x_sum, s_sum], 1).flatten(1)

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return one example with a history of maximum length, on the meta device."""
        history = torch.empty(1, self.config.length, self.config.histories * self.config.d, device="meta")
        return (*super().example_inputs(), history, torch.empty(1, dtype=torch.int64, device="meta"))


SIZES = {
    "tiny": InterFormerConfig(),
    "small": InterFormerConfig(d=32, layers=2, heads=4, length=50, hidden=128, top=(256, 128)),
    "medium": InterFormerConfig(
        n=64, d=128, layers=4, heads=4, length=256, hidden=2048, backbone="dhen", top=(2048, 1024)
    ),
    "large": InterFormerConfig(
        n=128, d=128, layers=5, heads=4, length=256, hidden=8192, backbone="dhen", top=(8192, 4096)
    ),
}
