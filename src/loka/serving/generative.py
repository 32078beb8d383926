"""Serve a OneRec bundle: histories of items or codes in, items and scores out.

Items are looked up in a sorted copy of the index, so that translating 3,000 of them takes microseconds; the result
equals that of `loka.inference.Recommender`. The answer counts items of the history that were cut (beyond the model's
context) or unknown (not in the index).

Batches are not launched ahead (`Servable.run`), although the engine could: the host has 1 ms of 20, and two batches
fill an SLA of 50 ms so tightly that handing the second one out earlier lowers the cap (8 instead of 12 requests of 512
items in FP8, 485 a second instead of 527).
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loka.inference import Bundle, Engine, EngineConfig, Recommendation, Request
from loka.inference.request import make_histories
from loka.serving.recommend import Recommended, RecommendReader, RecommendRequest
from loka.serving.servable import FieldError, Job
from loka.serving.times import Bucket

SHOWN_UNKNOWN = 20
TOP = 10


class GenerativeModel:
    """A `Servable` that runs a OneRec bundle in an `Engine`.

    Args:
        bundle: model and index.
        config: configuration of the engine; without one, `normalize` is taken from the bundle.
        device: device to run on.
        name: the name clients use.
        version: version of these weights.

    Example:
        >>> model = GenerativeModel(load_bundle("runs/onerec"), name="onerec")         # doctest: +SKIP
        >>> job = model.read(RecommendRequest(history=[12, 40, 7]))                     # doctest: +SKIP
        >>> next(model.run(model.buckets[0], [job])).items                                 # doctest: +SKIP
    """

    request_type = RecommendRequest
    reader = RecommendReader()

    def __init__(
        self,
        bundle: Bundle,
        config: EngineConfig | None = None,
        *,
        device: torch.device | str = "cpu",
        name: str = "onerec",
        version: str = "1",
    ) -> None:
        self.name, self.version = name, version
        self.bundle = bundle
        config = config or EngineConfig(normalize=bundle.info.normalize)
        self.engine = Engine(bundle.model.to(device), config, valid=bundle.index.trie)
        items = bundle.index.items.cpu().numpy()
        order = np.argsort(items)
        self._items: NDArray[np.int64] = items[order]
        self._codes: NDArray[np.int64] = bundle.index.codes_of(bundle.index.items).cpu().numpy()[order]

    @property
    def buckets(self) -> list[Bucket]:
        """The prepared shapes, (requests, context)."""
        return [Bucket(*bucket) for bucket in self.engine.buckets]

    @property
    def captures(self) -> int:
        """The number of buckets prepared so far."""
        return self.engine.captures

    def warm(self) -> None:
        """Prepare every bucket."""
        self.engine.warm()

    def example(self, bucket: Bucket) -> list[Job]:
        """Return jobs that fill the bucket with full contexts of random ids."""
        units, context = bucket
        made = make_histories(self.engine.model_config, units, context)
        return [Job(RecommendRequest(top=1), 1, context, (request, request.history.numpy(), ())) for request in made]

    def read(self, request: RecommendRequest) -> Job:
        """Translate a request to codes; an invalid field raises FieldError with its path."""
        if request.top is not None and request.top > self.engine.config.beams:
            raise FieldError("$.top", f"{request.top}, but the search has {self.engine.config.beams} beams")
        if (request.history is None) == (request.codes is None):
            raise FieldError("$.history", "give `history` (items) or `codes`, exactly one of them")
        if request.codes is not None:
            if request.exclude_seen:
                raise FieldError("$.exclude_seen", "needs `history`: codes do not say which items were seen")
            items, codes, unknown = None, self._read_codes(request.codes), ()
        else:
            items = np.array(request.history, dtype=np.int64)
            codes, unknown = self._translate(items)
        made = Request(torch.from_numpy(codes), self._read_static(request.static))
        return Job(request, 1, len(codes), (made, items, unknown))

    def _translate(self, items: NDArray[np.int64]) -> tuple[NDArray[np.int64], Any]:
        place = np.minimum(np.searchsorted(self._items, items), len(self._items) - 1)
        known = self._items[place] == items
        codes = self._codes[place[known]]
        if self.engine.model_config.items:
            codes = np.concatenate([codes, items[known][:, None]], 1)
        return codes, () if known.all() else items[~known]

    def _read_codes(self, data: bytes) -> NDArray[np.int64]:
        config = self.engine.model_config
        if config.items:
            raise FieldError("$.codes", "this model also reads item numbers; give `history`")
        levels = len(config.codebooks)
        if len(data) % (2 * levels):
            raise FieldError(
                "$.codes", f"{len(data)} bytes; expected uint16 [items, {levels}], {2 * levels} bytes an item"
            )
        codes = np.frombuffer(data, dtype="<u2").reshape(-1, levels)
        bad = codes >= np.array(config.codebooks)
        if bad.any():
            row, level = np.argwhere(bad)[0].tolist()
            seen, limit = codes[row, level], config.codebooks[level]
            raise FieldError(f"$.codes[{row}][{level}]", f"{seen} is outside [0, {limit})")
        return codes.astype(np.int64)

    def _read_static(self, values: list[float] | None) -> torch.Tensor | None:
        wanted = self.engine.model_config.static or 0
        if len(values or ()) != wanted:
            raise FieldError("$.static", f"{len(values or ())} user features, the model takes {wanted}")
        return torch.tensor(values, dtype=torch.float32) if values else None

    def run(self, bucket: Bucket, jobs: Sequence[Job]) -> Iterator[Recommended]:
        """Run one batch."""
        found = self.engine.generate_in(bucket, [job.data[0] for job in jobs])
        return map(self._finish, found, jobs)

    def _finish(self, found: Recommendation, job: Job) -> Recommended:
        request, (_, seen, unknown) = job.request, job.data
        assert found.items is not None  # the engine is constrained
        items, scores, codes = found.items.numpy(), found.scores.numpy(), found.codes.numpy()
        if request.exclude_seen:
            keep = ~np.isin(items, seen)
            items, scores, codes = items[keep], scores[keep], codes[keep]
        top = min(TOP, self.engine.config.beams) if request.top is None else request.top
        return Recommended(
            items=items[:top].tolist(),
            scores=scores[:top].tolist(),
            codes=codes[:top].tolist() if request.with_codes else None,
            cut=found.cut,
            unknown=len(unknown),
            unknown_items=[int(i) for i in unknown[:SHOWN_UNKNOWN]],
        )

    def describe(self) -> dict[str, Any]:
        """Return inputs and outputs for the Open Inference Protocol: a history in, items and scores out."""
        levels = len(self.engine.model_config.codebooks)
        return {
            "inputs": [
                {"name": "history", "datatype": "INT64", "shape": [-1]},
                {"name": "codes", "datatype": "UINT16", "shape": [-1, levels]},
            ],
            "outputs": [
                {"name": "items", "datatype": "INT64", "shape": [-1]},
                {"name": "scores", "datatype": "FP32", "shape": [-1]},
                {"name": "cut", "datatype": "INT64", "shape": [1]},
                {"name": "unknown", "datatype": "INT64", "shape": [1]},
            ],
        }

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> RecommendRequest:
        """Make a request of `history` INT64 [n] or [1, n], or `codes` UINT16 [n, levels] or [1, n, levels]."""
        return self.reader.from_tensors(tensors, parameters)

    def to_tensors(self, answer: Recommended) -> dict[str, Any]:
        """Return items, scores and the counts of unused history items as arrays."""
        return self.reader.to_tensors(answer)


def digest(*paths: Path) -> str:
    """Return a hash of the content of these files, twelve hexadecimal digits."""
    found = hashlib.blake2b()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: found)
    return found.hexdigest()[:12]
