"""attention_layout: run the self-attention of nn.MultiheadAttention as two linears around one attention kernel.

    q, k, v = views of in_proj(x)        then scaled_dot_product_attention, then out_proj

torch's own forward multiplies by the projection weights without calling a module, so the projections cannot be probed,
planned or converted. Where its fused encoder kernel cannot run (in training, or with a low-precision layer inside), it
also copies the packed projection into three tensors: on an encoder of 4 x 1024 on an H200, this copy and the GEMM it
forces take a quarter of the step. With this mod both projections are called as linears, and q, k and v are views.

`in_proj` is a linear over the attention's own `in_proj_weight` and `in_proj_bias`. The Parameters keep their names, and
the state_dict does not change. Cross-attention and unbatched input run torch's forward as before. Effect: rounding.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch.nn.utils.parametrize as parametrize
from torch import Tensor, nn

from loka.mods.editor import Editor
from loka.records.mods import ModClass
from loka.units.flow import Flow
from loka.units.recording import Unknown


class Projection(nn.Linear):
    """The packed q, k, v projection of an nn.MultiheadAttention, which owns, saves and loads the parameters."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = attention.in_proj_weight.shape
        self.follow(attention)

    def follow(self, attention: nn.Module) -> None:
        """Use the parameters that the attention currently has."""
        self._parameters["weight"] = attention._parameters["in_proj_weight"]
        self._parameters["bias"] = attention._parameters.get("in_proj_bias")

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the attention saves the parameters."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the attention loads the parameters."""


class PackedAttention(nn.Module):
    """Mixin for nn.MultiheadAttention that calls its projections as linears."""

    loka_lent: ClassVar[tuple[str, ...]] = ("in_proj_weight", "in_proj_bias")  # see `loka.nn.wrapping.LENT`
    in_proj: Projection
    out_proj: nn.Linear
    num_heads: int
    dropout: float
    batch_first: bool

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        """Same as nn.MultiheadAttention: return (output, weights or None)."""
        if not (query is key and key is value) or query.is_nested or query.dim() != 3:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal says what attn_mask is, and there is none; hint: pass attn_mask too")
        if self.in_proj._parameters["weight"] is not self._parameters["in_proj_weight"]:
            self.in_proj.follow(self)  # another Parameter was assigned to the attention
        packed = self.in_proj(query)
        rows, columns, width = packed.shape
        heads = packed.view(rows, columns, 3, self.num_heads, width // 3 // self.num_heads)
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)  # to [batch, head, position, width]
        q, k, v = (part.permute(order) for part in heads.unbind(2))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _merge_masks(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            seen, weights = _attend_with_weights(q, k, v, mask, dropout)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            seen, weights = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
        back = seen.permute(0, 2, 1, 3) if self.batch_first else seen.permute(2, 0, 1, 3)
        return self.out_proj(back.reshape(rows, columns, width // 3)), weights


def _merge_masks(attention: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Merge both masks into one that is added to the scores [batch, head, position, position]."""
    batch, heads, length, _ = q.shape
    parts = []
    if attention is not None:
        whole = attention.view(batch, heads, length, -1) if attention.dim() == 3 else attention
        parts.append(_to_additive(whole, q.dtype))
    if padding is not None:
        parts.append(_to_additive(padding[:, None, None, :], q.dtype))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _to_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask (True: masked out) into 0 and -inf. A floating-point mask is only cast."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    return mask.to(dtype)


def _attend_with_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Compute attention and return its weights [batch, head, position, position] too."""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    weights = torch.softmax(scores if mask is None else scores + mask, -1)
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights.to(v.dtype) @ v, weights


def _refuse(module: nn.MultiheadAttention) -> str | None:
    if type(module).forward is not nn.MultiheadAttention.forward:
        return "it has a forward of its own"
    if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
        return "its projections are not packed, or it adds keys of its own"
    if module._parameters.get("in_proj_weight") is None or parametrize.is_parametrized(module):
        return "its projection is parametrised"
    return None


def _refuse_cross_attention(flow: Flow | Unknown, name: str) -> str | None:
    """Return a reason if the example shows cross-attention, which would gain nothing."""
    spans = [] if isinstance(flow, Unknown) else flow.spans_of(name)
    for span in spans:
        given = dict(span.arguments)
        used = {given.get(i, given.get(word)) for i, word in enumerate(("query", "key", "value"))}
        if len(used) > 1:
            return "it is called for cross-attention (another key or value), for which torch's own forward is kept"
    return None


@dataclass(frozen=True)
class AttentionLayout:
    """Call the projections of self-attention as linears. No options."""

    name: ClassVar[str] = "attention_layout"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Rewrite every nn.MultiheadAttention with one packed projection."""
        for name, module in list(editor.modules(nn.MultiheadAttention)):
            assert isinstance(module, nn.MultiheadAttention)
            if why := _refuse(module) or _refuse_cross_attention(editor.flow, name):
                editor.leave(name, why)
                continue
            editor.mix(name, PackedAttention)
            editor.add(name, "in_proj", Projection(module))
            editor.mark(f"{name}.out_proj", "loka_called", True)
            editor.change(name, "its projections are linears, q, k and v views of one", "rounding")
