"""The context of every request, once per request: keys and values that all blocks and all beams share.

Tokens are laid out newest first behind the static one:

    0            static token of the user
    1 ... n      items by age: the newest is token 1, so token t has age t - 1, and the `short` most recent are always tokens 1 ... short

Order does not matter to attention, and in this one nothing has to be moved: positions are a slice of a table, the short-term and the long-term
projection each take a slice, and the real tokens of a request are a prefix of length n + 1, which is what kernels.beam_attention wants.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.inference.glue import normalize
from loka.inference.weights import PackedLinear, PackedNorm, Placement
from loka.models.onerec import ContextProcessor, OneRec

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PackedContext:
    """The context processor, and the tables it reads."""

    table: Tensor
    first_rows: Tensor
    item_table: Tensor | None
    positions: Tensor
    static: PackedLinear | None
    seed: Tensor | None
    long: PackedLinear
    short: PackedLinear
    norm: PackedNorm
    project: PackedLinear
    chunk_norms: list[PackedNorm]
    recent: int
    groups: int
    pairs: int

    @classmethod
    def of(cls, model: OneRec, placement: Placement, table: Tensor) -> "PackedContext":
        """From a OneRec module; `table` is its code table as the engine has it."""
        part: ContextProcessor = model.context
        config = model.config
        static = part.static if isinstance(part.static, nn.Linear) or config.static else None
        return cls(
            table=table,
            first_rows=torch.tensor(model.codes.starts, dtype=torch.int64, device=placement.device),
            item_table=None if model.items is None else placement.place(model.items.table.weight),
            positions=placement.place(part.positions.weight),
            static=None if static is None else PackedLinear.of(static, placement),
            seed=placement.place(part.static.weight) if static is None else None,
            long=PackedLinear.of(part.long, placement),
            short=PackedLinear.of(part.short, placement),
            norm=PackedNorm.of(part.norm, placement),
            project=PackedLinear.of(part.project, placement),
            chunk_norms=[PackedNorm.of(n, placement) for n in part.chunk_norms],
            recent=config.short,
            groups=config.g_kv,
            pairs=config.l_kv,
        )

    def __call__(self, codes: Tensor, static: Tensor | None) -> list[Pair]:
        """codes int64 [R, S, columns], newest first, padded with any code; -> pairs of keys and values [R, S + 1, G, D]."""
        requests, length, _ = codes.shape
        dtype = self.table.dtype
        levels = len(self.first_rows)
        items = F.embedding(codes[..., :levels] + self.first_rows, self.table).sum(2)
        if self.item_table is not None:
            items = items + F.embedding(codes[..., levels], self.item_table)
        items = items + self.positions[:length]
        cut = min(self.recent, length)
        parts = [self._static(requests, static), self._apply(self.short, items[:, :cut])]
        if length > cut:
            parts.append(self._apply(self.long, items[:, cut:]))
        tokens = normalize(torch.cat(parts, 1), self.norm)
        wide = self._apply(self.project, tokens)
        chunks = wide.chunk(len(self.chunk_norms), -1)
        made = [normalize(c, n).to(dtype) for c, n in zip(chunks, self.chunk_norms, strict=True)]
        heads = [c.view(requests, length + 1, self.groups, -1) for c in made]
        step = len(self.chunk_norms) // self.pairs
        return [(heads[i * step], heads[i * step + step - 1]) for i in range(self.pairs)]

    def _static(self, requests: int, static: Tensor | None) -> Tensor:
        if self.static is None:
            assert self.seed is not None  # one or the other
            return self.seed.expand(requests, -1, -1)
        assert static is not None  # requests were checked
        return self._apply(self.static, static.to(self.table.dtype).unsqueeze(1))

    @staticmethod
    def _apply(linear: PackedLinear, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return linear(flat, x.dtype).view(*x.shape[:-1], -1)
