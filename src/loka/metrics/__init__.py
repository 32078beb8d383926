"""Recommendation metrics and statistical comparison of runs: pure torch, float64, streaming, mergeable across ranks.

Every metric has `update(...)`, `merge(other)`, `compute()`, `state_dict()` / `load_state_dict()`; `all_reduce(metric)`
merges exactly over torch.distributed. Undefined values (no examples, only one class) are NaN; bad input raises or is
counted.

    LogLoss, NormalizedEntropy, AUC, GAUC
    TopK (HR@K, recall@K, NDCG@K, MRR), BeamOverlap
    compare_paired -> Comparison (better / worse / equivalent / inconclusive)
    compare_anytime, check_ratio_anytime: the same while an experiment is running
    check_sample_ratio -> SampleRatio
"""

from loka.metrics.accumulator import Metric, all_reduce
from loka.metrics.auc import AUC, GAUC
from loka.metrics.beams import BeamOverlap
from loka.metrics.binary import log_losses
from loka.metrics.compare import Verdict, compare_paired, decide, minimum_detectable_effect
from loka.metrics.logloss import LogLoss, NormalizedEntropy
from loka.metrics.sample_ratio import check_sample_ratio
from loka.metrics.sequential import Moments, check_ratio_anytime, compare_anytime
from loka.metrics.topk import TopK

__all__ = [
    "AUC", "GAUC", "BeamOverlap", "LogLoss", "Metric", "Moments", "NormalizedEntropy", "TopK", "Verdict",
    "all_reduce", "check_ratio_anytime", "check_sample_ratio", "compare_anytime", "compare_paired", "decide",
    "log_losses", "minimum_detectable_effect",
]  # fmt: skip
