"""serving: answers inside a deadline, over HTTP.

    Server(open_generative("runs/onerec"), sla=0.05, port=8000).run()          # or: loka serve runs/onerec --sla 50ms

One process by default: an ASGI front (`Front`), a runner per model with its scheduler (`Runner`, `Scheduler`), an operator's port. A model is anything with the methods of
`Servable`: a OneRec bundle, a frozen ranker, or your own.
"""

from loka.serving.experiment import EventLog, Split
from loka.serving.front import Front, Limits
from loka.serving.generative import GenerativeModel, Recommended, RecommendRequest, open_generative
from loka.serving.rank_bundle import RankerBundle, is_ranker_bundle, load_ranker, save_ranker
from loka.serving.ranker import Ranked, RankingModel, RankRequest, open_ranker
from loka.serving.runner import Refused, Runner
from loka.serving.scheduler import Batch, Entry, Policy, Scheduler, Shed
from loka.serving.servable import FieldError, Job, Servable
from loka.serving.server import Server
from loka.serving.service import Service
from loka.serving.times import BatchTimes
from loka.serving.tokens import Tokens

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
    "open_generative",
    "open_ranker",
    "save_ranker",
]
