"""The interface between a server and a model, small enough for a generative engine, a ranker and a test double.

    read    validate a decoded request and return a Job with its size; raises FieldError naming the field
    run     run jobs in a bucket; return one answer each, in order
    warm    prepare every bucket; afterwards `captures` must not grow

A server calls `read` in its event loop, so it must be fast, and `run` in the model's own thread.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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

    Example:
        >>> Job(None, units=3, length=0, data=None).units
        3
    """

    request: Any
    units: int
    length: int
    data: Any


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
