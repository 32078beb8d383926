"""What the ranks of the distributed training tests run."""

import os
import signal
from typing import Any

import torch.distributed as dist

from loka.training import Callback, TrainConfig
from loka.training.distributed import DistributedTrainer, Distribution
from training.toy import ToyBatch, ToySplit, make_data, make_model


class DieAt(Callback):
    """Kill this process at the beginning of a step."""

    name = "die"
    every_rank = True

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.step == self.step and dist.get_rank() == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def uneven() -> ToySplit:
    """Of batches of 48 the first of two ranks has two, the second one."""
    whole = make_data().valid.whole
    return ToySplit(ToyBatch(whole.ids[:97], whole.dense[:97], whole.labels[:97]))


def train(
    out: str | None, steps: int, rows: str, collectives: str | None, resume: bool, die: tuple[int, int] | None = None,
    dense: str = "fsdp", recipe: str | None = None, dropout: float = 0.0,
) -> dict:  # fmt: skip
    config = TrainConfig(
        steps=steps,
        batch_size=48,
        device="cpu",
        log_every=5,
        checkpoint_every=4 if out else 0,
        clip_norm=1.0,
        learning_rate=1e-2,
    )
    callbacks = [] if die is None else [DieAt(*die)]
    trainer = DistributedTrainer(
        make_model(dropout=dropout), make_data(), config, Distribution(rows=rows, collectives=collectives, dense=dense), recipe=recipe, out=out, callbacks=callbacks
    )  # fmt: skip
    result = trainer.fit(resume=resume)
    weights = {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in trainer.module.state_dict().items()
    }
    wire = None if trainer.wire is None else trainer.wire.bytes
    return {
        "weights": weights,
        "loss": result.loss,
        "examples": result.examples,
        "seconds": result.seconds,
        "resumed": result.resumed_from,
        "wire": wire,
        "valid": trainer.evaluate(),
        "uneven": trainer.evaluate(uneven()),
    }
