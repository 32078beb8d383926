"""The loop on one model: Probe, plan, convert, train on, Guard, revert. Used by test_loop and, under two ranks, by loop_child."""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loka import Guard
from loka.lowp import GuardConfig, chains_of
from loka.lowp.linear import Linear
from loka.nn.wrapping import named_sites, unwrap
from loka.placing import convert, plan_everything, revert
from loka.probe import Probe
from loka.records import Plan

LINEARS = ("tower.0", "tower.2", "tower.4", "wide", "last")


class Net(nn.Module):
    """A chain, a linear that stands alone, and a prediction layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 64))
        self.wide = nn.Linear(64, 64)
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wide(x) + self.tower(x))


def fused() -> Net:
    """Its tower is a chain already: what it runs is what is judged."""
    model = Net()
    convert(model, plan_everything(Net(), torch.randn(4, 64)), backend="reference")
    return model


def parametrised() -> Net:
    model = Net()
    nn.utils.parametrizations.spectral_norm(model.tower[2])
    return model


def protected() -> Net:
    model = Net()
    model.tower[2].loka_protected = "by hand"
    return model


def batch(step: int, rank: int = 0, rows: int = 32) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    return x, (x[:, :1] > 0).float()


class Loop:
    """One walk around; every step's loss is kept."""

    def __init__(self, model: nn.Module, rank: int = 0) -> None:
        self.model, self.rank, self.losses = model, rank, []
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        self.probe = Probe(model, every=1)

    def train(self, steps: int, guard: Guard | None = None) -> None:
        for _ in range(steps):
            x, y = batch(len(self.losses), self.rank)
            if guard is not None:
                guard.begin_step()
            self.optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.probe.step()
            if guard is not None:
                guard.check()
            self.losses.append(float(loss.detach()))

    def plan(self) -> Plan:
        """Made where all ranks' rows are, and the same everywhere."""
        settings = {"samples": 2, "recipes": ("rowwise",), "sources": ("rows",), "judged_on": ("rows",), "margin": 1.0}
        if dist.is_initialized():
            self.probe.gather()
        report = self.probe.evaluate(example=batch(0)[0], **settings)
        plans = [report.plan(min_speedup=None)]
        if dist.is_initialized():
            dist.broadcast_object_list(plans)
        return plans[0]


def walk(make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], rank: int = 0) -> dict[str, object]:
    """What happened on the way, as JSON."""
    warnings.simplefilter("ignore")
    model = wrap(make())
    inner = unwrap(model)
    kinds = {name: type(module).__name__ for name, module in named_sites(inner)}
    objects = [id(p) for p in inner.parameters()]
    loop = Loop(model, rank)
    loop.train(3)
    plan = loop.plan()
    if list(chains_of(inner)):
        revert(model)
    done = convert(model, plan, backend="reference")
    guard = Guard(model, GuardConfig(every=1, max_error=0.5))
    loop.train(3, guard)
    running = {name: [link.linear for link in chain.links] for name, chain in chains_of(inner)}
    opened = [
        str(event) for event in guard.put_back("tower.4" if "tower.4" in guard.chained else next(iter(guard.sites)))
    ]
    loop.train(1, guard)
    guard.stop()
    count = revert(model)
    loop.train(1)
    return {
        "sites": list(loop.probe.sites), "off": [w.off for w in map(loop.probe.watch, loop.probe.sites) if w.off], "notes": loop.probe.notes,
        "calls": [loop.probe.watch(site).calls for site in loop.probe.sites], "units": [unit.linears for unit in plan.units], "running": list(running.values()),
        "converted": sorted(done.converted), "kept": done.kept, "opened": opened, "events": [str(event) for event in guard.events], "reverted": count,
        "plain": not list(chains_of(inner)) and not any(isinstance(m, Linear) for m in inner.modules()),
        "same": kinds == {name: type(module).__name__ for name, module in named_sites(inner)} and objects == [id(p) for p in inner.parameters()],
        "losses": loop.losses, "plan_notes": plan.notes,
    }  # fmt: skip
