"""attention_layout: self-attention of nn.MultiheadAttention as two linears around one attention kernel.

    q, k, v = views of in_proj(x)        then scaled_dot_product_attention, then out_proj

torch's own forward multiplies by the weights of its projections without calling a module, so nobody can watch, plan or convert them; and where its fused encoder kernel cannot run (training; any layer in
low precision inside) it copies the packed projection into three tensors first: on an encoder of 4 x 1024 on an H200 that and the GEMM it forces take a quarter of the step. Here both projections
are linears that are called, sites like any other, and q, k and v are views.

`in_proj` is a linear over the attention's own `in_proj_weight` and `in_proj_bias`: the same Parameters under the names they had, nothing new in a state_dict. Attention over another key, and
unbatched input, run torch's forward as before. The same function, up to rounding.
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
from loka.units.flow import Flow, Unknown


class Projection(nn.Linear):
    """q, k and v of an nn.MultiheadAttention as a linear. The attention owns the parameters, saves and loads them."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = attention.in_proj_weight.shape
        self.follow(attention)

    def follow(self, attention: nn.Module) -> None:
        """Take the parameters that the attention has now."""
        self._parameters["weight"] = attention._parameters["in_proj_weight"]
        self._parameters["bias"] = attention._parameters.get("in_proj_bias")

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the attention does."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the attention does."""


class PackedAttention(nn.Module):
    """Mixed in front of nn.MultiheadAttention."""

    loka_lent: ClassVar[tuple[str, ...]] = ("in_proj_weight", "in_proj_bias")  # `wrapping.LENT`
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
        """As nn.MultiheadAttention: (output, weights or None)."""
        if not (query is key and key is value) or query.is_nested or query.dim() != 3:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal says what attn_mask is, and there is none; hint: pass attn_mask too")
        if self.in_proj._parameters["weight"] is not self._parameters["in_proj_weight"]:
            self.in_proj.follow(self)  # somebody assigned another Parameter
        packed = self.in_proj(query)
        rows, columns, width = packed.shape
        heads = packed.view(rows, columns, 3, self.num_heads, width // 3 // self.num_heads)
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)  # to [batch, head, position, width]
        q, k, v = (part.permute(order) for part in heads.unbind(2))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _merge(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            seen, weights = _attend(q, k, v, mask, dropout)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            seen, weights = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal), None
        back = seen.permute(0, 2, 1, 3) if self.batch_first else seen.permute(2, 0, 1, 3)
        return self.out_proj(back.reshape(rows, columns, width // 3)), weights


def _merge(attention: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as one that is added to the scores [batch, head, position, position]."""
    batch, heads, length, _ = q.shape
    parts = []
    if attention is not None:
        whole = attention.view(batch, heads, length, -1) if attention.dim() == 3 else attention
        parts.append(_additive(whole, q.dtype))
    if padding is not None:
        parts.append(_additive(padding[:, None, None, :], q.dtype))
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a position is seen, -inf where it is not; numbers are what they are."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    return mask.to(dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    """Attention whose weights somebody wants, [batch, head, position, position]."""
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


def _attends_elsewhere(flow: Flow | Unknown, name: str) -> str | None:
    """Whether the example shows a call over another key: nothing would be gained there."""
    spans = [] if isinstance(flow, Unknown) else flow.spans_of(name)
    for span in spans:
        given = dict(span.arguments)
        used = {given.get(i, given.get(word)) for i, word in enumerate(("query", "key", "value"))}
        if len(used) > 1:
            return "it attends over another key, for which torch's own forward is kept"
    return None


@dataclass(frozen=True)
class AttentionLayout:
    """Call the projections of self-attention as linears. It has no options."""

    name: ClassVar[str] = "attention_layout"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Every nn.MultiheadAttention with one packed projection."""
        for name, module in list(editor.modules(nn.MultiheadAttention)):
            assert isinstance(module, nn.MultiheadAttention)
            if why := _refuse(module) or _attends_elsewhere(editor.flow, name):
                editor.leave(name, why)
                continue
            editor.mix(name, PackedAttention)
            editor.add(name, "in_proj", Projection(module))
            editor.mark(f"{name}.out_proj", "loka_called", True)
            editor.change(name, "its projections are linears, q, k and v views of one", "rounding")
