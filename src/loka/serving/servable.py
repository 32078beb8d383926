"""What a server needs of a model: an interface small enough that a generative engine, a ranker and a test double are all it.

    read    a decoded request -> a Job, validated, with its size; raises FieldError naming the field
    run     jobs in a bucket -> one answer each, in order
    warm    prepare every bucket; afterwards `captures` stands still

A server calls `read` in its event loop, so it must be quick, and `run` in one thread that is the model's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loka.serving.times import Bucket


class FieldError(ValueError):
    """A request that does not fit the model: which field, and why.

    Args:
        path: of the field, as `$.history[3]`.
        message: what was seen and what was expected.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path, self.message = path, message


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was read: its size in a batch, and what the model made of it."""

    request: Any
    units: int
    length: int
    data: Any


class Servable(Protocol):
    """A model behind a server."""

    name: str
    version: str

    @property
    def request_type(self) -> type:
        """The msgspec struct that a request body is decoded into."""
        ...

    @property
    def buckets(self) -> list[Bucket]:
        """(units, context) shapes."""
        ...

    @property
    def captures(self) -> int:
        """Shapes prepared so far; must not grow once warm."""
        ...

    def warm(self) -> None:
        """Prepare every bucket."""
        ...

    def example(self, bucket: Bucket) -> list[Job]:
        """Jobs that fill the bucket, for measuring and probing."""
        ...

    def read(self, request: Any) -> Job:
        """Validate and translate a request."""
        ...

    def run(self, bucket: Bucket, jobs: Sequence[Job]) -> list[Any]:
        """One answer per job: a msgspec struct."""
        ...

    def describe(self) -> dict[str, Any]:
        """Inputs and outputs as the Open Inference Protocol tells them."""
        ...

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> Any:
        """A request of `request_type` from named NumPy arrays."""
        ...

    def to_tensors(self, answer: Any) -> dict[str, Any]:
        """An answer as named NumPy arrays."""
        ...
