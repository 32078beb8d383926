"""training: the loop that drives a model over a data set, and the parts it is made of.

    from loka.training import Trainer, TrainConfig, Progress

    result = Trainer(model, data, TrainConfig(steps=1000, precision="bf16"), callbacks=[Progress()], out="runs/x").fit()

`loka train` is the same parts behind a command line.
"""

from loka.training.callbacks import Callback, CallbackState
from loka.training.checkpoint import DamagedCheckpointError, Snapshot, find_checkpoints, read_best, read_checkpoint
from loka.training.config import TrainConfig, learning_rate_factor
from loka.training.evaluation import evaluate, ranking_loss
from loka.training.logs import Curve, JsonlLog, Progress, TensorBoard
from loka.training.optimizers import Optimizers, RowwiseAdagrad, split_parameters
from loka.training.result import NonFiniteLossError, TrainResult
from loka.training.sequence import NextIdTask, NextItemTask, embed_items
from loka.training.snapshot import load_weights, seed_everything
from loka.training.trainer import Trainer

__all__ = [
    "Callback", "CallbackState", "Curve", "DamagedCheckpointError", "JsonlLog", "NextIdTask", "NextItemTask",
    "NonFiniteLossError", "Optimizers", "Progress", "RowwiseAdagrad", "Snapshot", "TensorBoard", "TrainConfig",
    "TrainResult", "Trainer", "embed_items", "evaluate", "find_checkpoints", "learning_rate_factor", "load_weights",
    "ranking_loss", "read_best", "read_checkpoint", "seed_everything", "split_parameters",
]  # fmt: skip
