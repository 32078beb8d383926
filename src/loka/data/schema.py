"""The columns of a data set and the sizes of their vocabularies.

A schema contains no data, only what a model needs to size its embedding tables. Ids of a field are in [0, cardinality),
and id 0 is "unknown or missing", so a field with v known values has cardinality v + 1.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Field:
    """A categorical column.

    Args:
        name: name of the column.
        cardinality: rows of its embedding table; id 0 is "unknown or missing".

    Example:
        >>> Field("store", 120)
    """

    name: str
    cardinality: int

    def __post_init__(self) -> None:
        _check_cardinality(self.name, self.cardinality)


@dataclass(frozen=True)
class SequenceField:
    """A ragged column: at most `max_length` ids per example, oldest first.

    Args:
        name: name of the column.
        cardinality: size of its vocabulary.
        max_length: largest number of ids of an example.
        shares: the categorical field whose vocabulary and embedding table it shares; None: it has its own.

    Example:
        >>> SequenceField("last_products", 5000, 20, shares="product")
    """

    name: str
    cardinality: int
    max_length: int
    shares: str | None = None

    def __post_init__(self) -> None:
        _check_cardinality(self.name, self.cardinality)
        if self.max_length < 1:
            raise ValueError(f"sequence field {self.name!r}: max_length must be at least 1, got {self.max_length}")


@dataclass(frozen=True)
class Schema:
    """The columns of a ranking data set, in the order in which a Batch stacks them.

    Args:
        dense: names of the numeric columns.
        categorical: columns of ids.
        sequences: ragged columns of ids.
        labels: names of the targets.

    Example:
        >>> Schema(("price",), (Field("store", 120),), (), ("bought",))
    """

    dense: tuple[str, ...]
    categorical: tuple[Field, ...]
    sequences: tuple[SequenceField, ...]
    labels: tuple[str, ...]

    def __post_init__(self) -> None:
        names = [*self.dense, *(f.name for f in self.categorical), *(s.name for s in self.sequences), *self.labels]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"schema names must be unique across dense, categorical, sequences and labels: {twice}")
        if not self.labels:
            raise ValueError("a schema needs at least one label")
        fields = {f.name: f for f in self.categorical}
        for sequence in self.sequences:
            if sequence.shares is None:
                continue
            if sequence.shares not in fields:
                raise ValueError(
                    f"sequence field {sequence.name!r} shares {sequence.shares!r}, which is no categorical field; "
                    f"known: {sorted(fields)}"
                )
            if fields[sequence.shares].cardinality != sequence.cardinality:
                raise ValueError(
                    f"sequence field {sequence.name!r} has cardinality {sequence.cardinality}, but the field it shares, "
                    f"{sequence.shares!r}, has {fields[sequence.shares].cardinality}"
                )

    def field(self, name: str) -> Field:
        """Return the categorical field of that name."""
        for candidate in self.categorical:
            if candidate.name == name:
                return candidate
        raise ValueError(f"no categorical field {name!r}; known: {[f.name for f in self.categorical]}")


def _check_cardinality(name: str, cardinality: int) -> None:
    if cardinality < 1:
        raise ValueError(f"field {name!r}: cardinality must be at least 1 (id 0 is 'unknown'), got {cardinality}")
