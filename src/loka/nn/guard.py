"""Guard: sites that go wrong in low precision go back to high precision, by name, at a safe point.

    guard = Guard(model, GuardConfig(max_error=0.1, every=50))
    for batch in loader:
        guard.begin_step()          # looks during one step in `every`
        train_step(model, batch)
        for event in guard.check(): # waits for the device only where something was looked at
            print(event)

While a step runs, every site counts on the device (`loka.nn.health`); the host reads nothing. `check`, called between steps, reads all counters at once and decides:

    non-finite     the site's output has a NaN or an Inf and its input has none: the trouble began here. A site whose input was bad already is reported, not switched:
                   another precision would not help it
    error          the sampled relative error, mean over the looks since the last check, exceeds `max_error`

A switch binds the site's GEMMs to high precision. Compiled code compiles once more for all sites switched by one check, so checks that switch are counted against `max_switches`;
beyond it sites are still reported. Looking itself compiles a second variant of the model once. With several processes the counters are summed over all ranks, so that all decide alike.

`report_drift` is for whoever watches distributions, `take_drift` for a probe's report: at the next check `decide(site)` is asked for another binding; None keeps the present one.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from loka.nn.binding import LinearBinding
from loka.nn.health import BACKWARD, FIELDS, FORWARD, new_health
from loka.nn.linear import Linear, linears_of
from loka.records import DriftReport

__all__ = ["Decide", "Guard", "GuardConfig", "GuardEvent"]

Decide = Callable[[str], LinearBinding | None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardConfig:
    """When to look, and what is too much. `max_error`: relative L2 of a GEMM's sampled output; a sound E4M3 GEMM is near 0.04."""

    max_error: float = 0.15
    every: int = 50
    max_switches: int = 4

    def __post_init__(self) -> None:
        if not self.max_error > 0:
            raise ValueError(f"max_error={self.max_error}: expected a positive number")
        if self.every < 1 or self.max_switches < 0:
            raise ValueError(
                f"every={self.every}, max_switches={self.max_switches}: expected at least 1, and not negative"
            )


@dataclass(frozen=True)
class GuardEvent:
    """What a check found at one site, and what it did: `switched`, `rebound`, `capped` (the cap forbids another switch) or `reported`."""

    step: int
    site: str
    action: str
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.site} {self.action}: {self.reason}"


class Guard:
    """Watches the converted linears of a model."""

    def __init__(self, model: nn.Module, config: GuardConfig | None = None, *, decide: Decide | None = None) -> None:
        self.config = config or GuardConfig()
        self.decide = decide
        self.sites: dict[str, Linear] = {linear.state.name or name: linear for name, linear in linears_of(model)}
        if not self.sites:
            raise ValueError("the model has no converted linear to guard; hint: loka.convert(model, plan) first")
        self.step = self.switches = 0
        self.events: list[GuardEvent] = []
        self._drifted: dict[str, str] = {}
        self._looking = False
        for linear in self.sites.values():
            linear.state.health = new_health(linear.weight.device)

    def begin_step(self) -> None:
        """Look during the step that follows, where it is due."""
        self._looking = self.step % self.config.every == 0
        for linear in self.sites.values():
            linear.state.watching = self._looking and linear.binding.quantized
        self.step += 1

    def report_drift(self, site: str, reason: str) -> None:
        """A site's distribution has shifted: ask `decide` about it at the next check."""
        if site not in self.sites:
            raise ValueError(f"no guarded site {site!r}; sites are {', '.join(self.sites)}")
        if self.decide is None:
            raise ValueError(f"{site} drifted ({reason}) and nobody can decide anew; hint: Guard(model, decide=...)")
        self._drifted[site] = reason

    def take_drift(self, report: DriftReport) -> list[str]:
        """Hand a probe's drift report over: sites whose verdict changed, or that moved where verdicts were not compared. Returns the guarded ones among them."""
        found = {c.site: f"verdict {c.before} -> {c.after}" for c in report.changes}
        if not report.judged:
            for move in report.moves:
                found.setdefault(
                    move.site, f"{move.role} {move.feature} {move.before:.3g} -> {move.after:.3g} at step {move.step}"
                )
        guarded = [site for site in found if site in self.sites]
        for site in guarded:
            self.report_drift(site, found[site])
        return guarded

    def check(self) -> list[GuardEvent]:
        """Read what was counted and act on it; call between steps, on every rank. Returns what happened."""
        found = self._judge() if self._looking else {}
        self._looking = False
        for linear in self.sites.values():
            linear.state.watching = False
        events = [self._act(site, reason, harmful) for site, (reason, harmful) in found.items()]
        events += [self._redecide(site, reason) for site, reason in self._drifted.items()]
        self._drifted.clear()
        if any(event.action in ("switched", "rebound") for event in events):
            self.switches += 1
        for event in events:
            log.warning("%s", event)
        self.events += events
        return events

    def stop(self) -> None:
        """Stop counting; what was switched stays switched."""
        for linear in self.sites.values():
            linear.state.health, linear.state.watching = None, False

    def _judge(self) -> dict[str, tuple[str, bool]]:
        """Per site with a finding: what it is, and whether high precision would help."""
        counted = [linear.state.health for linear in self.sites.values()]
        device = self.sites[next(iter(self.sites))].weight.device
        table = torch.stack([c.to(device) for c in counted if c is not None])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(table)
        rows = table.tolist()  # the only wait for the device
        for c in counted:
            if c is not None:
                c.zero_()
        found = {}
        for site, row in zip(self.sites, rows, strict=True):
            if finding := self._find(site, row):
                found[site] = finding
        return found

    def _find(self, site: str, row: list[float]) -> tuple[str, bool] | None:
        for place, given, made in ((FORWARD, "x", "y"), (BACKWARD, "dy", "dx or dW")):
            calls, bad_in, bad_out, error = row[place : place + len(FIELDS)]
            if not calls:
                continue
            if bad_out > bad_in:
                return f"{made} is not finite in {bad_out - bad_in:.0f} of {calls:.0f} looks whose {given} was", True
            if bad_in:
                return f"{given} is not finite in {bad_in:.0f} of {calls:.0f} looks: the trouble began elsewhere", False
            if error / calls > self.config.max_error:
                which = "fprop" if place == FORWARD else "backward"
                return f"{which} error {error / calls:.3g} exceeds {self.config.max_error:g}", True
        return None

    def _act(self, site: str, reason: str, harmful: bool) -> GuardEvent:
        if not harmful:
            return GuardEvent(self.step, site, "reported", reason)
        if self.switches >= self.config.max_switches:
            return GuardEvent(self.step, site, "capped", f"{reason}; {self.switches} switches are the limit")
        self.sites[site].rebind(LinearBinding(), note=f"guard: {reason}")
        return GuardEvent(self.step, site, "switched", reason)

    def _redecide(self, site: str, reason: str) -> GuardEvent:
        assert self.decide is not None
        if self.switches >= self.config.max_switches:
            return GuardEvent(self.step, site, "capped", f"{reason}; {self.switches} switches are the limit")
        binding = self.decide(site)
        if binding is None or binding == self.sites[site].binding:
            return GuardEvent(self.step, site, "reported", f"{reason}; the decision stands")
        self.sites[site].rebind(binding, note=f"decided anew: {reason}")
        return GuardEvent(self.step, site, "rebound", f"{reason}; now {binding}")
