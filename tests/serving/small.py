"""Small bundles and models for the tests of this room."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from inference.small import make_index, make_model
from loka.data.schema import Field, Schema, SequenceField
from loka.inference import Bundle, EngineConfig, save_bundle
from loka.models import build_ranker
from loka.ptq import quantize
from loka.records import BundleInfo, capture_environment
from loka.serving import GenerativeModel, Job, RankingModel, Reader, save_ranker
from loka.serving.rank_bundle import load_ranker

SCHEMA = Schema(
    ("age", "price"),
    (Field("user", 100), Field("item", 50)),
    (SequenceField("seen", 50, 5, "item"),),
    ("click", "buy"),
)
ENGINE = EngineConfig(beams=8, requests=(1, 2, 4), contexts=(8, 16), dtype="fp32")


def make_bundle(seed: int = 0) -> Bundle:
    model = make_model("tiny", seed)
    info = BundleInfo(data="none", settings={}, steps=0, seed=seed, loss=None, normalize="codebook", environment=capture_environment())  # fmt: skip
    return Bundle(model, quantize(model, "none"), make_index(model), info)


def make_generative(config: EngineConfig = ENGINE, seed: int = 0) -> GenerativeModel:
    return GenerativeModel(make_bundle(seed), config, name="tiny", version=f"v{seed}")


def write_bundle(folder: Path, seed: int = 0) -> Path:
    save_bundle(make_bundle(seed), folder, dtype=torch.float32)
    return folder


def make_ranker(folder: Path, *, seed: int = 0, **options: Any) -> RankingModel:
    torch.manual_seed(seed)
    save_ranker(build_ranker(SCHEMA, "wukong", "tiny"), SCHEMA, folder, family="wukong", size="tiny")
    return RankingModel(load_ranker(folder), **{"rows": (8, 32), **options})


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
