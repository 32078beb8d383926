"""A ranker's requests and answers without its model: read, pack and answer them, also in front processes.

A packed request is its columns as arrays, one behind another (`Rows` has the shapes). The engine's process reads them
where the front wrote them, and returns scores [rows, labels]; the front sorts out the best.
"""

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from loka.serving.rank_rows import Columns, Ranked, RankRequest, RowReader, Rows
from loka.serving.servable import FieldError, Job, Packed, Reader, Sealed

if TYPE_CHECKING:
    from loka.data.schema import Schema


class RankReader(Reader):
    """The part of a ranker that needs no model.

    Args:
        schema: the columns of a request and the labels of an answer.
        most: rows that a request may have.

    Example:
        >>> reader = RankReader(Schema(("age",), (Field("item", 50),), (), ("click",)), 8)        # doctest: +SKIP
        >>> reader.pack(RankRequest(features={"age": 3.0, "item": [1, 2]})).units                 # doctest: +SKIP
        2
    """

    def __init__(self, schema: "Schema", most: int) -> None:
        super().__init__(RankRequest, Ranked)
        self.rows = RowReader(schema, most)
        self._no_dense = Columns(np.empty(0, np.float32), np.empty(0, np.int64), np.empty((0, 0), np.float32))

    def pack(self, request: RankRequest) -> Packed:
        """Return columns as arrays; an invalid field raises FieldError with its path."""
        job = self.rows.read(request)
        rows: Rows = job.data
        facts, arrays = [rows.unknown, rows.cut], []
        for columns in (rows.dense, rows.categorical):
            facts.append(len(columns.places))
            arrays += [columns.places, columns.same, columns.varying]
        for parts in rows.sequences.values():
            shared = parts[:1] if all(part is parts[0] for part in parts) else parts  # one for all rows is sent once
            facts += [len(shared), sum(map(len, shared))]
            arrays += [np.array([len(part) for part in shared], np.int64), np.concatenate(shared)]
        # Arrays of 8 bytes a value first: each then begins where its dtype may.
        arrays.sort(key=lambda array: -array.itemsize)
        return Packed(job.units, 0, facts, arrays)

    def unpack(self, request: Sealed, packed: Packed, data: memoryview) -> Job:
        """Return the job of a packed request: views of `data`, without a copy.

        One view of all integers, and one of all numbers: each takes a microsecond of the process that everybody waits for.
        """
        n, (unknown, cut, v, w, *rest) = packed.units, packed.facts
        columns, lists = len(self.rows.ids), sum(rest)
        whole = np.frombuffer(data, np.int64, v + w + columns + n * w + lists)
        at = v + w + columns + n * w
        ids = Columns(whole[v + w : v + w + columns], whole[v : v + w], whole[v + w + columns : at].reshape(n, w))
        dense = self._no_dense
        if self.rows.dense:
            real = np.frombuffer(data, np.float32, -1, whole.nbytes)
            wide = len(self.rows.dense)
            dense = Columns(real[:wide], whole[:v], real[wide:].reshape(n, v))
        sequences = {}
        for place, name in enumerate(self.rows.sequences):
            count, size = rest[2 * place : 2 * place + 2]
            ends = np.cumsum(whole[at : at + count])
            parts = np.split(whole[at + count : at + count + size], ends[:-1])
            sequences[name] = parts * n if count == 1 else parts
            at += count + size
        return Job(request, n, 0, Rows(n, dense, ids, sequences, unknown, cut), raw=True)

    def finish(self, request: RankRequest, packed: Packed, data: bytes) -> Ranked:
        """Return the answer to a packed request from its scores."""
        scores = np.frombuffer(data, np.float32).reshape(-1, len(self.rows.labels))
        return self.answer(request, scores, unknown=packed.facts[0], cut=packed.facts[1])

    def answer(self, request: RankRequest, scores: NDArray[np.float32], *, unknown: int, cut: int) -> Ranked:
        """Return the scores by label, or those of the best rows."""
        labels = self.rows.labels
        rows = ids = None
        if request.top is not None:
            column = labels.index(request.label) if request.label else 0
            best = find_best(scores[:, column], request.top)
            scores, rows = scores[best], best.tolist()
            ids = None if request.ids is None else [request.ids[i] for i in rows]
        values = {label: scores[:, i].tolist() for i, label in enumerate(labels)}
        return Ranked(scores=values, rows=rows, ids=ids, unknown=unknown, cut=cut)

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> RankRequest:
        """Make a request of one array [rows] per column, or [rows, length] for sequences.

        `parameters` are the other fields of the request.
        """
        if "features" in parameters:
            raise FieldError("$.parameters.features", "is not a parameter: the features are the inputs")
        features: dict[str, Any] = {}
        for name, array in tensors.items():
            real, path = name in self.rows.dense, f"$.inputs.{name}"
            if not real and (array.dtype.kind not in "biu" or array.max(initial=0) >= 2**63):  # a cast would change it
                raise FieldError(path, f"holds {array.dtype}; expected integers below 2^63")
            if name in self.rows.sequences:
                features[name] = array.astype(np.int64).tolist()
                continue
            if array.shape[:1] != (array.size,):
                raise FieldError(path, f"shape {list(array.shape)}; expected one value per row")
            features[name] = array.reshape(-1).astype("<f4" if real else "<i8").tobytes()
        return msgspec.convert({"features": features, **parameters}, RankRequest)

    def to_tensors(self, answer: Ranked) -> dict[str, Any]:
        """Return scores by label as arrays, and the row numbers if only the best were requested."""
        out: dict[str, Any] = {label: np.array(values, dtype=np.float32) for label, values in answer.scores.items()}
        if answer.rows is not None:
            out["rows"] = np.array(answer.rows, dtype=np.int64)
        return out


def find_best(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the rows of the highest scores, best first; of equal scores the earlier row first, and NaN last.

    The same as the first `count` of a stable sort, in less than half the time; the event loop waits meanwhile.
    """
    if count >= len(scores):
        return np.argsort(-scores, kind="stable")
    least = -np.partition(-scores, count - 1)[count - 1]
    if np.isnan(least):
        return np.argsort(-scores, kind="stable")[:count]
    above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    best = np.concatenate([above, equal[: count - len(above)]])
    return best[np.argsort(-scores[best], kind="stable")]
