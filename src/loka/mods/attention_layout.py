"""attention_layout: self-attention of nn.MultiheadAttention reads its packed projection where it lies.

    q, k, v = views of x W^T + b        then scaled_dot_product_attention, then out_proj

torch's own forward, where its fused encoder kernel cannot run (training; any layer in low precision inside), copies the packed projection into three tensors first: on an encoder of 4 x 1024 on an
H200 that and the GEMM it forces take a quarter of the step. Here the three are views. Calls that are not plain self-attention (another key, a mask, attention weights asked for, added
biases) run torch's forward as before. The same function, up to rounding.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from loka.mods.editor import Editor
from loka.records.mods import ModClass


class PackedAttention(nn.Module):
    """Mixed in front of nn.MultiheadAttention."""

    in_proj_weight: Tensor
    in_proj_bias: Tensor | None
    out_proj: nn.Linear
    num_heads: int
    dropout: float
    batch_first: bool

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """(output, None) for plain self-attention, otherwise torch's own."""
        if args or not _is_plain(query, key, value, kwargs):
            return super().forward(query, key, value, *args, **kwargs)
        packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        rows, columns, width = packed.shape
        heads = packed.view(rows, columns, 3, self.num_heads, width // 3 // self.num_heads)
        order = (0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)  # to [batch, head, position, width]
        q, k, v = (part.permute(order) for part in heads.unbind(2))
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        back = seen.permute(0, 2, 1, 3) if self.batch_first else seen.permute(2, 0, 1, 3)
        return F.linear(back.reshape(rows, columns, width // 3), self.out_proj.weight, self.out_proj.bias), None


def _is_plain(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Self-attention on a batch, without masks, whose weights nobody wants."""
    same = query is key and key is value and not query.is_nested and query.dim() == 3
    bare = all(options.get(name) is None for name in ("key_padding_mask", "attn_mask"))
    return same and bare and options.get("need_weights") is False and not options.get("is_causal", False)


def _is_packed(module: Any) -> bool:
    return module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn


@dataclass(frozen=True)
class AttentionLayout:
    """Read the packed projection where it lies. It has no options."""

    name: ClassVar[str] = "attention_layout"
    effect: ClassVar[ModClass] = "rounding"

    def rewrite(self, editor: Editor) -> None:
        """Every nn.MultiheadAttention with one packed projection."""
        for name, module in list(editor.modules(nn.MultiheadAttention)):
            if type(module).forward is not nn.MultiheadAttention.forward:
                editor.leave(name, "it has a forward of its own")
            elif not _is_packed(module):
                editor.leave(name, "its projections are not packed, or it adds keys of its own")
            else:
                editor.mix(name, PackedAttention)
                editor.change(name, "q, k and v are views of one projection", "rounding")
