"""On each of two gloo ranks: train a model with chains, wrapped, beside plain copies, and say how they differ."""

import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from loka import Guard
from loka.lowp import GuardConfig, chains_of
from loka.nn.wrapping import unwrap
from loka.placing import convert, plan_everything, revert, scale_state

WORLD = 2


class Net(nn.Module):
    """Two blocks, each a chain of its own with a norm of the user's, and a prediction layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.SiLU(), nn.Linear(96, 64))
        self.second = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return self.last(x + self.second(x))


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))


def low(model: nn.Module) -> nn.Module:
    convert(model, plan_everything(build(), batch(0, 0)), backend="reference")
    return model


def wrap(model: Net, kind: str) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    for block in (model.first, model.second):  # each holds all of its chain; the last linear belongs to the root
        fully_shard(block)
    fully_shard(model)
    return model


def compare(kind: str, when: str, rank: int) -> dict[str, object]:
    """Three steps; every reference has the scales of its rank and the same weights."""
    references = [low(build()) for _ in range(WORLD)]
    model = wrap(low(build()), kind) if when == "before" else low(wrap(build(), kind))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    twins = [torch.optim.SGD(reference.parameters(), 1e-2) for reference in references]
    worst = 0.0
    for step in range(3):
        y = model(batch(step, rank))
        y.square().mean().backward()
        for r, reference in enumerate(references):
            expected = reference(batch(step, r))
            expected.square().mean().backward()
            if r == rank:
                worst = max(worst, float((y - expected).detach().abs().max()))
        for group in zip(*(reference.parameters() for reference in references), strict=True):
            mean = torch.stack([p.grad for p in group]).mean(0)
            for p in group:
                p.grad = mean.clone()
        for one in (optimizer, *twins):
            one.step()
            one.zero_grad()
    chains = [chain.name for _, chain in chains_of(unwrap(model))]
    history = scale_state(model)
    count = revert(model)
    return {
        "case": f"{kind} {when}", "worst": worst, "chains": chains, "reverted": count, "histories": len(history),
        "plain": not list(chains_of(unwrap(model))), "finite": bool(torch.isfinite(model(batch(9, rank))).all()),
    }  # fmt: skip


def guarded(rank: int) -> dict[str, object]:
    """Only one rank sees the heavy rows; both open the same linear, and saturation is a share of all ranks' steps."""
    model = low(build())
    guard = Guard(model, GuardConfig(every=1))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sites: list[str] = []
    for step in range(3):
        x = batch(step, rank)
        if step == 2 and rank == 0:
            x = x * torch.exp(8 * torch.randn(16, 1, generator=torch.Generator().manual_seed(1)))
        guard.begin_step()
        model(x).square().mean().backward()
        optimizer.step()
        sites += [event.site for event in guard.check()]
    return {"case": "guard", "sites": sites, "left": [link.linear for _, c in chains_of(model) for link in c.links]}


def apart(rank: int) -> dict[str, object]:
    """A chain whose linears are sharded apart cannot run: its head would read another's shard."""
    del rank
    sharded = build()
    plan = plan_everything(build(), batch(0, 0))
    for layer in (sharded.first[0], sharded.first[3]):
        fully_shard(layer)
    fully_shard(sharded)
    kinds = [type(m) for m in sharded.modules()]
    try:
        convert(sharded, plan, backend="reference")
        refused = ""
    except ValueError as error:
        refused = str(error)
    late = low(build())
    for layer in (late.first[0], late.first[3]):  # type: ignore[index]
        fully_shard(layer)
    fully_shard(late)
    try:
        late(batch(0, 0))
        said = ""
    except ValueError as error:
        said = str(error)
    return {"case": "apart", "refused": refused, "said": said, "same": kinds == [type(m) for m in sharded.modules()]}


def compare_all() -> list[dict[str, object]]:
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    cases = [compare(kind, when, rank) for kind in ("ddp", "fsdp") for when in ("before", "after")]
    return [*cases, guarded(rank), apart(rank)]
