"""Requests to a ranker: columns of features in JSON or MessagePack, read into arrays. Unknown and cut ids are counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from loka.serving.servable import FieldError, Job

if TYPE_CHECKING:
    from loka.data.schema import Schema  # its room imports torch, which front processes do without

MOST_VALUES = 1_000_000
Column = (
    int
    | float
    | Annotated[bytes, Meta(max_length=8 * MOST_VALUES)]
    | Annotated[list[int | float | Annotated[list[int], Meta(max_length=65_536)]], Meta(max_length=MOST_VALUES)]
)


class RankRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /v1/recommend` for a ranker.

    Args:
        features: column -> one value for all rows, or one value per row.
        ids: one id per row, returned for the best rows.
        top: return only this many rows, best first by `label`.
        label: label that `top` sorts by; default: the first.
        user: id of the user, for experiments.
        timeout_ms: a deadline shorter than the service's own.

    Example:
        >>> RankRequest(features={"age": 31.0, "item": [4, 7, 9]}, top=2).top
        2
    """

    features: Annotated[dict[str, Column], Meta(max_length=4096)]
    ids: Annotated[list[int], Meta(max_length=MOST_VALUES)] | None = None
    top: Annotated[int, Meta(ge=1, le=100_000)] | None = None
    label: str | None = None
    user: Annotated[str, Meta(min_length=1, max_length=256)] | int | None = None
    timeout_ms: Annotated[float, Meta(gt=0, le=600_000)] | None = None


class Ranked(msgspec.Struct, kw_only=True):
    """Scores by label: of all rows in their order, or of the best rows, whose numbers are `rows` and ids `ids`."""

    scores: dict[str, list[float]]
    rows: list[int] | None = None
    ids: list[int] | None = None
    unknown: int = 0
    cut: int = 0

    @property
    def empty(self) -> bool:
        """Whether the answer has no scores."""
        return not any(self.scores.values())


@dataclass(frozen=True)
class Columns:
    """Columns of one kind. Most have one value for all rows of a request; it is stored once and expanded on the device.

    same [columns] holds these values. places [v] are the columns that vary by row, whose values are varying [rows, v];
    `same` is undefined there.
    """

    same: NDArray[Any]
    places: NDArray[np.int64]
    varying: NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """The features of one request as arrays."""

    count: int
    dense: Columns
    categorical: Columns
    sequences: dict[str, list[NDArray[np.int64]]]
    unknown: int
    cut: int


def join(parts: Sequence[Columns]) -> Columns:
    """Join the columns of several requests: same [requests, columns]; `places` are the columns that vary in any."""
    places = parts[0].places
    if len(parts) == 1:  # without copies
        return Columns(parts[0].same[None], places, parts[0].varying)
    if all(np.array_equal(part.places, places) for part in parts):
        varying = [part.varying for part in parts]
    else:
        places = np.unique(np.concatenate([part.places for part in parts]))
        varying = []
        for part in parts:
            wide = np.repeat(part.same[places][None], len(part.varying), 0)
            wide[:, np.searchsorted(places, part.places)] = part.varying
            varying.append(wide)
    return Columns(np.stack([part.same for part in parts]), places, np.concatenate(varying))


class RowReader:
    """Read requests of one schema, of at most `most` rows."""

    def __init__(self, schema: "Schema", most: int) -> None:
        self.most, self.dense, self.labels = most, tuple(schema.dense), tuple(schema.labels)
        self.limits = np.array([f.cardinality for f in schema.categorical], dtype=np.int64)
        self.sequences = {s.name: (s.cardinality, s.max_length) for s in schema.sequences}
        self.ids = [f.name for f in schema.categorical]
        self._names = {*self.dense, *self.ids, *self.sequences}

    def read(self, request: RankRequest) -> Job:
        """Convert columns to arrays; an invalid field raises FieldError with its path."""
        for name in request.features.keys() ^ self._names:
            known = f"is not a column; the columns are {', '.join(sorted(self._names)[:20])}"
            raise FieldError(f"$.features.{name}", "is missing" if name in self._names else known)
        n = self._count(request)
        if n > self.most:
            raise FieldError("$.features", f"{n} rows, a request may have {self.most}")
        if request.ids is not None and len(request.ids) != n:
            raise FieldError("$.ids", f"{len(request.ids)} ids for {n} rows")
        if request.label is not None and request.label not in self.labels:
            raise FieldError("$.label", f"{request.label!r}; the labels are {', '.join(self.labels)}")
        dense = _read_columns(request.features, self.dense, n, np.float32)
        ids = _read_columns(request.features, self.ids, n, np.int64)
        strange = self._zero_unknown(ids, n)
        sequences, cut, unknown = self._read_sequences(request, n)
        return Job(request, n, 0, Rows(n, dense, ids, sequences, strange + unknown, cut))

    def _zero_unknown(self, ids: Columns, n: int) -> int:
        """Replace ids beyond their vocabulary by 0 in place and return their number. A negative id raises."""
        shared = np.ones(len(ids.same), bool)
        shared[ids.places] = False
        for place in np.nonzero((ids.same < 0) & shared)[0]:
            raise FieldError(f"$.features.{self.ids[place]}[0]", f"{ids.same[place]} is negative")
        if ids.varying.min(initial=0) < 0:  # a look for the place takes ten times as long
            column, row = (int(found[0]) for found in np.nonzero((ids.varying < 0).T))
            name = self.ids[ids.places[column]]
            raise FieldError(f"$.features.{name}[{row}]", f"{ids.varying[row, column]} is negative")
        beyond, strange = (ids.same >= self.limits) & shared, ids.varying >= self.limits[ids.places]
        ids.same[beyond] = 0
        unknown = int(np.count_nonzero(strange))
        if unknown:
            ids.varying[strange] = 0
        return n * int(np.count_nonzero(beyond)) + unknown

    def _count(self, request: RankRequest) -> int:
        counts = {}
        for name, value in request.features.items():
            if type(value) is int or type(value) is float:  # most columns
                continue
            if name in self.sequences:
                if isinstance(value, list) and value and isinstance(value[0], list):
                    counts[name] = len(value)
            elif isinstance(value, list):
                counts[name] = len(value)
            elif isinstance(value, bytes):
                counts[name] = len(value) // (4 if name in self.dense else 8)
        if len(set(counts.values())) > 1:
            first, *rest = counts.items()
            other = next(pair for pair in rest if pair[1] != first[1])
            raise FieldError(f"$.features.{other[0]}", f"{other[1]} rows, but {first[0]} has {first[1]}")
        found = next(iter(counts.values()), 1)
        if found < 1:
            raise FieldError("$.features", "no rows")
        return found

    def _read_sequences(self, request: RankRequest, n: int) -> tuple[dict[str, list[NDArray[np.int64]]], int, int]:
        out, cut, unknown = {}, 0, 0
        for name, (cardinality, longest) in self.sequences.items():
            value, path = request.features[name], f"$.features.{name}"
            if not isinstance(value, list):
                raise FieldError(path, "a sequence column is a list of ids, or a list of such lists")
            shared = not value or not isinstance(value[0], list)
            rows = [value] * n if shared else value
            arrays = [_ids(row, f"{path}[{i}]") for i, row in enumerate(rows[:1] if shared else rows)]
            for place, array in enumerate(arrays):
                cut += max(0, len(array) - longest)
                array = array[-longest:]
                strange = array >= cardinality
                unknown += int(strange.sum())
                arrays[place] = np.where(strange, 0, array)
            out[name] = arrays * n if shared else arrays
        return out, cut, unknown


def _read_columns(features: dict[str, Any], names: Sequence[str], n: int, kind: Any) -> Columns:
    """Read the named columns; a plain number is one value for all rows."""
    values, places, varying = [], [], []
    plain = (int,) if kind is np.int64 else (int, float)
    for place, name in enumerate(names):
        value = features[name]
        if type(value) in plain and abs(value) < 2**63:
            values.append(value)
        else:
            values.append(0)
            places.append(place)
            varying.append(_column(value, n, kind, f"$.features.{name}"))
    same = np.array(values, dtype=kind)
    if kind is np.float32 and not np.isfinite(same).all():
        raise FieldError(f"$.features.{names[int(np.argmin(np.isfinite(same)))]}", "holds NaN or infinity")
    table = np.stack(varying, 1) if varying else np.empty((n, 0), kind)
    return Columns(same, np.array(places, dtype=np.int64), table)


def _column(value: Any, n: int, kind: Any, path: str) -> NDArray[Any]:
    """Read one column as an array with one value per row."""
    word = "a number" if kind is np.float32 else "an id"
    if isinstance(value, bytes):
        size = 4 if kind is np.float32 else 8
        if len(value) != n * size:
            raise FieldError(path, f"{len(value)} bytes for {n} rows of {size}")
        made = np.frombuffer(value, dtype="<f4" if size == 4 else "<i8")
    else:
        try:
            made = np.array(value)
        except (ValueError, OverflowError) as error:
            raise FieldError(path, f"expected {word} per row") from error
        if made.dtype.kind not in ("iuf" if kind is np.float32 else "i") or made.ndim > 1:
            wanted = (int, float) if kind is np.float32 else (int,)
            rows = value if isinstance(value, list) else [value]
            bad = next((i for i, one in enumerate(rows) if not isinstance(one, wanted) or abs(one) >= 2**63), 0)
            raise FieldError(f"{path}[{bad}]", f"expected {word}")
        made = np.broadcast_to(made.astype(kind), (n,))
    if kind is np.float32 and not np.isfinite(made).all():
        raise FieldError(path, "holds NaN or infinity")
    return made


def _ids(row: Any, path: str) -> NDArray[np.int64]:
    if not isinstance(row, list) or any(not isinstance(i, int) or not 0 <= i < 2**63 for i in row):
        raise FieldError(path, "expected a list of ids")
    return np.array(row, dtype=np.int64)
