"""Serve models over HTTP within a latency deadline.

    Server(open_model("runs/onerec"), sla=0.05, port=8000).run()          # or: loka serve runs/onerec --sla 50ms

One process by default: an ASGI application (`Front`), a runner with a `Scheduler` per model, and an admin port. A model
is anything that implements `Servable`: a OneRec bundle, a frozen ranker, or your own. Names are imported on first use,
so that the load generator and `loka serve --check` do not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.serving.call import Limits as Limits
    from loka.serving.experiment import EventLog as EventLog
    from loka.serving.experiment import Split as Split
    from loka.serving.front import Front as Front
    from loka.serving.generative import GenerativeModel as GenerativeModel
    from loka.serving.opening import open_model as open_model
    from loka.serving.queues import Batch as Batch
    from loka.serving.queues import Entry as Entry
    from loka.serving.queues import Policy as Policy
    from loka.serving.queues import Shed as Shed
    from loka.serving.rank_bundle import RankerBundle as RankerBundle
    from loka.serving.rank_bundle import load_ranker as load_ranker
    from loka.serving.rank_bundle import save_ranker as save_ranker
    from loka.serving.rank_rows import RankRequest as RankRequest
    from loka.serving.ranker import RankingModel as RankingModel
    from loka.serving.recommend import Recommended as Recommended
    from loka.serving.recommend import RecommendRequest as RecommendRequest
    from loka.serving.runner import Refused as Refused
    from loka.serving.scheduler import Scheduler as Scheduler
    from loka.serving.servable import FieldError as FieldError
    from loka.serving.servable import Job as Job
    from loka.serving.servable import Reader as Reader
    from loka.serving.servable import Servable as Servable
    from loka.serving.server import Server as Server
    from loka.serving.service import Service as Service
    from loka.serving.times import BatchTimes as BatchTimes

_NAMES = {
    "call": ("Limits",),
    "experiment": ("EventLog", "Split"),
    "front": ("Front",),
    "generative": ("GenerativeModel",),
    "opening": ("open_model",),
    "queues": ("Batch", "Entry", "Policy", "Shed"),
    "rank_bundle": ("RankerBundle", "load_ranker", "save_ranker"),
    "rank_rows": ("RankRequest",),
    "ranker": ("RankingModel",),
    "recommend": ("RecommendRequest", "Recommended"),
    "runner": ("Refused",),
    "scheduler": ("Scheduler",),
    "servable": ("FieldError", "Job", "Reader", "Servable"),
    "server": ("Server",),
    "service": ("Service",),
    "times": ("BatchTimes",),
}
_HOMES = {name: f"loka.serving.{home}" for home, names in _NAMES.items() for name in names}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'loka.serving' has no attribute {name!r}")
