"""The interface between a server and a model, small enough for a generative engine, a ranker and a test double.

    read    validate a decoded request and return a Job with its size; raises FieldError naming the field
    run     run jobs in a bucket; return one answer each, in order
    warm    prepare every bucket; afterwards `captures` must not grow

A server calls `read` in its event loop, so it must be fast, and `run` in the model's own thread. With front processes
(`Server(..., fronts=4)`) the model also needs an attribute `reader`, its part that runs there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from loka.serving.times import Bucket


class FieldError(ValueError):
    """A request with an invalid field.

    Args:
        path: path of the field, such as `$.history[3]`.
        message: what was seen and what was expected.

    Example:
        >>> str(FieldError("$.top", "60, but the search has 50 beams"))
        '$.top: 60, but the search has 50 beams'
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path, self.message = path, message


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was read.

    Args:
        request: the decoded request.
        units: its size in a batch: 1 for a generative model, its rows for a ranker.
        length: its context length; 0 for a ranker.
        data: the model's own representation of it.
        raw: return its answer as one array, which `Reader.finish` turns into the answer in the front process.

    Example:
        >>> Job(None, units=3, length=0, data=None).units
        3
    """

    request: Any
    units: int
    length: int
    data: Any
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Sealed:
    """A request that a front has read: its MessagePack, which is decoded only if another model must read it.

    Args:
        data: the MessagePack.
        kind: the type of the request.
        timeout_ms: its field of that name.

    Example:
        >>> Sealed(b"\x81\xa7history\x90", dict).open()
        {'history': []}
    """

    data: bytes | memoryview
    kind: type
    timeout_ms: float | None = None

    def open(self) -> Any:
        """Return the request."""
        return msgspec.msgpack.decode(self.data, type=self.kind)

    def keep(self) -> "Sealed":
        """Return a copy that does not refer to the front's memory."""
        return replace(self, data=bytes(self.data))


def unseal(request: Any) -> Any:
    """Return a request that is not sealed."""
    return request.open() if isinstance(request, Sealed) else request


@dataclass(frozen=True, slots=True)
class Packed:
    """A request that was read in a front, as it travels to the engine: its size in a batch, numbers and arrays."""

    units: int
    length: int
    facts: list[int]
    arrays: list[Any]


class Reader:
    """The part of a model that runs in front processes: small, picklable, and without torch.

    As it is, requests travel to the engine's process as MessagePack and are read there, and so do answers on their way
    back. A subclass that packs requests as arrays spares the engine's process that work.

    Args:
        request_type: the msgspec struct of a request.
        answer_type: the msgspec struct of an answer.

    Example:
        >>> Reader(RecommendRequest, Recommended).pack(RecommendRequest(history=[1])) is None   # doctest: +SKIP
        True
    """

    def __init__(self, request_type: type, answer_type: type) -> None:
        self.request_type, self.answer_type = request_type, answer_type

    def pack(self, request: Any) -> Packed | None:
        """Validate a request and return its arrays; raises FieldError. None: the engine's process reads it."""
        return None

    def unpack(self, request: Sealed, packed: Packed, data: memoryview) -> Job:
        """Return the job of a packed request, in the engine's process; its arrays lie one behind another in `data`."""
        raise NotImplementedError(f"{type(self).__name__} packs requests and must define unpack")

    def finish(self, request: Any, packed: Packed, data: bytes) -> Any:
        """Return the answer to a packed request; `data` is the array that the model returned for it."""
        raise NotImplementedError(f"{type(self).__name__} packs requests and must define finish")

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> Any:
        """Make a request from named NumPy arrays and its other fields, as the model does."""
        raise FieldError("$.inputs", "this model is not served through the Open Inference Protocol")

    def to_tensors(self, answer: Any) -> dict[str, Any]:
        """Return an answer as named NumPy arrays, as the model does."""
        raise FieldError("$.outputs", "this model is not served through the Open Inference Protocol")


class Servable(Protocol):
    """A model that can be served.

    Example:
        >>> model: Servable = open_model("runs/onerec")                                 # doctest: +SKIP
    """

    name: str
    version: str

    @property
    def request_type(self) -> type:
        """The msgspec struct that a request body is decoded into."""
        ...

    @property
    def buckets(self) -> list[Bucket]:
        """The shapes that the model prepares, (units, context)."""
        ...

    @property
    def captures(self) -> int:
        """The number of shapes prepared so far; must not grow once warm."""
        ...

    def warm(self) -> None:
        """Prepare every bucket."""
        ...

    def example(self, bucket: Bucket) -> list[Job]:
        """Return jobs that fill the bucket, for timing and testing."""
        ...

    def read(self, request: Any) -> Job:
        """Validate a request and convert it to a job; raises FieldError."""
        ...

    def run(self, bucket: Bucket, jobs: Sequence[Job]) -> Iterable[Any]:
        """Run one batch; return one answer per job, a msgspec struct with a property `empty`.

        The server takes the answers while the engine runs the next batch. Work that needs no engine, such as sorting
        scores, is best done then: return an iterator (`map`) that does it.

        A model whose device works through a queue of its own may have a true attribute `ahead` and a method
        `launch(bucket, jobs)`, which queues the batch and returns a function that waits for it and returns the answers.
        `launch` is then called while the batch before still runs. The functions are called in the same thread, each
        once, in the order of the launches; two batches are in flight at most.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return inputs and outputs in the format of the Open Inference Protocol."""
        ...

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> Any:
        """Make a request of `request_type` from named NumPy arrays and its other fields."""
        ...

    def to_tensors(self, answer: Any) -> dict[str, Any]:
        """Return an answer as named NumPy arrays."""
        ...
