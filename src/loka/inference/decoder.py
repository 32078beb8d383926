"""Beam search: the context once, then one step per level over all beams of all requests, with shapes known in advance.

    h [R w, d]      the newest position of every beam; w = 1 at the first level, then the beam width
    delta           the output of the last sub-layer, not yet added to h: the norm that follows adds it in the same pass
    caches          per block, keys and values [levels - 1, R, W, H, D] of earlier steps; reordering beams does not move
                    them, and those of the current step are read where its projection wrote them
    lines           per earlier step, the ancestor in that step of every current beam: [R, w]

Control flow does not depend on the values of a request, so the whole function can be captured in one CUDA graph.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.formats import QTensor
from loka.inference.constraint import Constraint
from loka.inference.context import PackedContext, Pair
from loka.inference.glue import Glue
from loka.inference.weights import Operand, PackedBlock, PackedExperts, PackedModel, PackedSwiGLU
from loka.kernels.beam_attention import ancestor_attention, beam_attention
from loka.kernels.grouped_mm import combine, gather
from loka.models.onerec import OneRecConfig


@dataclass(frozen=True)
class Inputs:
    """A padded batch: codes int64 [R, S, columns] newest first, lengths int64 [R] in items, user features [R, F]."""

    codes: Tensor
    lengths: Tensor
    static: Tensor | None


@dataclass(frozen=True)
class Found:
    """Ids int64 [R, W, levels] and log-probabilities float32 [R, W], best first; leaves of the trie [R, W], if any."""

    codes: Tensor
    scores: Tensor
    nodes: Tensor | None


def beam_widths(codebooks: tuple[int, ...], beams: int) -> list[int]:
    """Return the number of beams before each level and after the last: 1, then `beams` or the number of prefixes."""
    widths = [1]
    for size in codebooks:
        widths.append(min(beams, widths[-1] * size))
    return widths


class Decoder:
    """Run a packed model on a batch. `narrow` is tuned for the rows of the first level, `wide` for later ones."""

    def __init__(
        self,
        config: OneRecConfig,
        narrow: PackedModel,
        wide: PackedModel,
        context: PackedContext,
        constraints: list[Constraint],
        glue: Glue,
        *,
        beams: int,
    ) -> None:
        self.config, self.narrow, self.wide, self.context = config, narrow, wide, context
        self.constraints, self.glue, self.beams = constraints, glue, beams
        self.widths = beam_widths(config.codebooks, beams)
        self.backends = glue.backends
        self.dtype = wide.table.dtype

    def make_caches(self, requests: int, storage: list[Tensor] | None = None) -> list[Pair]:
        """Return memory for keys and values of every block, taken from the flat tensors of `storage` if given."""
        c = self.config
        shape = (2, c.levels - 1, requests, max(self.widths[:-1]), c.heads, c.d // c.heads)
        size = torch.Size(shape).numel()
        if storage is None:
            storage = [torch.empty(size, dtype=self.dtype, device=self.wide.table.device) for _ in range(c.layers)]
        pairs = [flat[:size].view(shape) for flat in storage]
        return [(pair[0], pair[1]) for pair in pairs]

    def generate(self, inputs: Inputs, caches: list[Pair]) -> Found:
        """Generate the best ids of every request."""
        pairs = self.context(inputs.codes, inputs.static, self.glue)
        seen = (inputs.lengths + 1).to(torch.int32)
        requests, device = inputs.codes.shape[0], inputs.codes.device
        scores = torch.zeros(requests, 1, device=device)
        nodes: Tensor | None = torch.zeros(requests, 1, dtype=torch.int64, device=device)
        lines: list[Tensor] = []
        spelled: list[Tensor] = []
        for level in range(self.config.levels):
            model = self.narrow if level == 0 else self.wide
            h = self._embed(model, level, requests, spelled)
            h, delta = self._blocks(model, h, pairs, seen, caches, lines, requests)
            logits = self._head(model, level, h, delta).view(requests, self.widths[level], -1)
            choice = self.constraints[level].choose(logits, scores, nodes, self.widths[level + 1])
            scores, nodes = choice.scores, choice.nodes
            lines = [line.gather(1, choice.parents) for line in lines] + [choice.parents]
            spelled = [codes.gather(1, choice.parents) for codes in spelled] + [choice.codes]
        return Found(torch.stack(spelled, 2), scores, nodes)

    def _embed(self, model: PackedModel, level: int, requests: int, spelled: list[Tensor]) -> Tensor:
        if level == 0:
            return model.begin.expand(requests, -1).contiguous()
        return F.embedding(spelled[-1].flatten() + model.first_rows[level - 1], model.table)

    def _blocks(
        self,
        model: PackedModel,
        h: Tensor,
        pairs: list[Pair],
        seen: Tensor,
        caches: list[Pair],
        lines: list[Tensor],
        requests: int,
    ) -> tuple[Tensor, Tensor]:
        width = h.shape[0] // requests
        none = torch.empty(0, requests, width, dtype=torch.int32, device=h.device)
        ancestors = torch.stack(lines).to(torch.int32) if lines else none
        delta: Tensor | None = None
        for block, cache in zip(model.blocks, caches, strict=True):
            h, delta = self._cross(block, h, delta, pairs[block.pair], seen, requests)
            h, delta = self._self(block, h, delta, cache, ancestors)
            h, delta = self._ffn(block, h, delta)
        assert delta is not None  # a model has blocks
        return h, delta

    def _cross(
        self, block: PackedBlock, h: Tensor, delta: Tensor | None, pair: Pair, seen: Tensor, requests: int
    ) -> tuple[Tensor, Tensor]:
        x, _, h = self.glue.add_norm(h, delta, block.cross_norm, block.query.activation)
        q = block.query(x, self.dtype)
        heads = q.view(requests, -1, self.config.heads, self.config.d // self.config.heads)
        out = beam_attention(heads, *pair, seen, backend=self.backends.get("beam_attention", "auto"))
        return h, block.cross_out(out.view_as(q), self.dtype)

    def _self(
        self, block: PackedBlock, h: Tensor, delta: Tensor, cache: Pair, ancestors: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, _, h = self.glue.add_norm(h, delta, block.self_norm, block.qkv.activation)
        steps, requests, width = ancestors.shape
        c = self.config
        qkv = block.qkv(x, self.dtype).view(requests, width, 3, c.heads, c.d // c.heads)
        # fuse the quantization into attention unless a backend for quantize was configured
        spec = None if "quantize" in self.backends else block.self_out.activation
        name = self.backends.get("beam_attention", "auto")
        keep = steps < c.levels - 1
        q, k, v = qkv.unbind(2)
        out = ancestor_attention(q, k, v, *cache, ancestors, keep=keep, spec=spec, backend=name)
        return h, block.self_out(out if isinstance(out, QTensor) else out.view(h.shape), self.dtype)

    def _ffn(self, block: PackedBlock, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        ffn = block.ffn
        if isinstance(ffn, PackedSwiGLU):
            x, _, h = self.glue.add_norm(h, delta, block.ffn_norm, ffn.gate_up.activation)
            return h, self._swiglu(ffn, x)
        x, plain, h = self.glue.add_norm(h, delta, block.ffn_norm, ffn.specs[0], plain=True)
        assert plain is not None  # plain=True
        return h, self._mixture(ffn, x, plain)

    def _swiglu(self, ffn: PackedSwiGLU, x: Operand) -> Tensor:
        both = ffn.gate_up(x, self.dtype)
        return ffn.down(self.glue.gate(both, ffn.activation, ffn.down.activation), self.dtype)

    def _mixture(self, moe: PackedExperts, x: Operand, plain: Tensor) -> Tensor:
        sorting, gates = self.glue.route(plain, moe)
        rows = gather(x, sorting)
        if moe.fused:
            inner = moe.multiply_gated(rows, sorting.offsets, self.dtype)
        else:
            both = moe.expand(rows, sorting.offsets, self.dtype)
            inner = self.glue.gate(both, moe.activation, moe.specs[1])
        out = moe.reduce(inner, sorting.offsets, self.dtype)
        apart = None
        if moe.shared is not None:
            same = moe.shared.gate_up.activation == moe.specs[0]
            apart = self._swiglu(moe.shared, x if same else moe.shared.gate_up.prepare(plain))
        return combine(out, sorting, gates, add=apart)

    def _head(self, model: PackedModel, level: int, h: Tensor, delta: Tensor) -> Tensor:
        head = model.heads[level]
        x, _, _ = self.glue.add_norm(h, delta, model.head_norms[level], head.activation)
        return head(x, self.dtype)
