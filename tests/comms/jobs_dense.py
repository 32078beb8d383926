"""What the ranks of the FSDP2 and DDP tests run."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from loka.comms import StepClock, all_gather, all_reduce, parse_codec, quantize_ddp, quantize_fsdp, reduce_scatter


def tower() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(96, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 130), nn.ReLU(), nn.Linear(130, 8)
    )


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(32, 96, generator=generator), torch.randn(32, 8, generator=generator)


def collectives(codec: str) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    chosen, generator = parse_codec(codec), torch.Generator().manual_seed(rank)
    x = torch.randn(world * 1000, generator=generator)
    piece, total = torch.empty(1000), torch.empty(world * 1000)
    reduce_scatter(piece, x, chosen)
    all_gather(total, x[:1000].clone(), chosen)
    return {"x": x, "scattered": piece, "gathered": total, "reduced": all_reduce(x[:777], chosen)}


def fsdp(gather: str | None, scatter: str | None, steps: int) -> dict:
    model = tower()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    clock = StepClock(seed=1)
    wire = (
        None
        if gather is None and scatter is None
        else quantize_fsdp(model, all_gather=gather, reduce_scatter=scatter, clock=clock)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = data(dist.get_rank())
    losses, first = [], None
    for step in range(steps):
        clock.step = step
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if first is None:
            first = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    weights = {name: p.full_tensor() for name, p in model.state_dict().items()}
    return {
        "losses": losses,
        "grads": first,
        "weights": weights,
        "wire": None if wire is None else (wire.ratio, wire.by_op),
    }


def ddp(codec: str | None, steps: int) -> dict:
    model = nn.parallel.DistributedDataParallel(tower())
    clock = StepClock()
    wire = None if codec is None else quantize_ddp(model, codec, clock=clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = data(dist.get_rank())
    losses, first = [], None
    for step in range(steps):
        clock.step = step
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if first is None:
            first = {name: p.grad.clone() for name, p in model.module.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return {
        "losses": losses,
        "grads": first,
        "weights": model.module.state_dict(),
        "wire": None if wire is None else (wire.ratio, wire.by_op),
    }


def wide() -> dict:
    """What layers of a ranking model's width send: one step, by operation."""
    model = fully_shard(
        nn.Sequential(nn.Linear(479, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))
    )
    wire = quantize_fsdp(model)
    model(torch.randn(4, 479)).sum().backward()
    return wire.by_op


def everything() -> dict:
    """All jobs in one start of the processes: starting them is what costs."""
    exact = "e4m3:1x128:pow2"
    return {
        "collectives": collectives(exact),
        "gathered": fsdp(exact, None, 1),
        "trained": fsdp(exact, f"{exact}:stochastic", 4),
        "ddp": ddp(exact, 3),
        "wide": wide(),
    }
