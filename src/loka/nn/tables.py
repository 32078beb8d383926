"""Embedding tables whose rows are stored, and trained, in low precision.

    table = EmbeddingBag(10_000_000, 64, rows="int8:row")    # as nn.EmbeddingBag; a byte per element, a scale per row
    names = quantize_tables(model, rows="int8:row")          # replace every nn.Embedding and nn.EmbeddingBag of a model
    optimizer = TableOptimizer(model, Rule("rowwise_adagrad", lr=0.02))    # of loka.nn.table_optimizer

There is no float32 copy. Backward keeps the gradient of the looked-up embeddings (of the size of a batch) until
`TableOptimizer.step` applies it: it sums duplicates, makes one step of the rule in float32, and rounds stochastically
to the row format (`loka.kernels.embedding_update`), so that small updates, which rounding to nearest would lose, take
effect on average. A forward that reads `weight` looks every row up, and trains them as any other lookup.

    training    int8:row, bfloat16, e4m3:row:pow2 (keep the hottest rows in float32: `hot`), float32
    serving     these, e4m3:row, float16 and int4:row

The `state_dict` is that of a float table: `weight` in float32. Loading it rounds to nearest; the exact codes and scales
are part of the optimizer's state, so that a run resumes bit for bit. There is no `.grad`: autograd and
DistributedDataParallel see `anchor`, a scalar parameter.

Not supported: `max_norm`, `scale_grad_by_freq` and `mode="max"`, which raise, and sharding, which TorchRec does.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from loka.kernels.embedding_bag import Rows, embedding_bag
from loka.kernels.embedding_bag.rows import NAN_SCALE, fill_store
from loka.kernels.embedding_update import TRAINABLE
from loka.nn.replacing import find_plain_holder, is_watched, runs_as

Lookup = tuple[Tensor, Tensor | None, Tensor | None, str, Tensor]  # indices, offsets, weights, mode, gradient


class Table(nn.Module):
    """The base class of Embedding and EmbeddingBag.

    Args:
        num_embeddings: number of rows.
        embedding_dim: width of a row.
        rows: format of the rows, e.g. `int8:row`.
        weight: initial float values; None for uniform in +-1/sqrt(width).
        hot: share of the rows, the most frequent ones in training, that are kept in float32; 0 for none.
        name: seeds the random numbers of stochastic rounding; tables of the same name round alike.
        backend: of lookups and updates.
    """

    store: Tensor
    slot: Tensor | None
    kept: Tensor | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        rows: str = "int8:row",
        weight: Tensor | None = None,
        hot: float = 0.0,
        name: str = "",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if not 0 <= hot < 1:
            raise ValueError(f"hot is the share of rows that are kept in float32, 0 to 1, got {hot}")
        if weight is None:
            weight = torch.empty(num_embeddings, embedding_dim).uniform_(-(embedding_dim**-0.5), embedding_dim**-0.5)
        if weight.shape != (num_embeddings, embedding_dim):
            raise ValueError(f"expected weights [{num_embeddings}, {embedding_dim}], got {tuple(weight.shape)}")
        self.num_embeddings, self.embedding_dim, self.kind = num_embeddings, embedding_dim, rows
        self.hot, self.backend = hot, backend
        self.stream = zlib.crc32(name.encode())
        self.anchor = nn.Parameter(torch.zeros((), device=weight.device))
        self.pending: list[Lookup] = []
        store, self.spec = fill_store(weight, rows)
        self.register_buffer("store", store, persistent=False)  # codes and scales in one buffer
        self.register_buffer("slot", None, persistent=False)
        self.register_buffer("kept", None, persistent=False)

    @property
    def rows(self) -> Rows:
        """The rows; a view."""
        return Rows.in_store(self.store, self.spec, self.embedding_dim, slot=self.slot, hot=self.kept)

    @property
    def data(self) -> Tensor:
        """The codes of the rows; a view."""
        return self.rows.data

    @property
    def scale_code(self) -> Tensor | None:
        """The scales of the rows as stored, a view; None if the format has none."""
        return self.rows.scale_code

    @property
    def weight(self) -> Tensor:
        """The table in float32; a copy. Its gradient is one of the table, as that of a lookup of every row."""
        if (
            torch.is_grad_enabled() and self.is_trainable
        ):  # a forward may multiply by it: items as the classes of a softmax
            return self.look_up(torch.arange(self.num_embeddings, device=self.store.device), None, None, "item")
        return self.rows.dequantize()

    @property
    def is_trainable(self) -> bool:
        """Whether `TableOptimizer` trains it: its format allows it, and the anchor is not frozen."""
        return self.kind in TRAINABLE and self.anchor.requires_grad

    def keep_high(self, rows: Tensor) -> None:
        """Keep exactly these rows in float32 from now on; those kept before are rounded to nearest."""
        weight = self.rows.dequantize()
        if self.slot is not None and self.kept is not None:  # write them back into the table
            leaving = (self.slot >= 0).nonzero().squeeze(1)
            back = Rows.of(weight[leaving], self.kind)
            self.data[leaving] = back.data
            if self.scale_code is not None and back.scale_code is not None:
                self.scale_code[leaving] = back.scale_code
        slot = torch.full((self.num_embeddings,), -1, dtype=torch.int32, device=self.data.device)
        slot[rows] = torch.arange(len(rows), dtype=torch.int32, device=self.data.device)
        self.slot, self.kept = slot, weight[rows].contiguous()

    def witnesses(self) -> list[Tensor]:
        """Return float tensors that have a NaN or Inf if the table has one."""
        parts = [] if self.kept is None else [self.kept]
        if self.spec is None or self.scale_code is None:
            parts.append(self.data)
        elif len(self.scale_code):
            lost = self.scale_code.amax() == NAN_SCALE
            if self.spec.format.has_nan:  # all bits set, except for the sign
                lost = lost | ((self.data.view(torch.uint8) & 0x7F).amax() == 0x7F)
            parts.append(torch.where(lost, torch.nan, 0.0).view(1))
        return [part for part in parts if part.numel()]

    def look_up(self, indices: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str) -> Tensor:
        """Return rows, pooled or single, with a gradient if one is needed."""
        wanted = torch.is_grad_enabled() and self.is_trainable
        if not wanted and not (weights is not None and weights.requires_grad):
            return embedding_bag(self.rows, indices, offsets, weights=weights, mode=mode, backend=self.backend)
        result: Tensor = _LookUp.apply(self.anchor, weights, self, indices, offsets, mode)  # type: ignore[no-untyped-call]
        return result

    def pool(self, indices: Tensor, offsets: Tensor, *, mode: str = "mean") -> Tensor:
        """Pool the bags indices[offsets[b] : offsets[b + 1]] -> [B, D]."""
        return self.look_up(indices, offsets, None, mode)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.rows.dequantize()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool, missing: list[str], unexpected: list[str], errors: list[str]
    ) -> None:  # fmt: skip
        key = f"{prefix}weight"
        if key not in state_dict:
            if strict:
                missing.append(key)
            return
        weight = state_dict[key]
        if weight.shape != (self.num_embeddings, self.embedding_dim):
            errors.append(f"{key}: expected {(self.num_embeddings, self.embedding_dim)}, got {tuple(weight.shape)}")
            return
        with torch.no_grad():
            made = Rows.of(weight.to(self.data.device), self.kind)
            self.data.copy_(made.data)
            if self.scale_code is not None and made.scale_code is not None:
                self.scale_code.copy_(made.scale_code)
            if self.slot is not None and self.kept is not None:
                at = (self.slot >= 0).nonzero().squeeze(1)
                self.kept[self.slot[at].long()] = weight.to(self.kept)[at]

    def extra_repr(self) -> str:
        """Shape and format."""
        hot = f", hot={self.hot:g}" if self.hot else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows={self.kind}{hot}"


class _LookUp(torch.autograd.Function):
    """A lookup whose gradient is kept for the optimizer instead of becoming a dense one."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        table: Table,
        indices: Tensor,
        offsets: Tensor | None,
        mode: str,
    ) -> Tensor:
        ctx.table, ctx.mode = table, mode
        ctx.save_for_backward(anchor, weights, indices, offsets)
        return embedding_bag(table.rows, indices, offsets, weights=weights, mode=mode, backend=table.backend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        anchor, weights, indices, offsets = ctx.saved_tensors
        of_weights = None
        if weights is not None and ctx.needs_input_grad[1]:
            lengths = offsets.diff()
            bag = torch.repeat_interleave(torch.arange(len(lengths), device=grad.device), lengths)
            of_weights = (grad.float()[bag] * ctx.table.rows.take(indices)).sum(1).to(weights.dtype)
        if ctx.needs_input_grad[0]:
            held = None if weights is None else weights.detach()
            ctx.table.pending.append((indices, offsets, held, ctx.mode, grad.detach()))
        return torch.zeros_like(anchor), of_weights, None, None, None, None


class Embedding(Table):
    """`nn.Embedding` with low-precision rows.

    Args:
        num_embeddings: number of rows.
        embedding_dim: width of a row.
        padding_idx: a row without gradient.
        options: of Table: `rows`, `weight`, `hot`, `name`, `backend`.

    Example:
        >>> Embedding(1000, 64, rows="int8:row")(torch.tensor([[1, 2], [3, 4]])).shape
        torch.Size([2, 2, 64])
    """

    sparse = False  # the weight has no gradient tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        self.padding_idx = _positive(padding_idx, num_embeddings)

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape -> [..., D]."""
        flat = input.reshape(-1)
        out = self.look_up(flat, None, None, "item")
        if self.padding_idx is not None:  # keep its values, detach its gradient
            padding = (flat == self.padding_idx).unsqueeze(1)
            out = torch.where(padding, out.detach(), out)
        return out.view(*input.shape, self.embedding_dim)


class EmbeddingBag(Table):
    """`nn.EmbeddingBag` with low-precision rows.

    Args:
        num_embeddings: number of rows.
        embedding_dim: width of a row.
        mode: "sum" or "mean".
        include_last_offset: whether offsets end with the number of items.
        padding_idx: a row that bags ignore.
        options: of Table: `rows`, `weight`, `hot`, `name`, `backend`.

    Example:
        >>> bag = EmbeddingBag(1000, 64, mode="sum", rows="int8:row")
        >>> bag(torch.tensor([1, 2, 3]), torch.tensor([0, 2])).shape
        torch.Size([2, 64])
    """

    sparse = False

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode={mode!r}: expected 'sum' or 'mean'")
        super().__init__(num_embeddings, embedding_dim, **options)
        self.mode, self.include_last_offset = mode, include_last_offset
        self.padding_idx = _positive(padding_idx, num_embeddings)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Ids [L] with offsets, or [B, n] without -> [B, D]."""
        ids = input
        if ids.dim() == 2:
            if offsets is not None:
                raise ValueError("a 2-D input has bags of one length and takes no offsets")
            bags, length = ids.shape
            offsets = (
                torch.arange(0, (bags + 1) * length, length, device=ids.device) if length else ids.new_zeros(bags + 1)
            )
            ids = ids.reshape(-1)
            per_sample_weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        elif offsets is None:
            raise ValueError("a 1-D input needs offsets: where each bag begins")
        elif not self.include_last_offset:
            offsets = torch.cat((offsets, offsets.new_tensor([len(ids)])))
        if self.padding_idx is not None:
            real = ids != self.padding_idx
            before = torch.nn.functional.pad(real.cumsum(0), (1, 0))
            offsets, ids = before[offsets.long()], ids[real]
            per_sample_weights = None if per_sample_weights is None else per_sample_weights[real]
        return self.look_up(ids, offsets, per_sample_weights, self.mode)


def _positive(padding_idx: int | None, rows: int) -> int | None:
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx must be a row, {-rows} to {rows - 1}, got {padding_idx}")
    return padding_idx % rows


def hottest(counts: Tensor, share: float) -> Tensor:
    """Return the indices of the most frequent rows in ascending order; of equally frequent ones the first."""
    wanted = round(share * len(counts))
    return counts.sort(descending=True, stable=True).indices[:wanted].sort().values


def quantize_tables(
    model: nn.Module,
    *,
    rows: str = "int8:row",
    hot: float = 0.0,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> list[str]:
    """Replace the embedding tables of a model, in place, by low-precision ones with the same values, rounded.

    Args:
        model: any module, including TorchRec's unsharded EmbeddingBagCollection.
        rows: format of the rows.
        hot: share of rows kept in float32.
        filter_fn: (module, name) -> whether to replace it; None for all.

    Returns:
        The names of the replaced modules.

    Raises:
        ValueError: a table uses a feature that is not supported, or its weight is shared. Nothing was replaced.

    Example:
        >>> quantize_tables(model, rows="int8:row")
        ['embedding.table']
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and (filter_fn is None or filter_fn(module, name))
    ]
    if problems := [f"{name}: {reason}" for name, module in found for reason in refusals(module, model)]:
        raise ValueError(f"these tables cannot have rows of {rows}: {'; '.join(problems)}")
    made = {name: _low(module, rows, hot, name) for name, module in found}
    for name, module in found:
        replace_everywhere(model, module, made[name])
    return list(made)


def replace_everywhere(model: nn.Module, module: nn.Module, by: nn.Module) -> None:
    """Replace a module under all of its names in a model."""
    for name, held in list(model.named_modules(remove_duplicate=False)):
        if held is module:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, by)


def refusals(module: nn.Embedding | nn.EmbeddingBag, model: nn.Module) -> list[str]:
    """Return why a table cannot be replaced by one with low-precision rows; empty if it can."""
    problems = []
    if not runs_as(module, nn.Embedding, nn.EmbeddingBag):
        problems.append(f"a {type(module).__name__} with a forward of its own")
    if is_watched(module):
        problems.append("has hooks; hint: remove them first")
    if parametrize.is_parametrized(module):
        problems.append("has a parametrised weight; hint: remove the parametrisation")
    if module.max_norm is not None:
        problems.append("max_norm rescales rows when they are looked up")
    if module.scale_grad_by_freq:
        problems.append("scale_grad_by_freq")
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        problems.append("mode='max'")
    users = sum(1 for m in model.modules() for p in m._parameters.values() if p is module.weight)
    if users > 1:
        problems.append(f"its weight is shared by {users} modules")
    if (holder := find_plain_holder([module, module.weight], model)) is not None:
        problems.append(
            f"the attribute {holder} holds it, too, and would keep the old table; hint: hold tables in an nn.ModuleList or "
            "nn.ModuleDict, or look the attribute up when it is needed"
        )
    return problems


def _low(module: nn.Embedding | nn.EmbeddingBag, rows: str, hot: float, name: str) -> Table:
    shared: dict[str, Any] = {
        "rows": rows,
        "weight": module.weight.detach(),
        "hot": hot,
        "name": name,
        "padding_idx": module.padding_idx,
    }
    table: Table
    if isinstance(module, nn.EmbeddingBag):
        table = EmbeddingBag(
            module.num_embeddings, module.embedding_dim, mode=module.mode, include_last_offset=module.include_last_offset, **shared
        )  # fmt: skip
    else:
        table = Embedding(module.num_embeddings, module.embedding_dim, **shared)
    table.anchor.requires_grad_(module.weight.requires_grad)
    return table.train(module.training)
