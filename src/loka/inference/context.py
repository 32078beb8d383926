"""Compute the context of every request once: keys and values that all blocks and all beams share.

Tokens are laid out newest first, after the static token:

    0            static token of the user
    1 ... n      items by age: token t has age t - 1, so the `short` most recent items are always tokens 1 ... short

Attention does not depend on the order, and with this one nothing has to be moved: positions are a slice of a table, the
short-term and the long-term projection each take a slice, and the real tokens of a request are a prefix of length n +
1, which is what kernels.beam_attention expects.

In E4M3, keys and values need no scales: they come out of a norm, so the root mean square of a row is that of the norm's
gains. While that is between 1/4 and 16, no value near the mean is subnormal and none below 28 times the mean is
clipped. A model outside of that range, or without norms, is not supported.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loka.formats import Spec
from loka.inference.glue import Glue
from loka.inference.weights import PackedLinear, PackedNorm, Placement
from loka.kernels.quantize import quantize, quantize_both, quantize_transposed
from loka.models.onerec import ContextProcessor, OneRec

Pair = tuple[Tensor, Tensor]
ROUNDED = Spec.parse("e4m3:tensor:static")
GAINS = (0.25, 16.0)  # range of the root mean square of a norm's gains that E4M3 without a scale supports


@dataclass(frozen=True)
class PackedContext:
    """The weights of the context processor, and the tables it reads. `one` is the scale of a context in E4M3."""

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
    one: Tensor | None

    @classmethod
    def of(cls, model: OneRec, placement: Placement, table: Tensor, *, cache: str = "plain") -> "PackedContext":
        """Pack a OneRec module. `table` is the engine's copy of its code table, `cache` the format of keys, values."""
        part: ContextProcessor = model.context
        config = model.config
        chunk_norms = [PackedNorm.of(n, placement) for n in part.chunk_norms]
        if cache == "e4m3":
            _check_gains(chunk_norms)
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
            chunk_norms=chunk_norms,
            recent=config.short,
            groups=config.g_kv,
            pairs=config.l_kv,
            one=torch.ones((), device=placement.device) if cache == "e4m3" else None,
        )

    def __call__(self, codes: Tensor, static: Tensor | None, glue: Glue) -> list[Pair]:
        """Return pairs of keys and values [R, S + 1, G, D] of codes int64 [R, S, columns], newest first, padded.

        In E4M3 they may be longer (`round_context`).
        """
        requests, length, _ = codes.shape
        dtype = self.table.dtype
        cut = min(self.recent, length)
        parts = [self._static(requests, static)]
        # each projection embeds its own slice: a slice of all items would have to be copied for the GEMM
        for linear, span in ((self.short, slice(0, cut)), (self.long, slice(cut, length))):
            if span.start < span.stop:
                items = glue.embed(codes[:, span], self.positions[span], self.first_rows, self.table, self.item_table)
                parts.append(self._apply(linear, items))
        wide = self._apply(self.project, glue.join(parts, self.norm))
        chunks = wide.chunk(len(self.chunk_norms), -1)
        made = [glue.join([c], n).to(dtype) for c, n in zip(chunks, self.chunk_norms, strict=True)]
        step = len(self.chunk_norms) // self.pairs
        if self.one is not None:
            return [
                round_context(made[i * step], made[i * step + step - 1], self.one, self.groups)
                for i in range(self.pairs)
            ]
        heads = [c.view(requests, length + 1, self.groups, -1) for c in made]
        return [(heads[i * step], heads[i * step + step - 1]) for i in range(self.pairs)]

    def _static(self, requests: int, static: Tensor | None) -> Tensor:
        if self.static is None:
            assert self.seed is not None  # set if there is no static projection
            return self.seed.expand(requests, -1, -1)
        assert static is not None  # checked by check_request
        return self._apply(self.static, static.to(self.table.dtype).unsqueeze(1))

    @staticmethod
    def _apply(linear: PackedLinear, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        return linear(flat, x.dtype).view(*x.shape[:-1], -1)


def round_context(keys: Tensor, values: Tensor, one: Tensor, groups: int) -> Pair:
    """Round the keys and values of a context to E4M3, values by columns, as FP8 products read them.

    TMA reads columns from multiples of 16 bytes on, so contexts of several requests are padded with zeros to a multiple
    of 16 tokens. (The lengths of requests say which are read.)

    Args:
        keys: [R, S, G D].
        values: the same shape. If it is the same tensor as `keys`, it is read once.
        one: the scale, a tensor on the same device.
        groups: G, the number of key-value heads.

    Returns:
        Keys and values [R, S, G, D], S padded.

    Example:
        >>> k, v = round_context(x, x, torch.ones(()), groups=2)
    """
    together = values is keys
    if keys.shape[0] > 1 and (missing := -keys.shape[1] % 16):
        keys = nn.functional.pad(keys, (0, 0, 0, missing))
        values = keys if together else nn.functional.pad(values, (0, 0, 0, missing))
    requests, length, wide = keys.shape
    flat, other = keys.reshape(-1, wide), values.reshape(-1, wide)
    if together:
        k, v = quantize_both(flat, ROUNDED, ROUNDED, scale=one, transpose_scale=one)
    else:
        k = quantize(flat, ROUNDED, scale=one)
        v = quantize_transposed(other, ROUNDED, scale=one)
    columns = v.data.view(groups, wide // groups, requests, length)
    return k.data.view(requests, length, groups, wide // groups), columns.permute(2, 3, 0, 1)


def _check_gains(norms: list[PackedNorm]) -> None:
    """Raise ValueError if keys or values may lie outside the range of unscaled E4M3."""
    for place, norm in enumerate(norms):
        hint = "hint: context_cache='plain'"
        if norm.kind == "none":
            raise ValueError(f"context_cache='e4m3' has no scales and needs a norm before keys and values; this model has none; {hint}")  # fmt: skip
        gain = 1.0 if norm.weight is None else float(norm.weight.float().square().mean().sqrt())
        if not GAINS[0] <= gain <= GAINS[1]:
            raise ValueError(
                f"context_cache='e4m3' has no scales; norm {place} of the context has gains of {gain:.3g}, "
                f"expected {GAINS[0]} to {GAINS[1]}; {hint}"
            )
