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
    saturation     more than `max_saturated` of the steps since the last check had values beyond a chain's delayed scale, or a serving chain's calibrated one

A switch puts a linear back to high precision; a chain splits there, and both halves stay in FP8. The event says what must be made anew: whoever captured the step in a CUDA graph must capture it
again, since a graph goes on replaying what it holds; compiled code notices by itself and compiles once more in the next step, for all sites switched by one check, so checks that switch are
counted against `max_switches`; beyond it sites are still reported. Looking itself compiles a second variant of the model once. With several processes the counters are summed over all ranks, so that all decide alike.

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

from loka.kernels.scaled_mm import GemmWay
from loka.lowp.auto import settle
from loka.lowp.binding import LinearBinding
from loka.lowp.chain import Chain, chains_of
from loka.lowp.health import BACKWARD, FIELDS, FORWARD, clear, new_health
from loka.lowp.interaction import interactions_of, release_interaction
from loka.lowp.linear import Linear, linears_of
from loka.lowp.scaling import Scaling
from loka.nn.wrapping import unwrap
from loka.records import GEMMS, DriftReport

Decide = Callable[[str], LinearBinding | None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GuardConfig:
    """When Guard looks, and beyond which limits it acts.

    Args:
        max_error: of a GEMM's sampled output (`loka.lowp.health`); a sound E4M3 GEMM is near 0.04, a layer of a chain, whose output is FP8 too, near 0.06.
        every: look during one step in so many.
        max_switches: checks that may switch something; beyond it sites are reported only.
        max_saturated: share of the steps since the last check whose values may exceed a remembered scale.

    Example:
        >>> guard = loka.Guard(model, GuardConfig(every=20))
    """

    max_error: float = 0.15
    every: int = 50
    max_switches: int = 4
    max_saturated: float = 0.2

    def __post_init__(self) -> None:
        if not self.max_error > 0:
            raise ValueError(f"max_error={self.max_error}: expected a positive number")
        if not 0 <= self.max_saturated <= 1:
            raise ValueError(f"max_saturated={self.max_saturated}: expected a share of the steps, 0 to 1")
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


@dataclass
class _InChain:
    """One linear of a chain, as Guard sees it."""

    chain: Chain
    at: int
    seen: float = 0.0  # saturated steps at the last check
    steps: int = 0  # the guard's step at the last check

    @property
    def linear(self) -> nn.Linear:
        return self.chain.linears[self.at]


class Guard:
    """Watches the converted linears of a model, alone and in chains.

    Args:
        model: converted, wrapped or not.
        config: when to look, and what is too much.
        decide: asked for another binding of a single linear whose distribution has drifted.

    Example:
        >>> guard = loka.Guard(model)
        >>> for batch in loader:
        ...     guard.begin_step()
        ...     train_step(model, batch)
        ...     guard.check()
    """

    def __init__(self, model: nn.Module, config: GuardConfig | None = None, *, decide: Decide | None = None) -> None:
        self.config = config or GuardConfig()
        self.decide = decide
        self.model, self._outer = unwrap(model), model
        self.sites: dict[str, Linear] = {linear.state.name or name: linear for name, linear in linears_of(self.model)}
        self.chained: dict[str, _InChain] = {}
        self._find_chained()
        if not self.sites and not self.chained:
            raise ValueError("the model has no converted linear to guard; hint: loka.convert(model, plan) first")
        self.step = self.switches = 0
        self.events: list[GuardEvent] = []
        self.opened: dict[str, str] = {}  # linears of chains that run in high precision now, and why
        self._drifted: dict[str, str] = {}
        self._looking = False
        self._bound: set[str] = set()  # sites that do not run what they were converted to
        self._attach()

    def _find_chained(self) -> None:
        """The linears of all chains as they are now."""
        before = self.chained
        self.chained = {}
        # kept: walking a model's modules takes longer than all else here
        self._chains = [chain for _, chain in chains_of(self.model)]
        for chain in self._chains:
            for at, link in enumerate(chain.links):
                old = before.get(link.linear)
                self.chained[link.linear] = _InChain(chain, at, *(() if old is None else (old.seen, old.steps)))

    def begin_step(self) -> None:
        """Look during the step that follows, where it is due."""
        self._attach()
        self._watch(self.step % self.config.every == 0)
        self.step += 1

    def _watch(self, looking: bool) -> None:
        """Have sites count, or not."""
        if looking == self._looking:
            return
        self._looking = looking
        for linear in self.sites.values():
            linear.state.watching = looking and linear.binding.quantized
        for chain in self._chains:
            chain.watching = looking

    def _attach(self) -> None:
        """Give every site a vector to count in; a site that was reverted has no place for one."""
        gone = [site for site, linear in self.sites.items() if not isinstance(linear, Linear)]
        gone += [site for site, inside in self.chained.items() if not inside.chain.placed]
        if gone:
            raise ValueError(
                f"guarded sites that are not converted any more: {', '.join(gone[:6])}; hint: make a new Guard after loka.revert and another conversion"
            )
        for linear in self.sites.values():
            if linear.state.health is None:
                linear.state.health = new_health(linear.weight.device)
        for chain in self._chains:
            if chain.health is None:
                chain.health = [new_health(chain.static.device) for _ in chain.links]

    def report_drift(self, site: str, reason: str) -> None:
        """A site's distribution has shifted: ask `decide` about it at the next check."""
        if site not in self.sites and site not in self.chained:
            raise ValueError(f"no guarded site {site!r}; sites are {', '.join((*self.sites, *self.chained))}")
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
        guarded = [site for site in found if site in self.sites or site in self.chained]
        for site in guarded:
            self.report_drift(site, found[site])
        return guarded

    def check(self) -> list[GuardEvent]:
        """Read what was counted and act on it; call between steps, on every rank. Returns what happened."""
        self._attach()
        found = self._judge() if self._looking else {}
        self._watch(False)
        events = [self._act(site, reason, harmful) for site, (reason, harmful) in found.items()]
        events += [self._redecide(site, reason) for site, reason in self._drifted.items()]
        self._drifted.clear()
        if any(event.action in ("switched", "rebound") for event in events):
            self.switches += 1
        for event in events:
            log.warning("%s", event)
        self.events += events
        return events

    def put_back(self, site: str, reason: str = "asked for", *, chain: bool = False) -> list[GuardEvent]:
        """Put a linear back to high precision by hand, between two steps; it counts against no limit, and `state_dict` remembers it.

        Args:
            site: the linear's name.
            reason: for the record.
            chain: the whole chain that the linear runs in, not it alone.

        Returns:
            What was done, with what must be compiled or captured again.

        Example:
            >>> guard.put_back("tower.3")            # its chain splits there
            >>> guard.put_back("tower.3", chain=True)
        """
        self._attach()
        if site not in self.chained and (chain or site not in self.sites):
            guarded = ", ".join(self.chained if chain else (*self.sites, *self.chained))
            raise ValueError(f"no guarded site {site!r}{' in a chain' if chain else ''}; there are {guarded or 'none'}")
        names = [link.linear for link in self.chained[site].chain.links] if chain else [site]
        events = []
        for name in names:
            again = self._tell_again(name)
            self._put_back(name, f"guard: {reason}")
            events.append(GuardEvent(self.step, name, "switched", f"{reason}; {again}"))
        self.events += events
        return events

    def stop(self) -> None:
        """Stop counting; what was switched stays switched."""
        self._looking = False
        for chain in self._chains:
            chain.health, chain.watching = None, False
        for linear in self.sites.values():
            if isinstance(linear, Linear):
                linear.state.health, linear.state.watching = None, False

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, as values that JSON can hold."""
        self._attach()
        sites = {site: self.sites[site] for site in self.sites if site in self._bound}
        bound = {site: {"binding": _spell(at.binding), "note": at.state.note} for site, at in sites.items()}
        return {"step": self.step, "switches": self.switches, "sites": bound, "opened": dict(self.opened)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The counterpart: the sites run what they ran."""
        self._attach()
        if missing := {"step", "switches", "sites"} - state.keys():
            raise ValueError(f"this is no state of a Guard: {', '.join(sorted(missing))} missing")
        if unknown := sorted(state["sites"].keys() - self.sites.keys()):
            raise ValueError(
                f"the state switched {', '.join(unknown[:6])}, which this model has not converted; guarded sites are {', '.join(self.sites)}"
            )
        opened = state.get("opened", {})
        if unknown := sorted(opened.keys() - self.chained.keys() - self.opened.keys()):
            raise ValueError(f"the state opened chains at {', '.join(unknown[:6])}, which this model has not")
        for site, note in opened.items():
            if site in self.chained:
                self._open(site, note)
        bindings = {site: _parse(saved["binding"]) for site, saved in state["sites"].items()}
        for site, binding in bindings.items():
            self._bind(site, binding, state["sites"][site]["note"])
        self.step, self.switches = int(state["step"]), int(state["switches"])

    def _judge(self) -> dict[str, tuple[str, bool]]:
        """Per site with a finding: what it is, and whether high precision would help."""
        names = [*self.sites, *self.chained]
        if not names:  # all that ran in chains was put back
            return {}
        counted = [linear.state.health for linear in self.sites.values()]
        counted += [inside.chain.health[inside.at] if inside.chain.health else None for inside in self.chained.values()]
        saturated = [count for chain in self._chains for count in chain.count_saturated()]
        device = next(c.device for c in counted if c is not None)
        zero = torch.zeros((), device=device)
        over = [zero] * len(self.sites) + [zero if count is None else count.to(device) for count in saturated]
        table = torch.cat(
            [torch.stack([c.to(device) for c in counted if c is not None]), torch.stack(over)[:, None]], 1
        )
        ranks = 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(table)
            ranks = torch.distributed.get_world_size()
        rows = table.tolist()  # the only wait for the device
        for c in counted:
            if c is not None:
                clear(c)
        found = {}
        for site, (*row, beyond) in zip(names, rows, strict=True):
            if finding := self._find(site, row) or self._find_saturated(site, beyond, ranks):
                found[site] = finding
        return found

    def _find_saturated(self, site: str, beyond: float, ranks: int) -> tuple[str, bool] | None:
        inside = self.chained.get(site)
        if inside is None:
            return None
        if inside.chain.frozen is not None:
            reason = "values exceed the calibrated scale and saturate; hint: calibrate on batches like these"
            return (reason, False) if beyond else None
        # what was counted before the first check, with the guard or without it, is nobody's finding
        steps, new = self.step - inside.steps if inside.steps else 0, beyond - inside.seen
        inside.seen, inside.steps = beyond, self.step
        if steps > 1 and new > self.config.max_saturated * steps * ranks:
            return f"values exceeded the delayed scale in {new:.0f} of {steps * ranks} steps", True
        return None

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
        again = self._tell_again(site)
        self._put_back(site, f"guard: {reason}")
        return GuardEvent(self.step, site, "switched", f"{reason}; {again}")

    def _put_back(self, site: str, note: str) -> None:
        if site in self.chained:
            self._open(site, note)
        else:
            self._bind(site, LinearBinding(), note)

    def _tell_again(self, site: str) -> str:
        """What was made from the site as it ran, and must be made anew."""
        linear: nn.Module = self.chained[site].linear if site in self.chained else self.sites[site]
        compiled = [
            name or "the model"
            for name, module in self._outer.named_modules()
            if ("_orig_mod" in module._modules or module._compiled_call_impl is not None)
            and any(inner is linear for inner in module.modules())
        ]
        again = "a CUDA graph that captured it must be captured again"
        return f"{' and '.join(compiled)} compiles anew in the next step; {again}" if compiled else again

    def _open(self, site: str, note: str) -> None:
        """Put one linear of a chain back to high precision; the chain splits."""
        chain = self.chained[site].chain
        for _, layer in list(interactions_of(self.model)):  # a node around a chain needs all of it
            if any(module is chain.linears[0] for module in layer.modules()):
                release_interaction(layer)
        chain.split(site)
        self.opened[site] = note
        self._find_chained()

    def _redecide(self, site: str, reason: str) -> GuardEvent:
        assert self.decide is not None
        if self.switches >= self.config.max_switches:
            return GuardEvent(self.step, site, "capped", f"{reason}; {self.switches} switches are the limit")
        if site in self.chained:  # of a chain only high precision can be asked for
            if self.decide(site) is None:
                return GuardEvent(self.step, site, "reported", f"{reason}; the decision stands")
            again = self._tell_again(site)
            self._open(site, f"decided anew: {reason}")
            return GuardEvent(self.step, site, "rebound", f"{reason}; in high precision now; {again}")
        binding = self.decide(site)
        if binding is None or binding == self.sites[site].binding:
            return GuardEvent(self.step, site, "reported", f"{reason}; the decision stands")
        self._bind(site, binding, f"decided anew: {reason}")
        return GuardEvent(self.step, site, "rebound", f"{reason}; now {binding}; {self._tell_again(site)}")


def _spell(binding: LinearBinding) -> dict[str, Any]:
    """A binding as JSON; what `auto` came to is left out, since it is found anew."""
    spelled: dict[str, Any] = {name: getattr(binding, name) for name in ("save", "weights", "quantizer")}
    spelled["scaling"] = {"history": binding.scaling.history, "margin": binding.scaling.margin}
    for gemm in GEMMS:
        bound: GemmWay | None = getattr(binding, gemm)
        spelled[gemm] = None if bound is None else {
            "backend": bound.backend, "a": str(bound.a), "b": str(bound.b), "fast_accum": bound.fast_accum
        }  # fmt: skip
    return spelled


def _parse(spelled: Mapping[str, Any]) -> LinearBinding:
    """The inverse."""

    def bound(gemm: str) -> GemmWay | None:
        g = spelled[gemm]
        return None if g is None else GemmWay.parse(f"{g['a']}@{g['b']}/{g['backend']}", fast_accum=g["fast_accum"])

    fprop, dgrad, wgrad = (bound(gemm) for gemm in GEMMS)
    rest = {name: spelled[name] for name in ("save", "weights", "quantizer")}
    return LinearBinding(fprop, dgrad, wgrad, scaling=Scaling(**spelled["scaling"]), **rest)
