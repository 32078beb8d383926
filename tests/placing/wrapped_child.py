"""On each of two gloo ranks: train a wrapped, converted model beside an unwrapped one, and say how they differ."""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from loka.lowp.linear import Linear
from loka.placing import LinearOptions, convert, revert, scale_state

WORLD = 2


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 16))


def low(model: nn.Module, scales: str) -> nn.Module:
    convert(model, recipe="tensorwise", backend="reference", options=LinearOptions(scales=scales))  # type: ignore[arg-type]
    return model


def wrap(model: nn.Sequential, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    for layer in (model[0], model[2]):  # the last linear belongs to the root's group
        fully_shard(layer)
    fully_shard(model)
    if kind == "fsdp-compiled":  # in place; FSDP2's own hooks are where the graph ends and begins again
        model.compile(backend="aot_eager", dynamic=False)
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def compare(kind: str, when: str, scales: str, rank: int) -> dict[str, object]:
    """Three steps of two micro-batches; the reference sees what every rank sees, one half after the other."""
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model, references = build(), [low(build(), scales) for _ in range(WORLD)]
    shared = [list(r.parameters()) for r in references]
    model = wrap(low(model, scales), kind) if when == "before" else low(wrap(model, kind), scales)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    twins = [torch.optim.Adam(parameters, 1e-2) for parameters in shared]
    worst = 0.0
    for step in range(3):
        optimizer.zero_grad(), [twin.zero_grad() for twin in twins]
        for micro in range(2):
            x = batch(2 * step + micro, rank)
            y = model(x)
            y.square().mean().backward()
            expected = references[rank](x)
            worst = max(worst, float((y - expected).detach().abs().max()))
            for r, reference in enumerate(
                references
            ):  # every reference has the scales of its rank and the same weights
                reference(batch(2 * step + micro, r)).square().mean().backward()
        mean = [torch.stack([p.grad for p in group]).mean(0) for group in zip(*shared, strict=True)]
        for parameters, twin in zip(shared, twins, strict=True):
            for p, g in zip(parameters, mean, strict=True):
                p.grad = g.clone()
            twin.step()
        optimizer.step()
    inner = model.module if kind == "ddp" else model
    kinds = [isinstance(m, Linear) for m in (inner[0], inner[2], inner[4])]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled
    history = scale_state(model)
    count = revert(model)
    return {
        "case": f"{kind} {when} {scales}",
        "worst": worst,
        "converted": kinds,
        "reverted": count,
        "remembered": all(float(t.max()) > 0 for name, t in history.items() if name.endswith("history")),
        "histories": len(history),
        "plain": not any(isinstance(m, Linear) for m in inner.modules()),
        "finite": bool(torch.isfinite(model(batch(9, rank))).all()),
        "graphs": graphs,
    }


def compare_all() -> list[dict[str, object]]:
    warnings.simplefilter("ignore")
    cases = [(kind, when, "dynamic") for kind in ("ddp", "fsdp", "fsdp-compiled") for when in ("before", "after")]
    return [compare(*case, dist.get_rank()) for case in [*cases, ("ddp", "after", "delayed"), ("fsdp", "after", "delayed")]]  # fmt: skip
