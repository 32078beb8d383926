"""Small bundles and models for the tests of this room."""

from pathlib import Path
from typing import Any

import torch

from inference.small import make_index, make_model
from loka.data.schema import Field, Schema, SequenceField
from loka.inference import Bundle, EngineConfig, save_bundle
from loka.models import build_ranker
from loka.ptq import quantize
from loka.records import BundleInfo, capture_environment
from loka.serving import GenerativeModel, RankingModel, save_ranker
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
