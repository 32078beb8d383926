"""Serve a frozen ranker: rows of features in, scores or the best candidates out.

Features come by column. A column is one value for all rows of the request (a user's), a list with one value per row
(the candidates'), or the latter as little-endian bytes: float32 for dense columns, int64 for categorical ones, in
base64 (JSON) or raw (MessagePack). A sequence column is one list for all rows, or a list of lists. Ids beyond a
column's vocabulary become the unknown id 0; sequences that are too long are cut to their most recent ids. The answer
counts both.

On a GPU every bucket of rows runs as one CUDA graph; a ranker with sequence columns runs eagerly. `compiled` compiles
the model for every bucket before it is ready: only then are the FP8 ops of a plan fused with the ops around them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loka.data.batch import Batch, Jagged
from loka.measure.capturing import capturing
from loka.serving.rank_bundle import RankerBundle
from loka.serving.rank_reader import RankReader
from loka.serving.rank_rows import Columns, Ranked, RankRequest, Rows, join
from loka.serving.servable import Job
from loka.serving.staging import Staging
from loka.serving.times import Bucket

ROWS = (64, 256, 1024, 4096)


@dataclass
class _Prepared:
    """A bucket: its static inputs, and with a CUDA graph the graph and its static scores."""

    batch: Batch
    graph: Any = None
    scores: Tensor | None = None
    used: int = 0  # rows that the last batch wrote; those beyond are zero


class RankingModel:
    """A `Servable` that runs a frozen ranker.

    Args:
        bundle: the model and its columns.
        rows: bucket sizes, ascending; a request may have as many rows as the largest.
        device: device to run on.
        batch_invariant: run every batch in the largest bucket, so that scores do not depend on the rest of the batch.
        graphs: capture one CUDA graph per bucket; default: on a GPU, if there are no sequence columns.
        compiled: compile the model for every bucket: slower start, faster answers. Not supported with sequence columns,
            whose sizes vary within a bucket.
        name: the name clients use.
        version: version of these weights.

    Example:
        >>> model = RankingModel(load_ranker("runs/ranker"))                            # doctest: +SKIP
    """

    request_type = RankRequest

    def __init__(
        self,
        bundle: RankerBundle,
        *,
        rows: tuple[int, ...] = ROWS,
        device: torch.device | str = "cpu",
        batch_invariant: bool = False,
        graphs: bool | None = None,
        compiled: bool = False,
        name: str = "ranker",
        version: str = "1",
    ) -> None:
        if not rows or min(rows) < 1 or list(rows) != sorted(set(rows)):
            raise ValueError(f"rows={rows}: expected ascending positive sizes")
        self.name, self.version, self.bundle, self.schema = name, version, bundle, bundle.schema
        self.device = torch.device(device)
        self.model = bundle.model.to(self.device).eval()
        self.rows = rows[-1:] if batch_invariant else rows
        able = self.device.type == "cuda" and not self.schema.sequences
        if graphs and not able:
            raise ValueError("CUDA graphs need a GPU and a ranker without sequence columns")
        self.graphs = able if graphs is None else graphs
        if compiled and self.schema.sequences:
            raise ValueError(
                f"cannot compile a ranker with sequence columns ({', '.join(s.name for s in self.schema.sequences)}): "
                "their sizes vary within a bucket of rows; hint: serve it without --compile (compiled=False)"
            )
        self.compiled = compiled
        self._call: Any = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.captures = 0
        self.ahead = self.graphs  # see `Servable.run`
        self._made: dict[int, _Prepared] = {}
        self._staging = Staging(self.device)
        self.reader = RankReader(self.schema, self.rows[-1])
        self._limits = self.reader.rows.limits

    @property
    def buckets(self) -> list[Bucket]:
        """The prepared shapes, (rows, 0): a ranker has no context length."""
        return [Bucket(rows, 0) for rows in self.rows]

    def warm(self) -> None:
        """Run every bucket, so that compiling and capturing CUDA graphs happens here and not while serving."""
        config: Any = torch._dynamo.config
        many = config.patch(recompile_limit=max(config.recompile_limit, 2 * len(self.rows) + 2)) if self.compiled else nullcontext()  # fmt: skip
        with many:
            for rows in reversed(self.rows):
                self._prepare(rows)
                bucket, jobs = Bucket(rows, 0), self.example(Bucket(rows, 0))
                for collect in [self.launch(bucket, jobs) for _ in range(2)]:  # memory for as many as will be in flight
                    collect()

    def example(self, bucket: Bucket) -> list[Job]:
        """Return one request of random features that fills the bucket."""
        (n, _), draw, wide = bucket, np.random.default_rng(0), len(self._limits)
        dense = draw.normal(size=(n, len(self.schema.dense))).astype(np.float32)
        ids = (draw.random((n, wide)) * self._limits).astype(np.int64)
        rows = Rows(
            n,
            Columns(np.zeros(dense.shape[1], np.float32), np.arange(dense.shape[1]), dense),
            Columns(np.zeros(wide, np.int64), np.arange(wide), ids),
            {s.name: [draw.integers(0, s.cardinality, s.max_length) for _ in range(n)] for s in self.schema.sequences},
            0,
            0,
        )
        return [Job(RankRequest(features={}), n, 0, rows)]

    def read(self, request: RankRequest) -> Job:
        """Convert columns to arrays; an invalid field raises FieldError with its path."""
        return self.reader.rows.read(request)

    @property
    def device_seconds(self) -> float:
        """Time that the GPU has spent on batches so far."""
        return self._staging.seconds

    def run(self, bucket: Bucket, jobs: Sequence[Job]) -> Iterator[Ranked | NDArray[np.float32]]:
        """Score the rows of all jobs together. The best of a job are sorted out when its answer is taken."""
        return self.launch(bucket, jobs)()

    def launch(self, bucket: Bucket, jobs: Sequence[Job]) -> Callable[[], Iterator[Ranked | NDArray[np.float32]]]:
        """Queue a batch on the GPU; return a function that waits for it and returns its answers.

        One set of static tensors serves any number of batches in flight: the GPU does everything in order, so it fills
        the tensors, runs the graph and copies the scores to the host before it begins the next batch. What the host
        writes and reads belongs to one batch (loka.serving.staging).
        """
        scores = self._launch(bucket[0], [job.data for job in jobs])
        ends = np.cumsum([job.units for job in jobs])[:-1]
        return lambda: map(self._finish, jobs, np.split(scores(), ends))

    def score(self, size: int, parts: Sequence[Rows]) -> NDArray[np.float32]:
        """Return scores [rows, labels] of the parts, run in a bucket of `size` rows."""
        return self._launch(size, parts)()

    @torch.inference_mode()
    def _launch(self, size: int, parts: Sequence[Rows]) -> Callable[[], NDArray[np.float32]]:
        made = self._prepare(size)
        used = sum(part.count for part in parts)
        self._fill(made, used, parts)
        batch = made.batch
        if self.schema.sequences:
            empty = [np.empty(0, np.int64)] * (size - used)
            jagged = {
                s.name: _jagged([row for part in parts for row in part.sequences[s.name]] + empty, self.device)
                for s in self.schema.sequences
            }
            batch = Batch(batch.dense, batch.categorical, jagged, batch.labels, batch.group)
        if made.graph is not None:
            made.graph.replay()
        return self._staging.fetch((self._call_linked(batch) if made.scores is None else made.scores)[:used])

    def _fill(self, made: "_Prepared", used: int, parts: Sequence[Rows]) -> None:
        """Write the features of the parts to the static tensors of a bucket: one copy, and few launches of kernels.

        Under load every one of them waits for the lock of the interpreter.
        """
        kinds = [name for name in ("dense", "categorical") if getattr(made.batch, name).shape[1]]
        joined = [join([getattr(part, name) for part in parts]) for name in kinds]
        row_of = [np.repeat(np.arange(len(parts)), [part.count for part in parts])] if len(parts) > 1 else []
        sent = self._staging.send([*row_of, *(a for columns in joined for a in (columns.same, columns.places, columns.varying))])  # fmt: skip
        which = sent.pop(0) if row_of else None
        before, made.used = made.used, max(made.used, used)
        for at, name in enumerate(kinds):
            static, (same, places, varying) = getattr(made.batch, name), sent[3 * at : 3 * at + 3]
            target = static[:used]
            if varying.shape[1] == target.shape[1]:  # every column varies, and they are in their order
                target.copy_(varying)
            else:
                if which is None:
                    target.copy_(same)
                else:
                    torch.index_select(same, 0, which, out=target)
                target.index_copy_(1, places, varying)
            if used < before:  # rows beyond these are zero already
                static[used:before] = 0
        made.used = used

    def _call_linked(self, batch: Batch) -> Tensor:
        """Return what a client sees: the model's output in float32, through the link."""
        found: Tensor = self._call(batch).float()
        return found.sigmoid() if self.bundle.info.link == "sigmoid" else found

    def _prepare(self, size: int) -> "_Prepared":
        if size not in self._made:
            static = Batch(
                torch.zeros(size, len(self.schema.dense), device=self.device),
                torch.zeros(size, len(self._limits), dtype=torch.int64, device=self.device),
                {s.name: _jagged([np.empty(0, np.int64)] * size, self.device) for s in self.schema.sequences},
                torch.zeros(size, len(self.schema.labels), device=self.device),
                torch.zeros(size, dtype=torch.int64, device=self.device),
            )
            self._made[size] = self._capture(static) if self.graphs else _Prepared(static)
            self.captures += 1
        return self._made[size]

    @torch.inference_mode()
    def _capture(self, static: Batch) -> "_Prepared":
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._call_linked(static)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            scores = self._call_linked(static)
        return _Prepared(static, graph, scores)

    def _finish(self, job: Job, scores: NDArray[np.float32]) -> Ranked | NDArray[np.float32]:
        if job.raw:  # a front sorts out the best
            return scores
        return self.reader.answer(job.request, scores, unknown=job.data.unknown, cut=job.data.cut)

    def describe(self) -> dict[str, Any]:
        """Return inputs and outputs for the Open Inference Protocol: one tensor per column in, one per label out."""
        inputs = [{"name": name, "datatype": "FP32", "shape": [-1]} for name in self.schema.dense]
        inputs += [{"name": f.name, "datatype": "INT64", "shape": [-1]} for f in self.schema.categorical]
        inputs += [{"name": s.name, "datatype": "INT64", "shape": [-1, s.max_length]} for s in self.schema.sequences]
        return {
            "inputs": inputs,
            "outputs": [{"name": label, "datatype": "FP32", "shape": [-1]} for label in self.schema.labels],
        }

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> RankRequest:
        """Make a request of one array [rows] per column, or [rows, length] for sequences."""
        return self.reader.from_tensors(tensors, parameters)

    def to_tensors(self, answer: Ranked) -> dict[str, Any]:
        """Return scores by label as arrays, and the row numbers if only the best were requested."""
        return self.reader.to_tensors(answer)


def _jagged(rows: Sequence[NDArray[np.int64]], device: torch.device) -> Jagged:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = np.concatenate(rows) if rows else np.empty(0, np.int64)
    return Jagged(torch.from_numpy(values).to(device), torch.from_numpy(offsets).to(device))
