"""What the ranks of the test of `TuneDuringTraining` run."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from loka.integrations import TuneDuringTraining
from tuning.small import MARGIN, Ranker, loss, make_batches, make_trained, placed, tune

AFTER = 6


def make(out: str) -> TuneDuringTraining:
    held_out = make_batches(8, seed=7 + dist.get_rank())
    return TuneDuringTraining(
        held_out, after=AFTER, step=lambda m, b: loss(m(b[0]), b[1]), out=out, margin=MARGIN, progress=False
    )


def tune_with_other_batches(out: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, tuning = DistributedDataParallel(Ranker()), make(out)
    optimizer = torch.optim.Adam(model.parameters(), 3e-2)
    for x, y in make_batches(AFTER + 3, seed=3 + dist.get_rank()):
        tuning.begin_step(model)
        optimizer.zero_grad()
        loss(model(x), y).mean().backward()
        optimizer.step()
        tuning.end_step(model)
    inner = model.module
    return {"placed": placed(inner), "tuned": tuning.tuned is not None, "weight": inner.second.weight.detach()}


def resume(out: str) -> dict[str, Any]:
    model, where = Ranker(), out if dist.get_rank() == 0 else f"{out}/elsewhere"
    make(where).resume(model, AFTER + 1)
    return {"placed": placed(model)}


def tune_alone_and_sharded() -> dict[str, Any]:
    model, _ = make_trained(4)
    tuned = tune(model)
    tuned.revert()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    synced = nn.Sequential(nn.Linear(64, 64), nn.SyncBatchNorm(64), nn.Linear(64, 1), nn.Flatten(0))
    return {"notes": tuned.record.notes, "refused": _refuse(model), "synced": _refuse(synced)}


def _refuse(model: nn.Module) -> str:
    try:
        tune(model)
    except ValueError as error:
        return str(error)
    return ""
