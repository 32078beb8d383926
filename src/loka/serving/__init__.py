"""serving: answers inside a deadline, over HTTP.

    Server(open_model("runs/onerec"), sla=0.05, port=8000).run()          # or: loka serve runs/onerec --sla 50ms

One process by default: an ASGI front (`Front`), a runner per model with its scheduler (`Runner`, `Scheduler`), an operator's port. A model is anything with the methods of
`Servable`: a OneRec bundle, a frozen ranker, or your own. Names are resolved on first use: the load generator and `--check` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loka.serving.call import Limits as Limits
    from loka.serving.experiment import EventLog as EventLog
    from loka.serving.experiment import Split as Split
    from loka.serving.front import Front as Front
    from loka.serving.generative import GenerativeModel as GenerativeModel
    from loka.serving.generative import Recommended as Recommended
    from loka.serving.generative import RecommendRequest as RecommendRequest
    from loka.serving.opening import open_model as open_model
    from loka.serving.queues import Batch as Batch
    from loka.serving.queues import Entry as Entry
    from loka.serving.queues import Policy as Policy
    from loka.serving.queues import Shed as Shed
    from loka.serving.rank_bundle import RankerBundle as RankerBundle
    from loka.serving.rank_bundle import is_ranker_bundle as is_ranker_bundle
    from loka.serving.rank_bundle import load_ranker as load_ranker
    from loka.serving.rank_bundle import save_ranker as save_ranker
    from loka.serving.rank_rows import Ranked as Ranked
    from loka.serving.rank_rows import RankRequest as RankRequest
    from loka.serving.ranker import RankingModel as RankingModel
    from loka.serving.runner import Refused as Refused
    from loka.serving.runner import Runner as Runner
    from loka.serving.scheduler import Scheduler as Scheduler
    from loka.serving.servable import FieldError as FieldError
    from loka.serving.servable import Job as Job
    from loka.serving.servable import Servable as Servable
    from loka.serving.server import Server as Server
    from loka.serving.service import Service as Service
    from loka.serving.times import BatchTimes as BatchTimes
    from loka.serving.tokens import Tokens as Tokens

_HOMES = {
    "Batch": "loka.serving.queues",
    "BatchTimes": "loka.serving.times",
    "Entry": "loka.serving.queues",
    "EventLog": "loka.serving.experiment",
    "FieldError": "loka.serving.servable",
    "Front": "loka.serving.front",
    "GenerativeModel": "loka.serving.generative",
    "Job": "loka.serving.servable",
    "Limits": "loka.serving.call",
    "Policy": "loka.serving.queues",
    "RankRequest": "loka.serving.rank_rows",
    "Ranked": "loka.serving.rank_rows",
    "RankerBundle": "loka.serving.rank_bundle",
    "RankingModel": "loka.serving.ranker",
    "RecommendRequest": "loka.serving.generative",
    "Recommended": "loka.serving.generative",
    "Refused": "loka.serving.runner",
    "Runner": "loka.serving.runner",
    "Scheduler": "loka.serving.scheduler",
    "Servable": "loka.serving.servable",
    "Server": "loka.serving.server",
    "Service": "loka.serving.service",
    "Shed": "loka.serving.queues",
    "Split": "loka.serving.experiment",
    "Tokens": "loka.serving.tokens",
    "is_ranker_bundle": "loka.serving.rank_bundle",
    "load_ranker": "loka.serving.rank_bundle",
    "open_model": "loka.serving.opening",
    "save_ranker": "loka.serving.rank_bundle",
}

__all__ = [
    "Batch",
    "BatchTimes",
    "Entry",
    "EventLog",
    "FieldError",
    "Front",
    "GenerativeModel",
    "Job",
    "Limits",
    "Policy",
    "RankRequest",
    "Ranked",
    "RankerBundle",
    "RankingModel",
    "RecommendRequest",
    "Recommended",
    "Refused",
    "Runner",
    "Scheduler",
    "Servable",
    "Server",
    "Service",
    "Shed",
    "Split",
    "Tokens",
    "is_ranker_bundle",
    "load_ranker",
    "open_model",
    "save_ranker",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'loka.serving' has no attribute {name!r}")
