"""A model that sleeps, for tests where only time matters. No torch here: front processes import this file."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from loka.serving import Job, Reader


class Ask(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    number: int
    user: str | int | None = None
    timeout_ms: float | None = None


class Said(msgspec.Struct, kw_only=True):
    number: int
    version: str

    @property
    def empty(self) -> bool:
        return self.number < 0


class SleeperReader(Reader):
    """The part of a Sleeper that front processes run."""

    def __init__(self) -> None:
        super().__init__(Ask, Said)

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> Ask:
        return Ask(number=int(tensors["number"][0]))

    def to_tensors(self, answer: Said) -> dict[str, Any]:
        return {"number": np.array([answer.number])}


class Sleeper:
    """A Servable that takes as long as it is told, and answers with twice the number."""

    request_type = Ask
    reader = SleeperReader()

    def __init__(self, cost: dict[tuple[int, int], float], name: str = "sleeper", version: str = "1") -> None:
        self.cost, self.name, self.version, self.captures = cost, name, version, 0
        self.batches: list[int] = []
        self.extra = 0.0
        self.broken = False

    @property
    def buckets(self) -> list[tuple[int, int]]:
        return list(self.cost)

    def warm(self) -> None:
        self.captures = len(self.cost)

    def example(self, bucket: tuple[int, int]) -> list[Job]:
        return [Job(Ask(number=n), 1, bucket[1], n) for n in range(bucket[0])]

    def read(self, request: Ask) -> Job:
        return Job(request, 1, 0, request.number)

    def run(self, bucket: tuple[int, int], jobs: Sequence[Job]) -> list[Said]:
        time.sleep(self.cost[bucket] + self.extra)
        if self.broken:
            raise RuntimeError("broken")
        self.batches.append(len(jobs))
        return [Said(number=2 * job.data, version=self.version) for job in jobs]

    def describe(self) -> dict[str, Any]:
        return {"inputs": [{"name": "number", "datatype": "INT64", "shape": [1]}], "outputs": []}

    def from_tensors(self, tensors: dict[str, Any], parameters: dict[str, Any]) -> Ask:
        return self.reader.from_tensors(tensors, parameters)

    def to_tensors(self, answer: Said) -> dict[str, Any]:
        return self.reader.to_tensors(answer)
