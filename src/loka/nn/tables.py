"""Embedding tables whose rows are stored, and trained, in low precision.

    table = tables.EmbeddingBag(10_000_000, 64, rows="int8:row")          # as nn.EmbeddingBag; one byte an element, one scale a row
    swapped = tables.quantize_tables(model, rows="int8:row")              # every nn.Embedding and nn.EmbeddingBag of a model
    optimizer = tables.TableOptimizer(model, Rule("rowwise_adagrad", lr=0.02))

There is no float32 copy. The backward pass keeps the gradient of the looked-up embeddings (of the size of a batch) until `TableOptimizer.step` applies it: duplicates summed
first, one step of the rule in float32, stochastic rounding back into the row's format (`loka.kernels.embedding_update`). Small updates that rounding to nearest would lose
arrive on average.

    training    int8:row, bfloat16, e4m3:row:pow2 (keep the hottest rows in float32: `hot`), float32
    serving     these, e4m3:row, float16 and int4:row

`state_dict` has the key and the values a float table would have: `weight`, float32. Loading it rounds to nearest; the exact codes and scales are part of the optimiser's state,
so that a resumed run goes on bit for bit. A fused optimiser has no use for `.grad`: `anchor`, an empty parameter, is what autograd and DistributedDataParallel see.

Not here: `max_norm`, `scale_grad_by_freq`, `mode="max"`, which are refused; sharding, which is TorchRec's business.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from loka.kernels.embedding_bag import Rows, embedding_bag
from loka.kernels.embedding_bag.rows import fill_store
from loka.kernels.embedding_update import TRAINABLE

Lookup = tuple[Tensor, Tensor | None, Tensor | None, str, Tensor]  # indices, offsets, weights, mode, gradient


class Table(nn.Module):
    """The rows and what is asked of them. Base of Embedding and EmbeddingBag.

    Args:
        num_embeddings: rows.
        embedding_dim: their width.
        rows: their format, e.g. `int8:row`.
        weight: float values to start from; uniform in +-1/sqrt(width) where None.
        hot: share of the rows that are kept in float32, the most frequent ones of training; 0 for none.
        name: tells this table's random numbers from those of others; tables of the same name round alike.
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
        self.hot, self.table_name, self.backend = hot, name, backend
        self.stream = zlib.crc32(name.encode())
        self.anchor = nn.Parameter(torch.zeros((), device=weight.device))
        self.pending: list[Lookup] = []
        store, self.spec = fill_store(weight, rows)
        self.register_buffer("store", store, persistent=False)  # codes and scales in one: they move together
        self.register_buffer("slot", None, persistent=False)
        self.register_buffer("kept", None, persistent=False)

    @property
    def rows(self) -> Rows:
        """The rows, live."""
        return Rows.in_store(self.store, self.spec, self.embedding_dim, slot=self.slot, hot=self.kept)

    @property
    def data(self) -> Tensor:
        """The codes, live."""
        return self.rows.data

    @property
    def scale(self) -> Tensor | None:
        """The scales, live; None where rows have none."""
        return self.rows.scale

    @property
    def weight(self) -> Tensor:
        """The table as float32: a copy, for reading."""
        return self.rows.dequantize()

    @property
    def is_trainable(self) -> bool:
        """Whether `TableOptimizer` can train it: its format can, and nobody froze the anchor."""
        return self.kind in TRAINABLE and self.anchor.requires_grad

    def keep_high(self, rows: Tensor) -> None:
        """Keep these rows in float32 from now on, and no others; the others are rounded to nearest."""
        weight = self.weight
        if self.slot is not None and self.kept is not None:  # back into the table
            leaving = (self.slot >= 0).nonzero().squeeze(1)
            back = Rows.of(weight[leaving], self.kind)
            self.data[leaving] = back.data
            if self.scale is not None and back.scale is not None:
                self.scale[leaving] = back.scale
        slot = torch.full((self.num_embeddings,), -1, dtype=torch.int32, device=self.data.device)
        slot[rows] = torch.arange(len(rows), dtype=torch.int32, device=self.data.device)
        self.slot, self.kept = slot, weight[rows].contiguous()

    def witnesses(self) -> list[Tensor]:
        """Float tensors that hold a NaN or Inf where the table does."""
        parts = [t for t in (self.scale, self.kept) if t is not None]
        if self.spec is None:
            parts.append(self.data)
        elif self.spec.format.has_nan:  # a byte of all ones but the sign
            parts.append(torch.where((self.data.view(torch.uint8) & 0x7F).amax() == 0x7F, torch.nan, 0.0).view(1))
        return [part for part in parts if part.numel()]

    def look_up(self, indices: Tensor, offsets: Tensor | None, weights: Tensor | None, mode: str) -> Tensor:
        """Rows, pooled or single, with a gradient where one is wanted."""
        wanted = torch.is_grad_enabled() and self.is_trainable
        if not wanted and not (weights is not None and weights.requires_grad):
            return embedding_bag(self.rows, indices, offsets, weights=weights, mode=mode, backend=self.backend)
        result: Tensor = _LookUp.apply(self.anchor, weights, self, indices, offsets, mode)  # type: ignore[no-untyped-call]
        return result

    def pool(self, indices: Tensor, offsets: Tensor, *, mode: str = "mean") -> Tensor:
        """Bags offsets[b] to offsets[b + 1] of indices, [B, D]."""
        return self.look_up(indices, offsets, None, mode)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight

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
            if self.scale is not None and made.scale is not None:
                self.scale.copy_(made.scale)
            if self.slot is not None and self.kept is not None:
                at = (self.slot >= 0).nonzero().squeeze(1)
                self.kept[self.slot[at].long()] = weight.to(self.kept)[at]

    def extra_repr(self) -> str:
        """Shape and format."""
        hot = f", hot={self.hot:g}" if self.hot else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, rows={self.kind}{hot}"


class _LookUp(torch.autograd.Function):
    """A lookup whose gradient is kept for the optimiser instead of becoming a dense one."""

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
        num_embeddings: rows.
        embedding_dim: their width.
        padding_idx: a row that gets no gradient.
        options: of Table: `rows`, `weight`, `hot`, `name`, `backend`.

    Example:
        >>> Embedding(1000, 64, rows="int8:row")(torch.tensor([[1, 2], [3, 4]])).shape
        torch.Size([2, 2, 64])
    """

    sparse = False  # its gradient never is a tensor

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **options: Any) -> None:
        super().__init__(num_embeddings, embedding_dim, **options)
        self.padding_idx = _positive(padding_idx, num_embeddings)

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape -> [..., D]."""
        flat = input.reshape(-1)
        out = self.look_up(flat, None, None, "item")
        if self.padding_idx is not None:  # its values stay, its gradient is cut
            padding = (flat == self.padding_idx).unsqueeze(1)
            out = torch.where(padding, out.detach(), out)
        return out.view(*input.shape, self.embedding_dim)


class EmbeddingBag(Table):
    """`nn.EmbeddingBag` with low-precision rows.

    Args:
        num_embeddings: rows.
        embedding_dim: their width.
        mode: `sum` or `mean`.
        include_last_offset: whether offsets end with the number of items.
        padding_idx: a row that counts in no bag.
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
            raise ValueError(f"bags are pooled by sum or mean, not {mode!r}; max has no gradient for all its items")
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
    """The numbers of the most frequent rows, ascending; of equally frequent ones the first."""
    wanted = round(share * len(counts))
    return counts.sort(descending=True, stable=True).indices[:wanted].sort().values


def quantize_tables(
    model: nn.Module,
    *,
    rows: str = "int8:row",
    hot: float = 0.0,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> list[str]:
    """Swap the embedding tables of a model, in place, for low-precision ones with the same values, rounded.

    Args:
        model: any module; TorchRec's unsharded EmbeddingBagCollection included.
        rows: format of the rows.
        hot: share of rows kept in float32.
        filter_fn: (module, name) -> whether to swap; all where None.

    Returns:
        The names of the swapped modules.

    Raises:
        ValueError: a table asks for what low-precision rows cannot do, or its weight is shared; nothing was swapped then.

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
    for name, table in made.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, table)
    return list(made)


def refusals(module: nn.Embedding | nn.EmbeddingBag, model: nn.Module) -> list[str]:
    """What a table asks for that low-precision rows cannot do; nothing where it can be swapped."""
    problems = []
    if module.max_norm is not None:
        problems.append("max_norm rescales rows when they are looked up")
    if module.scale_grad_by_freq:
        problems.append("scale_grad_by_freq")
    if isinstance(module, nn.EmbeddingBag) and module.mode == "max":
        problems.append("mode='max'")
    users = sum(1 for m in model.modules() for p in m._parameters.values() if p is module.weight)
    if users > 1:
        problems.append(f"its weight is shared by {users} modules")
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
