"""Guard: sites that go wrong in low precision go back to high precision, by name, at a safe point.

    guard = Guard(model, GuardConfig(max_error=0.1, every=50))
    for batch in loader:
        guard.begin_step()          # looks during one step in `every`
        train_step(model, batch)
        for event in guard.check(): # waits for the device only where something was looked at
            print(event)

While a step runs, every site counts on the device (`loka.lowp.health`); the host reads nothing. `check`, called between steps, reads all counters at once and decides:

    non-finite     the site's output has a NaN or an Inf, and neither its input nor its weight has: the trouble began here. A site whose input or weight was bad already
                   is reported, not switched: another precision would not help it
    error          the sampled error, mean over the looks since the last check, exceeds `max_error`

A switch binds the site's GEMMs to high precision. Compiled code compiles once more for all sites switched by one check, so checks that switch are counted against `max_switches`;
beyond it sites are still reported. Looking itself compiles a second variant of the model once. With several processes the counters are summed over all ranks, so that all decide alike.

`state_dict` is what a checkpoint needs beside the model's: the step, the switches spent and the bindings of the sites that were switched or rebound. Load it into the guard of a
model that was converted as before, and before `loka.load_scale_state`, which expects the sites as they ran.

`report_drift` is for whoever watches distributions, `take_drift` for a probe's report: at the next check `decide(site)` is asked for another binding; None keeps the present one.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.dispatch.recipe import Operands
from loka.lowp.auto import settle
from loka.lowp.binding import BoundGemm, LinearBinding
from loka.lowp.health import BACKWARD, FIELDS, FORWARD, clear, new_health
from loka.lowp.linear import Linear, linears_of
from loka.lowp.scaling import Scaling
from loka.records import GEMMS, DriftReport

__all__ = ["Decide", "Guard", "GuardConfig", "GuardEvent"]

Decide = Callable[[str], LinearBinding | None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardConfig:
    """When to look, and what is too much. `max_error`: of a GEMM's sampled output (`loka.lowp.health`); a sound E4M3 GEMM is near 0.04."""

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
        self._bound: set[str] = set()  # sites that do not run what they were converted to
        self._attach()

    def begin_step(self) -> None:
        """Look during the step that follows, where it is due."""
        self._attach()
        self._looking = self.step % self.config.every == 0
        for linear in self.sites.values():
            linear.state.watching = self._looking and linear.binding.quantized
        self.step += 1

    def _attach(self) -> None:
        """Give every site a vector to count in; a site that was reverted has no place for one."""
        gone = [site for site, linear in self.sites.items() if not isinstance(linear, Linear)]
        if gone:
            raise ValueError(
                f"guarded sites that are not converted any more: {', '.join(gone[:6])}; hint: make a new Guard after loka.revert and another conversion"
            )
        for linear in self.sites.values():
            if linear.state.health is None:
                linear.state.health = new_health(linear.weight.device)

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
        self._attach()
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
            if isinstance(linear, Linear):
                linear.state.health, linear.state.watching = None, False

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, as values that JSON can hold."""
        self._attach()
        sites = {site: self.sites[site] for site in self.sites if site in self._bound}
        bound = {site: {"binding": _spell(at.binding), "note": at.state.note} for site, at in sites.items()}
        return {"step": self.step, "switches": self.switches, "sites": bound}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The counterpart: the sites run what they ran."""
        self._attach()
        if missing := {"step", "switches", "sites"} - state.keys():
            raise ValueError(f"this is no state of a Guard: {', '.join(sorted(missing))} missing")
        if unknown := sorted(state["sites"].keys() - self.sites.keys()):
            raise ValueError(
                f"the state switched {', '.join(unknown[:6])}, which this model has not converted; guarded sites are {', '.join(self.sites)}"
            )
        bindings = {site: _parse(saved["binding"]) for site, saved in state["sites"].items()}
        for site, binding in bindings.items():
            self._bind(site, binding, state["sites"][site]["note"])
        self.step, self.switches = int(state["step"]), int(state["switches"])

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
                clear(c)
        found = {}
        for site, row in zip(self.sites, rows, strict=True):
            if finding := self._find(site, row):
                found[site] = finding
        return found

    def _find(self, site: str, row: list[float]) -> tuple[str, bool] | None:
        for place, given, made in ((FORWARD, "x", "y"), (BACKWARD, "dy", "dx or dW")):
            calls, bad_in, bad_weight, bad_out, error, _ = row[place : place + len(FIELDS)]
            if not calls:
                continue
            if bad_out > bad_in + bad_weight:
                began = bad_out - bad_in - bad_weight
                return f"{made} is not finite in {began:.0f} of {calls:.0f} looks whose {given} and weight were", True
            for bad, what in ((bad_weight, "the weight"), (bad_in, given)):
                if bad:
                    return f"{what} is not finite in {bad:.0f} of {calls:.0f} looks: the trouble began elsewhere", False
            if error / calls > self.config.max_error:
                which = "fprop" if place == FORWARD else "backward"
                return f"{which} error {error / calls:.3g} exceeds {self.config.max_error:g}", True
        return None

    def _bind(self, site: str, binding: LinearBinding, note: str) -> None:
        self.sites[site].rebind(settle(binding, self.sites[site].weight)[0], note=note)
        self._bound.add(site)

    def _act(self, site: str, reason: str, harmful: bool) -> GuardEvent:
        if not harmful:
            return GuardEvent(self.step, site, "reported", reason)
        if self.switches >= self.config.max_switches:
            return GuardEvent(self.step, site, "capped", f"{reason}; {self.switches} switches are the limit")
        self._bind(site, LinearBinding(), f"guard: {reason}")
        return GuardEvent(self.step, site, "switched", reason)

    def _redecide(self, site: str, reason: str) -> GuardEvent:
        assert self.decide is not None
        if self.switches >= self.config.max_switches:
            return GuardEvent(self.step, site, "capped", f"{reason}; {self.switches} switches are the limit")
        binding = self.decide(site)
        if binding is None or binding == self.sites[site].binding:
            return GuardEvent(self.step, site, "reported", f"{reason}; the decision stands")
        self._bind(site, binding, f"decided anew: {reason}")
        return GuardEvent(self.step, site, "rebound", f"{reason}; now {binding}")


def _spell(binding: LinearBinding) -> dict[str, Any]:
    """A binding as JSON; what `auto` came to is left out, since it is found anew."""
    spelled: dict[str, Any] = {name: getattr(binding, name) for name in ("save", "weights", "quantizer")}
    spelled["scaling"] = {"history": binding.scaling.history, "margin": binding.scaling.margin}
    for gemm in GEMMS:
        bound: BoundGemm | None = getattr(binding, gemm)
        spelled[gemm] = None if bound is None else {
            "backend": bound.backend, "a": str(bound.operands.a), "b": str(bound.operands.b), "fast_accum": bound.operands.fast_accum
        }  # fmt: skip
    return spelled


def _parse(spelled: Mapping[str, Any]) -> LinearBinding:
    """The inverse."""

    def bound(gemm: str) -> BoundGemm | None:
        g = spelled[gemm]
        return (
            None if g is None else BoundGemm(g["backend"], Operands.parse(g["a"], g["b"], fast_accum=g["fast_accum"]))
        )

    fprop, dgrad, wgrad = (bound(gemm) for gemm in GEMMS)
    rest = {name: spelled[name] for name in ("save", "weights", "quantizer")}
    return LinearBinding(fprop, dgrad, wgrad, scaling=Scaling(**spelled["scaling"]), **rest)
