"""Embedding tables for categorical fields and ragged histories: one lookup for all fields of a batch.

All fields share one width, so their tables are stacked into a single `nn.Embedding` (child `table`); field f owns the
rows first_row[f] ... first_row[f] + cardinality[f] - 1. The whole [B, n] id matrix needs one gather, and has one sparse
gradient.

    lookup(ids)                  [B, n] ids         -> [B, n, d]
    embed(ids, bags)             all of a batch     -> [B, n, d] and [B, 1, d] per bag; a sharded collection replaces it
    take(name, ids)              ids of one field   -> [..., d]
    pool(name, values, offsets)  ragged ids         -> [B, d], the mean of the row's embeddings; zero for an empty row
    pad(name, values, offsets)   ragged ids         -> [B, T, d] and lengths [B], the T most recent, padded at the end

An id outside its field raises an error that names the field; it never reads a row of another field. The check always
runs on the CPU. On a GPU it costs a device synchronization, so it is off unless `check_on_gpu=True`. Under
torch.compile it is an assertion in the graph.

`loka.nn.tables.quantize_tables` replaces the stacked table by one with low-precision rows. Sharding and hashing of ids
are not supported here.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.nn.tables import Table


class EmbeddingTables(nn.Module):
    """The stacked tables of several fields.

    Args:
        fields: (name, cardinality) of each field.
        width: of a row.
        sparse: return gradients as sparse tensors.
        check_on_gpu: check ids on a GPU too, which synchronizes with it.

    Example:
        >>> ids = torch.tensor([[3, 4000], [5, 0]])  # [rows, fields]
        >>> EmbeddingTables([("store", 120), ("product", 5000)], 16).lookup(ids).shape
        torch.Size([2, 2, 16])
    """

    first_row: Tensor
    cardinality: Tensor

    def __init__(
        self, fields: Sequence[tuple[str, int]], width: int, *, sparse: bool = False, check_on_gpu: bool = False
    ) -> None:
        super().__init__()
        for name, cardinality in fields:
            if cardinality < 1:
                raise ValueError(f"field {name!r} has cardinality {cardinality}; a table needs at least one row")
        self.names = tuple(name for name, _ in fields)
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"field names must be unique, got {self.names}")
        self.sizes = tuple(cardinality for _, cardinality in fields)
        self.starts = tuple(sum(self.sizes[:i]) for i in range(len(self.sizes)))
        self.width, self.check_on_gpu = width, check_on_gpu
        self.table: nn.Embedding | Table = nn.Embedding(sum(self.sizes), width, sparse=sparse)
        self.register_buffer("first_row", torch.empty(len(fields), dtype=torch.int64), persistent=False)
        self.register_buffer("cardinality", torch.empty(len(fields), dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize uniformly in +-1/sqrt(width), so that a row has a norm below one whatever the table's size."""
        nn.init.uniform_(self.table.weight, -(self.width**-0.5), self.width**-0.5)
        if self.first_row.device.type != "meta":
            self.first_row.copy_(torch.tensor(self.starts, dtype=torch.int64))
            self.cardinality.copy_(torch.tensor(self.sizes, dtype=torch.int64))

    def lookup(self, ids: Tensor) -> Tensor:
        """Look up ids int64 [B, n], column f of field f -> [B, n, width]. The last fields may be left out."""
        n = ids.shape[1]
        if n > len(self.names):
            raise ValueError(f"got ids for {n} fields, but there are tables for {len(self.names)}: {self.names}")
        self._check(ids, self.cardinality[:n], self.names[:n])
        out: Tensor = self.table(ids + self.first_row[:n])
        return out

    def embed(self, ids: Tensor, bags: Sequence[tuple[str, Tensor, Tensor]]) -> list[Tensor]:
        """Return the vectors of ids [B, n] and the mean of each bag (field, values, offsets), each [B, ..., width]."""
        parts = [self.lookup(ids)] if ids.shape[1] else []
        return parts + [self.pool(name, values, offsets).unsqueeze(1) for name, values, offsets in bags]

    def take(self, name: str, ids: Tensor) -> Tensor:
        """Look up ids of one field, of any shape -> [..., width]."""
        f = self._field(name)
        self._check(ids, self.cardinality[f], (name,))
        out: Tensor = self.table(ids + self.starts[f])
        return out

    def pool(self, name: str, values: Tensor, offsets: Tensor) -> Tensor:
        """Return the mean embedding of every ragged row, [B, width]; zero for an empty row."""
        f = self._field(name)
        self._check(values, self.cardinality[f], (name,))
        if isinstance(self.table, Table):  # low-precision rows pool themselves
            return self.table.pool(values + self.starts[f], offsets, mode="mean")
        return F.embedding_bag(
            values + self.starts[f],
            self.table.weight,
            offsets,
            mode="mean",
            sparse=self.table.sparse,
            include_last_offset=True,
        )

    def pad(self, name: str, values: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the latest embeddings per row, oldest first, [B, length, width], and how many are real, [B]."""
        f = self._field(name)
        self._check(values, self.cardinality[f], (name,))
        ids, lengths = pad_recent(values, offsets, length)
        real = torch.arange(length, device=ids.device) < lengths[:, None]
        return self.table(ids + self.starts[f]) * real.unsqueeze(-1), lengths

    def _field(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"there is no table {name!r}; the tables are {', '.join(self.names)}")
        return self.names.index(name)

    def _check(self, ids: Tensor, cardinality: Tensor, names: tuple[str, ...]) -> None:
        if ids.device.type == "meta" or (ids.is_cuda and not self.check_on_gpu):
            return
        bad = (ids < 0) | (ids >= cardinality)
        if torch.compiler.is_compiling():
            torch._assert_async(~bad.any(), f"ids out of range in one of the fields {', '.join(names)}")
        elif bad.any():
            raise ValueError(_describe(ids, bad, cardinality, names))

    def extra_repr(self) -> str:
        """Return the number of fields and the width."""
        return f"{len(self.names)} fields, width={self.width}"


class Seeds(nn.Module):
    """Learned query vectors, `weight` [count, d]."""

    def __init__(self, count: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, d))
        nn.init.normal_(self.weight, std=d**-0.5)

    def forward(self, batch: int) -> Tensor:
        """Return the seeds for every example, [B, count, d], without a copy."""
        return self.weight.expand(batch, -1, -1)


def pad_recent(values: Tensor, offsets: Tensor, length: int, *, skip: int = 0) -> tuple[Tensor, Tensor]:
    """Return up to `length` values of every ragged row before its last `skip`, in order, and how many there are, [B].

    values [total, ...] become [B, length, ...], padded with 0 at the end.
    """
    rows, total = offsets.shape[0] - 1, values.shape[0]
    ends = torch.maximum(offsets[1:] - skip, offsets[:-1])
    lengths = (ends - offsets[:-1]).clamp(max=length)
    index = torch.arange(total, device=values.device)
    row = torch.bucketize(index, offsets[1:], right=True).clamp(max=max(rows - 1, 0))
    place = index - (ends - lengths)[row]
    # A scatter and not a gather: the gradient of a scatter is a plain gather, while that of a gather would sum over all
    # padding that reads one row, which a GPU does serially. Values to drop go to an extra row at the end.
    target = torch.where((place >= 0) & (place < lengths[row]), row * length + place, rows * length)
    padded = values.new_zeros(rows * length + 1, *values.shape[1:]).index_copy_(0, target, values)
    return padded[:-1].view(rows, length, *values.shape[1:]), lengths


def _describe(ids: Tensor, bad: Tensor, cardinality: Tensor, names: tuple[str, ...]) -> str:
    where = bad.nonzero()[0].tolist()
    f = where[1] if len(names) > 1 else 0
    size = int(cardinality[f]) if cardinality.dim() else int(cardinality)
    seen = int(ids[tuple(where)])
    return (
        f"field {names[f]!r} got id {seen} (row {where[0]}), but its table has ids 0 to {size - 1}; "
        "map unknown values to id 0, or build the model from the schema of this data"
    )
