"""The base of ranking models: the Core interface, and Ranker, which embeds a batch and calls a core.

A core is the dense part of one paper. It takes n feature vectors, x [B, n, d], and returns logits [B, labels]:

    logits = head(represent(x))          represent: [B, n, d] -> [B, width],  head: an MLP tower

Ranker computes x from a batch, in this order along n:

    dense features  -> one MLP -> `dense_vectors` vectors      (none if the data has no dense features)
    categorical ids -> one vector per field, from the embedding tables
    histories       -> one mean-pooled vector per sequence field, or, for sequence cores, a separate [B, T, s d]

Under autocast x is cast once, here, so that every activation of the core is 16-bit from the first product on. Logits
are float32, so that the loss is not rounded.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from loka.nn import MLP, EmbeddingTables, Style
from loka.nn.mix import compute_dtype

if TYPE_CHECKING:
    from loka.data.batch import Batch
    from loka.data.schema import Schema

PLAIN = Style()


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """The options of every core: n input vectors of d features, `labels` logits, and the style."""

    n: int = 16
    d: int = 16
    labels: int = 1
    style: Style = PLAIN

    def __post_init__(self) -> None:
        check_positive(self)


def check_positive(config: Any, *, except_for: tuple[str, ...] = ()) -> None:
    """Raise a ValueError if any integer field, or integer in a tuple field, is below one."""
    if not is_dataclass(config):
        raise TypeError(f"expected a dataclass, got {type(config).__name__}")
    for field in fields(config):
        value = () if field.name in except_for else getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not isinstance(number, bool) and number < 1:
                raise ValueError(f"{type(config).__name__}.{field.name} is {value}; expected positive whole numbers")


class Core(nn.Module):
    """The dense part of a ranking model; a family implements `represent` and sets `head`.

    Example:
        >>> class Mine(Core): ...
    """

    takes_sequence: ClassVar[bool] = False
    config: CoreConfig
    head: MLP

    @classmethod
    def fit(cls, schema: "Schema", *, dense_vectors: int) -> dict[str, Any]:
        """Return config fields, besides n and labels, that follow from a schema."""
        return {}

    def represent(self, x: Tensor) -> Tensor:
        """Map x [B, n, d] to the input of the head, [B, width]."""
        raise NotImplementedError(f"{type(self).__name__} does not define represent")

    def forward(self, x: Tensor) -> Tensor:
        """x [B, n, d] -> logits [B, labels]."""
        out: Tensor = self.head(self.represent(self.enter(x)))
        return out

    def enter(self, x: Tensor) -> Tensor:
        """Check the shape of x and cast it to the dtype the products run in."""
        n, d = self.config.n, self.config.d
        if x.dim() != 3 or x.shape[1] != n or x.shape[2] != d:
            raise ValueError(f"{type(self).__name__} expects x of shape [B, {n}, {d}], got {tuple(x.shape)}")
        return x.to(compute_dtype(x))

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return one example on the meta device, for counting."""
        return (torch.empty(1, self.config.n, self.config.d, device="meta"),)


class Ranker(nn.Module):
    """A ranking model: embedding tables and a dense MLP for the features of a schema, and a core.

    Args:
        schema: of a data set.
        core: the dense part; its n and labels must fit the schema.
        dense_vectors: number of vectors that the dense features are mapped to.
        dense_hidden: hidden widths of that MLP.
        sparse: whether gradients of tables are sparse tensors.
        check_on_gpu: check ids on a GPU too, which synchronizes with it.

    Example:
        >>> build_ranker(data.schema, "wukong", "tiny")(batch).shape
    """

    def __init__(
        self,
        schema: "Schema",
        core: Core,
        *,
        dense_vectors: int = 1,
        dense_hidden: tuple[int, ...] = (),
        sparse: bool = False,
        check_on_gpu: bool = False,
    ) -> None:
        super().__init__()
        config = core.config
        n = count_vectors(schema, core, dense_vectors=dense_vectors)
        if n != config.n:
            raise ValueError(
                f"the schema gives {n} feature vectors, the core expects n={config.n}; build the core with n={n}"
            )
        if len(schema.labels) != config.labels:
            raise ValueError(f"the schema has {len(schema.labels)} labels, the core predicts {config.labels}")
        self.schema, self.core, self.dense_vectors = schema, core, dense_vectors
        own = [(s.name, s.cardinality) for s in schema.sequences if s.shares is None]
        tables = [(f.name, f.cardinality) for f in schema.categorical] + own
        self.embedding = EmbeddingTables(tables, config.d, sparse=sparse, check_on_gpu=check_on_gpu) if tables else None
        self.dense = (
            MLP(len(schema.dense), dense_hidden, dense_vectors * config.d, style=config.style) if schema.dense else None
        )

    def forward(self, batch: "Batch") -> Tensor:
        """Return logits [B, labels] in float32 (float64 for a float64 model)."""
        x = self.embed(batch)
        logits: Tensor = self.core(x, *self.embed_sequences(batch)) if self.core.takes_sequence else self.core(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def embed(self, batch: "Batch") -> Tensor:
        """Return the feature vectors of a batch, [B, n, d]."""
        parts: list[Tensor] = []
        if self.dense is not None:
            parts.append(self.dense(batch.dense.to(self._dtype())).view(-1, self.dense_vectors, self.core.config.d))
        if self.embedding is not None:
            pooled = () if self.core.takes_sequence else self.schema.sequences
            histories = [(field.shares or field.name, batch.sequences[field.name]) for field in pooled]
            bags = [(name, rows.values, rows.offsets) for name, rows in histories]
            parts += self.embedding.embed(batch.categorical, bags)
        dtype = compute_dtype(parts[0])
        return torch.cat([part.to(dtype) for part in parts], 1)

    def embed_sequences(self, batch: "Batch") -> tuple[Tensor, Tensor]:
        """Return the concatenated histories, [B, T, s d] for s sequence fields, and the length of the longest, [B]."""
        assert self.embedding is not None  # count_vectors raises for a schema without sequences
        padded, lengths = [], []
        longest = max(field.max_length for field in self.schema.sequences)
        for field in self.schema.sequences:
            rows = batch.sequences[field.name]
            vectors, counts = self.embedding.pad(field.shares or field.name, rows.values, rows.offsets, longest)
            padded.append(vectors)
            lengths.append(counts)
        return torch.cat(padded, -1), torch.stack(lengths).amax(0)

    def _dtype(self) -> torch.dtype:
        return next(self.core.parameters()).dtype


def count_vectors(schema: "Schema", core: Core | type[Core], *, dense_vectors: int = 1) -> int:
    """Return the number of feature vectors that Ranker computes for a core: its n."""
    pooled = 0 if core.takes_sequence else len(schema.sequences)
    if core.takes_sequence and not schema.sequences:
        raise ValueError(
            "this core reads histories, but the schema has no sequence field; choose a core without sequences"
        )
    n = (dense_vectors if schema.dense else 0) + len(schema.categorical) + pooled
    if n < 1:
        raise ValueError(
            "the schema has no feature that becomes a vector: no dense, no categorical, no pooled sequence"
        )
    return n
