"""One of two gloo processes: walk around the loop with a wrapped model, and write down what happened.

python loop_child.py RANK FOLDER
"""

import json
import os
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


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {"ddp": walk(Net, DistributedDataParallel, rank), "fsdp": walk(Net, shard, rank)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may still be joined when a process ends, and abort it after all is done
