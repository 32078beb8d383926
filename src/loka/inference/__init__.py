"""Generate recommendations with OneRec, in 16-bit or FP8, for many requests and many beams.

    engine = Engine(model, EngineConfig(beams=512), valid=index.trie)
    engine.generate([Request(history_as_codes), ...])

The same engine runs plain and quantized models (`loka.quantize`). `Recommender` takes and returns items instead of
codes. loka.serving forms batches of requests that arrive one by one, under a deadline.
"""

from loka.inference.bundle import Bundle, is_bundle, load_bundle, save_bundle
from loka.inference.comparison import compare_arms, overlap_of
from loka.inference.config import EngineConfig
from loka.inference.engine import Engine
from loka.inference.evaluation import evaluate_users
from loka.inference.memory import EngineMemoryError, estimate_memory
from loka.inference.recommender import Recommender
from loka.inference.request import Recommendation, Request

__all__ = [
    "Bundle", "Engine", "EngineConfig", "EngineMemoryError", "Recommendation", "Recommender", "Request",
    "compare_arms", "estimate_memory", "evaluate_users", "is_bundle", "load_bundle", "overlap_of", "save_bundle",
]  # fmt: skip
