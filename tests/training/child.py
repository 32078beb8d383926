"""One training run in a process of its own, for tests that kill it or run several.

python -m training.child FOLDER [--resume] [--slow]
python -m training.child FOLDER --rank R --world W --rendezvous FILE
"""

import argparse
import time
from datetime import timedelta

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--rendezvous")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model()
    if options.rendezvous:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{options.rendezvous}",
            rank=options.rank,
            world_size=options.world,
            timeout=timedelta(seconds=200),
        )
        model = torch.nn.parallel.DistributedDataParallel(model)
    callbacks = [JsonlLog(f"{options.folder}/log.jsonl"), *([Slow()] if options.slow else [])]
    Trainer(model, make_data(), TrainConfig(**CONFIG), callbacks=callbacks, out=options.folder).fit(
        resume=options.resume
    )
    if options.rendezvous:
        total = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        print(f"weights {total.double().sum().item():.17g} {total.double().square().sum().item():.17g}")
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
