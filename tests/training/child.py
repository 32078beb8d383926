"""One training run in a process of its own, for tests that kill it or run several."""

import time

import torch

from loka.training import Callback, JsonlLog, TrainConfig, Trainer

from .toy import make_data, make_model

CONFIG = {
    "steps": 60,
    "batch_size": 32,
    "accumulate": 2,
    "device": "cpu",
    "clip_norm": 1.0,
    "schedule": "cosine",
    "warmup_steps": 5,
    "evaluate_every": 20,
    "checkpoint_every": 7,
    "log_every": 1,
}


class Slow(Callback):
    """Gives the parent time to kill between two checkpoints."""

    def on_step_end(self, trainer, log):
        time.sleep(0.02)


def train_slowly(folder: str) -> None:
    torch.set_num_threads(1)
    callbacks = [JsonlLog(f"{folder}/log.jsonl"), Slow()]
    Trainer(make_model(), make_data(), TrainConfig(**CONFIG), callbacks=callbacks, out=folder).fit()


def go_on(folder: str) -> None:
    torch.set_num_threads(1)
    callbacks = [JsonlLog(f"{folder}/log.jsonl")]
    Trainer(make_model(), make_data(), TrainConfig(**CONFIG), callbacks=callbacks, out=folder).fit(resume=True)


def train_together(folder: str) -> list[float]:
    """One of several ranks; what its weights add up to."""
    rank = torch.distributed.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    out = f"{folder}/rank{rank}"
    Trainer(model, make_data(), TrainConfig(**CONFIG), callbacks=[JsonlLog(f"{out}/log.jsonl")], out=out).fit()
    total = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).double()
    return [total.sum().item(), total.square().sum().item()]
