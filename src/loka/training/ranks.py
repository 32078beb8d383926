"""The rank of this process, and decisions that all ranks must make together."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among `world`."""

    rank: int = 0
    world: int = 1

    @classmethod
    def find(cls) -> Ranks:
        """Read both from torch.distributed; without a process group, a single process."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return cls(torch.distributed.get_rank(), torch.distributed.get_world_size())
        return cls()

    def any(self, flag: bool, device: torch.device) -> bool:
        """Return whether the flag is set on any rank."""
        if self.world == 1:
            return flag
        votes = torch.tensor(int(flag), device=device)
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX)
        return bool(votes.item())


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module inside a DistributedDataParallel wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def keep_local(model: nn.Module) -> AbstractContextManager[object]:
    """Do not synchronize gradients in this block; the next backward outside it sends the sum."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
