"""On each of two gloo ranks: walk around the loop with a wrapped model, and say what happened."""

import sys
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.placing.loop import Net, walk


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model.tower)  # holds the whole chain; the others belong to the root
    fully_shard(model)
    return model


def walk_both() -> dict[str, dict]:
    rank = dist.get_rank()
    return {"ddp": walk(Net, DistributedDataParallel, rank), "fsdp": walk(Net, shard, rank)}
