"""Which process of how many this is, and the few decisions that all of them must take alike."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """This process's rank among `world`; `connected` when they can talk (a process group is initialised)."""

    rank: int = 0
    world: int = 1
    connected: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be in [0, world), got rank {self.rank} of {self.world}")

    @classmethod
    def find(cls, rank: int | None, world: int | None) -> Ranks:
        """What the caller says, otherwise what torch.distributed says, otherwise a single process."""
        if (rank is None) != (world is None):
            raise ValueError(f"give both rank and world or neither, got rank={rank}, world={world}")
        connected = torch.distributed.is_available() and torch.distributed.is_initialized()
        if rank is not None and world is not None:
            return cls(rank, world, connected)
        if connected:
            return cls(torch.distributed.get_rank(), torch.distributed.get_world_size(), True)
        return cls()

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank."""
        if not self.connected or self.world == 1:
            return flag
        votes = torch.tensor(int(flag), device=device)
        torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MAX)
        return bool(votes.item())


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside a DistributedDataParallel wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def keep_local(model: nn.Module) -> AbstractContextManager[object]:
    """Gradients made in this block are not sent; the next backward outside it sends the sum."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
